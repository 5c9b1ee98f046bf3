/* Families of chat templates as data. Only chat*.c use it. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* Where a system message goes. */
typedef enum chat_system {
    SYSTEM_TURN,  /* it is a turn like the others */
    SYSTEM_FIRST, /* into the first user's turn, before the content */
    SYSTEM_LAST,  /* into the last one */
    SYSTEM_REFUSED,
    SYSTEM_HEADED,  /* a turn that is always there and begins with `heading` */
    SYSTEM_SWITCHES /* SmolLM3: text behind `heading` that is always there; the message may hold /think, /no_think and
                       /system_override */
} chat_system;

typedef struct chat_turn {
    const char *before, *after; /* "\1" stands for BOS, "\2" for EOS, "\3" for the date */
} chat_turn;

typedef struct chat_style {
    const char *name;
    const char *has[6], *lacks[3]; /* expressions of its templates, as chat_recognise spells them */
    bool newlines;                 /* a newline stands behind each turn in the template's own text */
    chat_system system_place;
    chat_turn system, user, assistant;
    const char *generation;    /* what makes the assistant answer; every assistant's content stands behind it */
    const char *last_after;    /* instead of assistant.after for the last message, or NULL */
    const char *heading;       /* SYSTEM_HEADED, SYSTEM_SWITCHES */
    const char *date;          /* "26 Jul 2024" where none is given, NULL: one must be */
    bool dates, whole_months;  /* it writes a date; "November", not "Nov" */
    bool trims, trims_answers; /* white space around contents; around the assistant's only */
    bool trims_whole;          /* system message and content together, where the user's turn holds both */
    bool alternates;           /* user and assistant take turns, and begin with the user */
    bool thinks;               /* Qwen3: what lies between <think> and </think> is kept in the last answers only */
} chat_style;

/* What a template says, beside its family. */
typedef struct chat_template {
    const chat_style *style;
    bool bos;             /* it begins with BOS */
    bool eos;             /* EOS stands at the end where nothing is to be answered */
    char *default_system; /* a system turn's text where the conversation has none, or NULL; owned */
    char *persona[2];     /* SYSTEM_SWITCHES: the same, without and with thoughts */
} chat_template;

/* The family of a template, or ERR_DATA with its first 60 characters and the families that are known. */
int chat_recognise(const char *template, const char *path, chat_template *out);
void chat_template_free(chat_template *t);
