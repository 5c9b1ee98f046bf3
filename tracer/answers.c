#include "tracer/answers.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/progress.h"

#include <stdio.h>

/* The answer of a text: from the journal, or from the model. */
static int answer_one(const answers *a, generator *g, text_list *texts, size_t i, int32_t *answer, double *done) {
    text_sequence *s = &texts->item[i];
    size_t n;
    if (a->journal && i < resume_answers(a->journal)) {
        TRY(resume_take_answer(a->journal, answer, (size_t)a->generate->n, &n));
        progress_at(*done += (double)(s->n + n));
    } else {
        int code = generate_answer(g, s->id, s->n, (uint32_t)i, answer, &n, done);
        if (code) return err_prefix(code, "%s", s->name);
        if (a->journal) TRY(resume_add_answer(a->journal, answer, n));
    }
    return texts_append(a->ask, a->tokenizer, answer, n, s);
}

static void show(const text_sequence *s, bool ended) {
    int64_t from = s->offset[s->n_given], end = s->offset[s->n - ended];
    fwrite(s->pieces.data + from, 1, (size_t)(end - from), stdout);
    putchar('\n');
}

static void say_answers(const answers *a, const generator *g, const text_list *texts, double seconds) {
    size_t ended = 0;
    double tokens = 0;
    for (size_t i = 0; i < texts->n; i++) {
        const text_sequence *s = &texts->item[i];
        bool ends = generate_ends(g, s->id[s->n - 1]);
        say_more("%s: %zu tokens generated, %s", s->name, s->n - s->n_given,
                 ends ? "the model ended there" : "as many as were asked for");
        if (a->show) show(s, ends);
        ended += ends;
        tokens += (double)(s->n - s->n_given);
    }
    say("%.0f tokens generated in %.2f s, %s; %zu of %zu answers ended by themselves", tokens, seconds,
        a->generate->temperature > 0 ? "drawn" : "the most likely ones", ended, texts->n);
}

static int answer_with(const answers *a, generator *g, text_list *texts, int32_t *answer) {
    double start = progress_seconds(), done = 0;
    int code = 0;
    progress_begin("generate", "tokens", texts_tokens(texts, 0) + (double)texts->n * a->generate->n);
    for (size_t i = 0; i < texts->n && !code; i++) code = answer_one(a, g, texts, i, answer, &done);
    progress_end();
    if (!code) say_answers(a, g, texts, progress_seconds() - start);
    return code;
}

/* An answer that ends at once leaves nothing to count: its text is left out, unless it is the only one. */
static int leave_out(text_list *texts) {
    size_t n_short = 0;
    for (size_t i = 0; i < texts->n; i++) n_short += texts->item[i].n < texts->item[i].n_given + 2;
    if (n_short == texts->n)
        return err_set(ERR_DATA, "%s: the model ends its answer at once; no step is left to count",
                       texts->item[0].name);
    for (size_t i = texts->n; i-- > 0;) {
        const text_sequence *s = &texts->item[i];
        if (s->n >= s->n_given + 2) continue;
        say("%s: the model ends its answer at once; the text is left out", s->name);
        text_list_drop(texts, i);
    }
    return 0;
}

int answers_add(const answers *a, text_list *texts) {
    generator *g;
    TRY(generator_new(a->generate, a->model, a->backend, a->state, a->tokenizer, &g));
    int32_t *answer = mem_new((size_t)a->generate->n, sizeof *answer, "answer");
    int code = answer ? answer_with(a, g, texts, answer) : ERR_DATA;
    mem_free(answer);
    generator_free(g);
    if (!code && a->ask->prompt < 0) code = leave_out(texts);
    for (size_t i = 0; i < texts->n && !code; i++) code = texts_check(a->ask, &texts->item[i]);
    return code;
}
