#include "traces/compare.h"
#include "base/err.h"
#include "base/half.h"
#include "base/mem.h"
#include "traces/kernels.h"
#include "traces/reader_private.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { ROWS_AT_ONCE = 64, BLOCK_VALUES = 1 << 22, RANK_MAX = 4 };

/* Two traces and the sequence being compared. */
typedef struct pair {
    trace *t[2];
    pool *p;
    size_t seq;
    cJSON *datasets;
} pair;

static const trace_sequence *sequence_of(const pair *c, int side) {
    return trace_get_sequence(c->t[side], c->seq);
}

static cJSON *add_dataset(const pair *c, const char *path) {
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "path", path);
    cJSON_AddItemToArray(c->datasets, o);
    return o;
}

static void add_two(cJSON *o, const char *key, const char *a, const char *b) {
    cJSON *two = cJSON_AddArrayToObject(o, key);
    cJSON_AddItemToArray(two, cJSON_CreateString(a));
    cJSON_AddItemToArray(two, cJSON_CreateString(b));
}

/* ---- differences ------------------------------------------------------------------------------------------------ */

typedef struct difference {
    double n, sum, most;     /* of |a - b| */
    double square, square_a; /* sums of (a - b)^2 and of a^2 */
} difference;

/* A NaN stays the largest. */
static double larger(double a, double b) {
    return b <= a || isnan(a) ? a : b;
}

static void add_values(difference *d, const float *a, const float *b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        double apart = fabs((double)a[i] - (double)b[i]);
        d->sum += apart;
        d->most = larger(d->most, apart);
        d->square += apart * apart;
        d->square_a += (double)a[i] * (double)a[i];
    }
    d->n += (double)n;
}

static cJSON *report(const pair *c, const char *path, const difference *d) {
    cJSON *o = add_dataset(c, path);
    cJSON_AddNumberToObject(o, "mean", d->n > 0 ? d->sum / d->n : 0);
    cJSON_AddNumberToObject(o, "max", d->most);
    return o;
}

static void report_agreement(const pair *c, const char *path, double same, double n) {
    cJSON_AddNumberToObject(add_dataset(c, path), "agree", n > 0 ? same / n : 1);
}

/* ---- datasets as they are stored -------------------------------------------------------------------------------- */

/* A dataset of floats of one trace, read block by block. */
typedef struct source {
    hid_t set;
    bool f16;
    hsize_t dims[RANK_MAX];
    float *values;
    half *stored;
} source;

static int read_source(source *s, int rank, const hsize_t *start, const hsize_t *count, size_t n) {
    if (!s->f16) return hdf_read_block(s->set, H5T_NATIVE_FLOAT, rank, start, count, s->values);
    TRY(hdf_read_block(s->set, hdf_f16(), rank, start, count, s->stored));
    reader_widen(s->stored, sizeof *s->stored, s->values, n);
    return 0;
}

static int open_source(source *s, hid_t h5, const char *path, int rank) {
    TRY(hdf_open_dataset(h5, path, HDF_FLOAT, rank, s->dims, &s->set));
    hid_t type = H5Dget_type(s->set);
    s->f16 = H5Tequal(type, hdf_f16()) > 0;
    H5Tclose(type);
    return 0;
}

static void close_source(source *s) {
    if (s->set >= 0) H5Dclose(s->set);
    mem_free(s->values);
    mem_free(s->stored);
}

/* The next block in index order; false after the last. */
static bool next_block(int rank, const hsize_t *dims, const hsize_t *step, hsize_t *start) {
    for (int d = rank - 1; d >= 0; d--) {
        start[d] += step[d];
        if (start[d] < dims[d]) return true;
        start[d] = 0;
    }
    return false;
}

/* Blocks are whole in the last dimension and as high as memory allows in the one before it. */
static int add_blocks(source s[2], int rank, difference *out) {
    hsize_t *dims = s[0].dims, step[RANK_MAX] = {1, 1, 1, 1}, start[RANK_MAX] = {0}, count[RANK_MAX];
    size_t cols = (size_t)dims[rank - 1], rows = rank > 1 ? (size_t)dims[rank - 2] : 1;
    if (cols && rows > BLOCK_VALUES / cols) rows = BLOCK_VALUES / cols ? BLOCK_VALUES / cols : 1;
    step[rank - 1] = cols;
    if (rank > 1) step[rank - 2] = rows;
    for (int d = 0; d < rank; d++)
        if (!dims[d]) return 0;
    for (int side = 0; side < 2; side++) {
        s[side].values = mem_new(rows * cols, sizeof *s[side].values, "values");
        s[side].stored = mem_new(rows * cols, sizeof *s[side].stored, "values");
        if (!s[side].values || !s[side].stored) return ERR_DATA;
    }
    do {
        size_t n = 1;
        for (int d = 0; d < rank; d++) {
            count[d] = dims[d] - start[d] < step[d] ? dims[d] - start[d] : step[d];
            n *= (size_t)count[d];
        }
        for (int side = 0; side < 2; side++) TRY(read_source(&s[side], rank, start, count, n));
        add_values(out, s[0].values, s[1].values, n);
    } while (next_block(rank, dims, step, start));
    return 0;
}

static bool both_have(const pair *c, const char *path) {
    return hdf_has(c->t[0]->h5, path) && hdf_has(c->t[1]->h5, path);
}

/* A dataset of floats that both traces have in the same shape; others are passed over. */
static int compare_floats(const pair *c, const char *name, int rank, bool relative) {
    char path[64];
    source s[2] = {{.set = H5I_INVALID_HID}, {.set = H5I_INVALID_HID}};
    difference d = {0};
    snprintf(path, sizeof path, "seq/%04zu/%s", c->seq, name);
    if (!both_have(c, path)) return 0;
    int code = 0;
    for (int side = 0; side < 2 && !code; side++) {
        code = open_source(&s[side], c->t[side]->h5, path, rank);
        if (code) err_prefix(code, "%s", c->t[side]->path);
    }
    bool same = !code && memcmp(s[0].dims, s[1].dims, (size_t)rank * sizeof *s->dims) == 0;
    if (same && (code = add_blocks(s, rank, &d)) != 0) err_prefix(code, "%s", path);
    close_source(&s[0]);
    close_source(&s[1]);
    if (code || !same) return code;
    cJSON *o = report(c, name, &d);
    if (relative) cJSON_AddNumberToObject(o, "relative", d.square_a > 0 ? sqrt(d.square / d.square_a) : 0);
    return 0;
}

/* A dataset of i32 [rows][cols] of both traces. */
static int read_ids(const pair *c, const char *name, int64_t dims[2][2], int32_t *id[2], bool *both) {
    char path[64];
    void *values;
    snprintf(path, sizeof path, "seq/%04zu/%s", c->seq, name);
    *both = both_have(c, path);
    for (int side = 0; side < 2 && *both; side++) {
        dims[side][0] = dims[side][1] = -1;
        int code = hdf_read_all(c->t[side]->h5, path, HDF_INTEGER, H5T_NATIVE_INT32, 2, dims[side], &values);
        if (code) return err_prefix(code, "%s", c->t[side]->path);
        id[side] = values;
    }
    *both = *both && dims[0][0] == dims[1][0];
    return 0;
}

/* ---- predictions ------------------------------------------------------------------------------------------------ */

/* How many of a row's first k ids stand among the other's first k. */
static size_t common(const int32_t *a, const int32_t *b, size_t k) {
    size_t n = 0;
    for (size_t i = 0; i < k; i++) {
        size_t j = 0;
        while (j < k && b[j] != a[i]) j++;
        n += j < k;
    }
    return n;
}

static int compare_topk(const pair *c) {
    int64_t dims[2][2];
    int32_t *id[2] = {NULL, NULL};
    bool both;
    int code = read_ids(c, "logits/topk_id", dims, id, &both);
    if (!code && both) {
        size_t k = (size_t)(dims[0][1] < dims[1][1] ? dims[0][1] : dims[1][1]), same = 0;
        for (int64_t t = 0; t < dims[0][0]; t++) same += common(id[0] + t * dims[0][1], id[1] + t * dims[1][1], k);
        report_agreement(c, "logits/topk_id", (double)same, (double)dims[0][0] * (double)k);
    }
    mem_free(id[0]);
    mem_free(id[1]);
    return code;
}

static int compare_labels(const pair *c) {
    int64_t dims[2][2];
    int32_t *label[2] = {NULL, NULL};
    bool both;
    int code = read_ids(c, "grad/fisher_label", dims, label, &both);
    if (!code && both) {
        double same = 0, n = 0;
        for (int64_t i = 0; i < dims[0][0] * dims[0][1]; i++) {
            n += label[0][i] >= 0;
            same += label[0][i] >= 0 && label[0][i] == label[1][i];
        }
        report_agreement(c, "grad/fisher_label", same, n);
    }
    mem_free(label[0]);
    mem_free(label[1]);
    return code;
}

static int compare_logits(const pair *c) {
    const trace_sequence *a = sequence_of(c, 0), *b = sequence_of(c, 1);
    TRY(compare_floats(c, "logits/target_logprob", 1, false));
    if (a->correct && b->correct) {
        double same = 0;
        for (int32_t t = 0; t + 1 < a->n_tokens; t++) same += a->correct[t] == b->correct[t];
        report_agreement(c, "logits/correct", same, a->n_tokens - 1);
    }
    TRY(compare_floats(c, "logits/entropy", 1, false));
    TRY(compare_topk(c));
    TRY(compare_floats(c, "logits/topk_logprob", 2, false));
    return compare_floats(c, "logits/full", 2, false);
}

/* ---- attention and gradients ------------------------------------------------------------------------------------ */

/* One layer of both traces. */
typedef struct layer_pair {
    trace_layer *l[2];
    float *rows[2]; /* [n_head][n][stride] */
    size_t n, stride, T;
    int32_t row0;
    difference *head; /* [n_head] */
} layer_pair;

static int rows_of_head(void *context, size_t head, int worker) {
    (void)worker;
    const layer_pair *y = context;
    for (size_t r = 0; r < y->n; r++) {
        size_t at = (head * y->n + r) * y->stride;
        add_values(&y->head[head], y->rows[0] + at, y->rows[1] + at, (size_t)y->row0 + r + 1);
    }
    return 0;
}

static int compare_rows(const pair *c, layer_pair *y) {
    for (y->row0 = 0; (size_t)y->row0 < y->T; y->row0 += ROWS_AT_ONCE) {
        y->n = y->T - (size_t)y->row0 < ROWS_AT_ONCE ? y->T - (size_t)y->row0 : ROWS_AT_ONCE;
        y->stride = kernel_pad((size_t)y->row0 + y->n);
        for (int side = 0; side < 2; side++)
            TRY(trace_layer_rows(y->l[side], y->row0, (int32_t)y->n, y->rows[side], y->stride, c->p));
        TRY(pool_run(c->p, (size_t)c->t[0]->model.n_head, rows_of_head, y));
    }
    return 0;
}

/* norm(b) / norm(a) and the cosine between the two, of one label set in one layer. */
typedef struct likeness {
    double norm_ratio, cosine;
} likeness;

static likeness likeness_of(const float *a, const float *b, size_t n) {
    double aa = 0, bb = 0, ab = 0;
    for (size_t i = 0; i < n; i++) {
        aa += (double)a[i] * (double)a[i];
        bb += (double)b[i] * (double)b[i];
        ab += (double)a[i] * (double)b[i];
    }
    if (aa == 0 || bb == 0) return aa == bb ? (likeness){1, 1} : (likeness){bb > 0 ? INFINITY : 0, 0};
    return (likeness){sqrt(bb / aa), ab / sqrt(aa * bb)};
}

static double off_one(double ratio) {
    return fabs(log(ratio));
}

static likeness worse(likeness a, likeness b) {
    return (likeness){off_one(b.norm_ratio) <= off_one(a.norm_ratio) ? a.norm_ratio : b.norm_ratio,
                      b.cosine >= a.cosine ? a.cosine : b.cosine};
}

/* The worst of label sets first .. last of the layer. */
static likeness compare_sets(const pair *c, const layer_pair *y, int first, int last) {
    const trace_model *m = &c->t[0]->model;
    size_t n = (size_t)m->n_head * y->T * (size_t)m->head_dim;
    likeness worst = {1, 1};
    for (int set = first; set <= last; set++)
        worst = worse(worst, likeness_of(trace_layer_grad(y->l[0], set, 0), trace_layer_grad(y->l[1], set, 0), n));
    return worst;
}

static void report_gradient(const pair *c, const char *path, const likeness *layer, int n) {
    cJSON *o = add_dataset(c, path), *layers = cJSON_AddArrayToObject(o, "layers");
    int ratio = 0, cosine = 0;
    for (int i = 0; i < n; i++) {
        cJSON *each = cJSON_CreateObject();
        cJSON_AddNumberToObject(each, "norm_ratio", layer[i].norm_ratio);
        cJSON_AddNumberToObject(each, "cosine", layer[i].cosine);
        cJSON_AddItemToArray(layers, each);
        if (off_one(layer[i].norm_ratio) > off_one(layer[ratio].norm_ratio)) ratio = i;
        if (layer[i].cosine < layer[cosine].cosine) cosine = i;
    }
    cJSON_AddNumberToObject(o, "norm_ratio", layer[ratio].norm_ratio);
    cJSON_AddNumberToObject(o, "norm_ratio_layer", ratio);
    cJSON_AddNumberToObject(o, "cosine", layer[cosine].cosine);
    cJSON_AddNumberToObject(o, "cosine_layer", cosine);
}

/* What is gathered over the layers. */
typedef struct gathered {
    trace_form form[2];
    difference *head;        /* [n_head] */
    likeness *loss, *fisher; /* [n_layer] */
    bool has_loss;
    int n_fisher; /* samples in both */
} gathered;

static int compare_layer(const pair *c, int layer, layer_pair *y, gathered *g) {
    int code = 0;
    for (int side = 0; side < 2 && !code; side++) {
        code = trace_layer_open(c->t[side], c->seq, layer, g->form[side], c->p, &y->l[side]);
        if (!code && g->has_loss) code = trace_layer_read_grad(y->l[side], 0, y->l[side]->n_tokens, c->p);
    }
    if (!code) code = compare_rows(c, y);
    if (!code && g->has_loss) {
        g->loss[layer] = compare_sets(c, y, 0, 0);
        g->fisher[layer] = compare_sets(c, y, 1, g->n_fisher);
    }
    for (int side = 0; side < 2; side++) {
        trace_layer_close(y->l[side]);
        y->l[side] = NULL;
    }
    return code;
}

static void report_layers(const pair *c, const gathered *g) {
    static const char *const name[] = {[TRACE_FACTORED] = "factored", [TRACE_DENSE] = "dense"};
    const trace_model *m = &c->t[0]->model;
    difference all = {0};
    for (int h = 0; h < m->n_head; h++) {
        all.n += g->head[h].n;
        all.sum += g->head[h].sum;
        all.most = larger(all.most, g->head[h].most);
    }
    add_two(report(c, "attention rows", &all), "forms", name[g->form[0]], name[g->form[1]]);
    if (g->has_loss) report_gradient(c, "grad/loss", g->loss, m->n_layer);
    if (g->n_fisher) report_gradient(c, "grad/fisher", g->fisher, m->n_layer);
}

static int compare_layers(const pair *c) {
    const trace_sequence *s[2] = {sequence_of(c, 0), sequence_of(c, 1)};
    const trace_model *m = &c->t[0]->model;
    size_t T = (size_t)s[0]->n_tokens, floats = (size_t)m->n_head * ROWS_AT_ONCE * kernel_pad(T);
    bool dense = s[0]->has_dense && s[1]->has_dense;
    gathered g = {.has_loss = s[0]->has_grad_loss && s[1]->has_grad_loss};
    if (g.has_loss) g.n_fisher = s[0]->n_fisher < s[1]->n_fisher ? s[0]->n_fisher : s[1]->n_fisher;
    for (int side = 0; side < 2; side++) {
        if (!s[side]->has_dense && !s[side]->has_factored) return 0;
        g.form[side] = dense || !s[side]->has_factored ? TRACE_DENSE : TRACE_FACTORED;
    }
    g.head = mem_new((size_t)m->n_head, sizeof *g.head, "heads");
    g.loss = mem_new((size_t)m->n_layer, sizeof *g.loss, "layers");
    g.fisher = mem_new((size_t)m->n_layer, sizeof *g.fisher, "layers");
    layer_pair y = {.T = T, .head = g.head};
    for (int side = 0; side < 2; side++) y.rows[side] = mem_new(floats, sizeof(float), "rows");
    int code = g.head && g.loss && g.fisher && y.rows[0] && y.rows[1] ? 0 : ERR_DATA;
    for (int layer = 0; layer < m->n_layer && !code; layer++) code = compare_layer(c, layer, &y, &g);
    if (!code) report_layers(c, &g);
    mem_free(y.rows[0]);
    mem_free(y.rows[1]);
    mem_free(g.head);
    mem_free(g.loss);
    mem_free(g.fisher);
    return code;
}

/* ---- traces ----------------------------------------------------------------------------------------------------- */

static int check_numbers(trace *const t[2]) {
    const trace_model *a = &t[0]->model, *b = &t[1]->model;
    const struct {
        const char *name;
        int64_t a, b;
    } number[] = {{"n_layer", a->n_layer, b->n_layer},
                  {"n_head", a->n_head, b->n_head},
                  {"n_kv_head", a->n_kv_head, b->n_kv_head},
                  {"head_dim", a->head_dim, b->head_dim},
                  {"n_vocab", a->n_vocab, b->n_vocab},
                  {"the number of sequences", (int64_t)t[0]->n_seq, (int64_t)t[1]->n_seq}};
    for (size_t i = 0; i < sizeof number / sizeof *number; i++)
        if (number[i].a != number[i].b)
            return err_set(ERR_DATA, "%s and %s cannot be compared: %s is %lld and %lld", t[0]->path, t[1]->path,
                           number[i].name, (long long)number[i].a, (long long)number[i].b);
    return 0;
}

static int check_tokens(const pair *c) {
    const trace_sequence *a = sequence_of(c, 0), *b = sequence_of(c, 1);
    const char *path[2] = {c->t[0]->path, c->t[1]->path};
    if (a->n_tokens != b->n_tokens)
        return err_set(ERR_DATA, "%s and %s cannot be compared: seq/%04zu has %d and %d tokens", path[0], path[1],
                       c->seq, a->n_tokens, b->n_tokens);
    for (int side = 0; side < 2; side++)
        if (!sequence_of(c, side)->tokens)
            return err_set(ERR_DATA, "%s: seq/%04zu has no tokens, by which it could be compared", path[side], c->seq);
    for (int32_t t = 0; t < a->n_tokens; t++)
        if (a->tokens[t] != b->tokens[t])
            return err_set(ERR_DATA, "%s and %s cannot be compared: token %d of seq/%04zu is %d and %d", path[0],
                           path[1], t, c->seq, a->tokens[t], b->tokens[t]);
    return 0;
}

static int add_differing(trace *const t[2], cJSON *list) {
    static const char *const fact[] = {"name", "arch", "rope", "backend", "device", "compute", "command", "creator"};
    int code = 0;
    for (size_t i = 0; i < sizeof fact / sizeof *fact && !code; i++) {
        char *value[2] = {mem_string(""), mem_string("")};
        if (!value[0] || !value[1]) code = ERR_DATA;
        for (int side = 0; side < 2 && !code; side++) code = hdf_get_text(t[side]->h5, fact[i], false, &value[side]);
        if (!code && strcmp(value[0], value[1]) != 0) {
            cJSON *o = cJSON_CreateObject();
            cJSON_AddStringToObject(o, "fact", fact[i]);
            cJSON_AddStringToObject(o, "a", value[0]);
            cJSON_AddStringToObject(o, "b", value[1]);
            cJSON_AddItemToArray(list, o);
        }
        mem_free(value[0]);
        mem_free(value[1]);
    }
    return code;
}

/* Datasets of the sequence that only one of the traces has. */
static int add_only(const pair *c, cJSON *only) {
    char prefix[16];
    int length = snprintf(prefix, sizeof prefix, "seq/%04zu/", c->seq);
    for (int side = 0; side < 2; side++) {
        cJSON *list = cJSON_CreateArray();
        char **name;
        size_t n;
        cJSON_AddItemToArray(only, list);
        TRY(hdf_list_datasets(c->t[side]->h5, &name, &n));
        for (size_t i = 0; i < n; i++)
            if (strncmp(name[i], prefix, (size_t)length) == 0 && !hdf_has(c->t[!side]->h5, name[i]))
                cJSON_AddItemToArray(list, cJSON_CreateString(name[i] + length));
        hdf_free_names(name, n);
    }
    return 0;
}

static int compare_sequence(pair *c, cJSON *list) {
    TRY(check_tokens(c));
    char name[16];
    cJSON *o = cJSON_CreateObject();
    cJSON_AddItemToArray(list, o);
    snprintf(name, sizeof name, "%04zu", c->seq);
    cJSON_AddStringToObject(o, "name", name);
    cJSON_AddNumberToObject(o, "tokens", sequence_of(c, 0)->n_tokens);
    c->datasets = cJSON_AddArrayToObject(o, "datasets");
    TRY(compare_logits(c));
    TRY(compare_floats(c, "attn/q", 4, true));
    TRY(compare_floats(c, "attn/k", 4, true));
    TRY(compare_floats(c, "attn/v", 4, true));
    TRY(compare_floats(c, "attn/lse", 3, false));
    TRY(compare_layers(c));
    TRY(compare_labels(c));
    return add_only(c, cJSON_AddArrayToObject(o, "only"));
}

static int compare(pair *c, cJSON *out) {
    TRY(check_numbers(c->t));
    add_two(out, "files", c->t[0]->path, c->t[1]->path);
    TRY(add_differing(c->t, cJSON_AddArrayToObject(out, "differs")));
    cJSON *list = cJSON_AddArrayToObject(out, "sequences");
    for (c->seq = 0; c->seq < c->t[0]->n_seq; c->seq++) TRY(compare_sequence(c, list));
    return 0;
}

int compare_traces(const char *a, const char *b, cJSON **out) {
    pair c = {0};
    *out = NULL;
    int code = pool_new(0, &c.p);
    if (!code) code = trace_open(a, &c.t[0]);
    if (!code) code = trace_open(b, &c.t[1]);
    cJSON *found = code ? NULL : cJSON_CreateObject();
    if (!code) code = compare(&c, found);
    if (code) cJSON_Delete(found);
    else *out = found;
    trace_close(c.t[0]);
    trace_close(c.t[1]);
    pool_free(c.p);
    return code;
}
