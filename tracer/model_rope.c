/* Rotary position embedding's frequencies and the ways to stretch them over longer texts. */
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"
#include "tracer/model_source.h"

#include <math.h>

static bool positive(double x) {
    return x > 0 && isfinite(x);
}

static int check(const char *where, const rope_ask *a) {
    if (!positive(a->base)) return err_set(ERR_DATA, "%s: RoPE base %g is not a positive number", where, a->base);
    if (a->type != ROPE_PLAIN && a->type != ROPE_LONG && !(positive(a->factor) && a->factor >= 1))
        return err_set(ERR_DATA, "%s: RoPE scaling factor %g (want 1 or more)", where, a->factor);
    if (a->type >= ROPE_LLAMA3 && !(positive(a->original) && a->original >= 1))
        return err_set(ERR_DATA, "%s: RoPE scaling needs the positions before scaling, got %g", where, a->original);
    if (a->type == ROPE_LLAMA3 && !(positive(a->low_freq_factor) && a->high_freq_factor > a->low_freq_factor))
        return err_set(ERR_DATA, "%s: RoPE scaling llama3 with frequency factors %g and %g (want 0 < low < high)",
                       where, a->low_freq_factor, a->high_freq_factor);
    if (a->type == ROPE_YARN && !(positive(a->beta_slow) && a->beta_fast >= a->beta_slow))
        return err_set(ERR_DATA, "%s: RoPE scaling yarn with betas %g and %g (want fast >= slow > 0)", where,
                       a->beta_fast, a->beta_slow);
    if (a->type == ROPE_LONG && !a->divisor)
        return err_set(ERR_DATA, "%s: RoPE scaling longrope without its factors", where);
    return 0;
}

/* Wavelengths beyond what the model was trained on are stretched, short ones stay, those between are blended. */
static double llama3(const rope_ask *a, double inverse) {
    double wavelength = 2 * M_PI / inverse;
    if (wavelength > a->original / a->low_freq_factor) return inverse / a->factor;
    if (wavelength < a->original / a->high_freq_factor) return inverse;
    double blend = (a->original / wavelength - a->low_freq_factor) / (a->high_freq_factor - a->low_freq_factor);
    return (1 - blend) * inverse / a->factor + blend * inverse;
}

/* The dimension that turns `turns` times over the original positions. */
static double turning_dimension(const rope_ask *a, int32_t dims, double turns) {
    return dims * log(a->original / (turns * 2 * M_PI)) / (2 * log(a->base));
}

static double yarn(const rope_ask *a, int32_t dims, int32_t i, double inverse) {
    double low = turning_dimension(a, dims, a->beta_fast), high = turning_dimension(a, dims, a->beta_slow);
    if (a->truncate) low = floor(low), high = ceil(high);
    low = fmax(low, 0);
    high = fmin(high, dims - 1);
    if (low == high) high += 0.001;
    double ramp = fmin(fmax((i - low) / (high - low), 0), 1);
    return inverse / a->factor * ramp + inverse * (1 - ramp);
}

static double frequency(const rope_ask *a, int32_t dims, int32_t i) {
    double inverse = pow(a->base, -2.0 * i / dims);
    if (a->divisor) inverse /= (double)a->divisor[i];
    switch (a->type) {
    case ROPE_LINEAR:
        return inverse / a->factor;
    case ROPE_LLAMA3:
        return llama3(a, inverse);
    case ROPE_YARN:
        return yarn(a, dims, i, inverse);
    default:
        return inverse;
    }
}

static double attention_factor(const rope_ask *a) {
    if (a->attention_factor > 0) return a->attention_factor;
    if (a->type == ROPE_YARN) return 0.1 * log(a->factor) + 1;
    if (a->type != ROPE_LONG || a->factor <= 1) return 1;
    return sqrt(1 + log(a->factor) / log(a->original)); /* Ding et al. 2024 */
}

static int describe(model *m, const rope_ask *a) {
    static const char *const names[] = {"", ", linear", ", llama3", ", yarn", ", longrope"};
    text t = {0};
    char base[32], factor[32];
    if (m->rope_text && text_add(&t, "%s; with a window: ", m->rope_text)) return ERR_DATA;
    TRY(text_add(&t, "base %s, %s, %d dims%s", text_number(base, a->base),
                 m->rope_kind == ARCH_ROPE_INTERLEAVED ? "interleaved" : "neox", m->rope_dims, names[a->type]));
    if (a->type != ROPE_PLAIN && a->type != ROPE_LONG) TRY(text_add(&t, " %s", text_number(factor, a->factor)));
    if (a->type == ROPE_PLAIN && a->divisor) TRY(text_add(&t, ", llama3"));
    mem_free(m->rope_text);
    m->rope_text = t.data;
    return 0;
}

int model_add_rope(model *m, const char *where, const rope_ask *ask) {
    TRY(check(where, ask));
    model_rope *r = &m->rope[m->n_rope];
    r->inverse = mem_new((size_t)m->rope_dims / 2, sizeof *r->inverse, "RoPE");
    if (!r->inverse) return ERR_DATA;
    m->n_rope++;
    r->scale = attention_factor(ask);
    for (int32_t i = 0; i < m->rope_dims / 2; i++) {
        r->inverse[i] = frequency(ask, m->rope_dims, i);
        if (!positive(r->inverse[i])) return err_set(ERR_DATA, "%s: RoPE frequency %d is %g", where, i, r->inverse[i]);
    }
    return describe(m, ask);
}

int model_describe_layers(model *m) {
    text t = {0};
    int code = text_add(&t, "%s", m->rope_text ? m->rope_text : "learned positions");
    bool first = true;
    for (int32_t i = 0; i < m->n_layer && !code && m->n_rope; i++) {
        if (m->layer[i].rope >= 0) continue;
        code = text_add(&t, first ? "; none in layers %d" : ", %d", i);
        first = false;
    }
    mem_free(m->rope_text);
    m->rope_text = t.data;
    return code;
}
