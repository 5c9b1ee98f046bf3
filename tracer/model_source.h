/* What model_open's two ways share: weights taken by name and checked, and RoPE's frequencies. Only model*.c use it. */
#pragma once

#include "tracer/model.h"

#include <stdbool.h>

/* An open GGUF file or folder. */
typedef struct model_source {
    const tensor *(*find)(const struct model_source *s, const char *name); /* NULL if absent */
    size_t (*count)(const struct model_source *s);
    const tensor *(*at)(const struct model_source *s, size_t i);
    int (*tokenizer)(const model *m, tokenizer **out);
    int (*chat_template)(const model *m, char **out);
    void (*close)(struct model_source *s);
    bool gguf;
} model_source;

/* Fill m->arch, the numbers and m->source from the file; what is set so far is released by model_close on failure. */
int model_open_gguf(const char *path, model *m);
int model_open_folder(const char *path, model *m);

enum { MODEL_DIMENSION_MAX = 1 << 24, MODEL_LAYERS_MAX = 1 << 20 };

/* How positions become angles. */
typedef enum rope_type { ROPE_PLAIN, ROPE_LINEAR, ROPE_LLAMA3, ROPE_YARN, ROPE_LONG } rope_type;
typedef struct rope_ask {
    rope_type type;
    double base;
    double factor;                            /* how much longer texts may be: LINEAR, LLAMA3, YARN, LONG */
    double original;                          /* LLAMA3, YARN, LONG: positions before scaling */
    double low_freq_factor, high_freq_factor; /* LLAMA3 (Grattafiori et al. 2024) */
    double beta_fast, beta_slow;              /* YARN (Peng et al. 2023): 32, 1 */
    bool truncate;                            /* YARN: whole dimensions bound the ramp */
    double attention_factor;                  /* YARN, LONG; 0: by the paper's formula */
    const float *divisor; /* [rope_dims/2] of the frequencies, or NULL: LONG's for short texts, GGUF's rope_freqs */
} rope_ask;

/* Make m->rope[m->n_rope++] and add its description to m->rope_text, whose dims are known; a second one is that
 * of the layers with a window. ERR_DATA with a message that
 * names `where` for numbers that make no sense. */
int model_add_rope(model *m, const char *where, const rope_ask *ask);
/* Once each layer has its rope: add to m->rope_text which have none, or that positions are learned. ERR_DATA: memory.
 */
int model_describe_layers(model *m);

/* m->layer, embedding and the rest by name; n_vocab from the embedding. ERR_DATA for what is missing or has another
 * shape. */
int model_find_weights(model *m);

/* Say how many tensors nothing uses. `known` (may be NULL) tells names that are no weights. */
void model_report_unused(const model *m, bool (*known)(const char *name));
