#include "traces/synthetic_values.h"
#include "base/rng.h"

#include <math.h>
#include <string.h>

/* What a random number is for; with the layer it makes the first word of the counter. */
typedef enum stream {
    STREAM_HEAD,
    STREAM_FREQUENCY,
    STREAM_SEGMENT,
    STREAM_TOPIC,
    STREAM_KEY,
    STREAM_USE,
    STREAM_QUERY,
    STREAM_VALUE,
    STREAM_TOKEN,
    STREAM_PREDICTION,
    STREAM_LABEL,
    STREAM_WAVER,
    STREAM_GRADIENT /* + label set: the last one */
} stream;

enum { STREAM_SHIFT = 16, TOPICS = 24, TOPIC_STEPS = 48, TOPIC_DIMS_MOST = 64 };
static const double FREQUENCY_MOST = 1.5, FREQUENCY_LEAST = 1.0 / 32768, USE_MEAN = 1, USE_MOST = 8, TOPICS_ALIKE = 0.6;
static const float SINK_OF[SYNTHETIC_SINKS] = {1.0f, 0.6f, 0.5f, 0.4f};

static rng_block draw(const synthetic_shape *s, int kind, int layer, uint32_t a, uint32_t b, uint32_t c) {
    return rng_philox(s->seed, ((uint32_t)kind << STREAM_SHIFT) + (uint32_t)layer, a, b, c);
}

static double between(double low, double high, uint32_t word) {
    return low + (high - low) * rng_uniform(word);
}

/* Nearly normal, mean 0, variance 1: the sum of a word's four bytes. */
static float normal(uint32_t word) {
    uint32_t sum = (word & 255) + (word >> 8 & 255) + (word >> 16 & 255) + (word >> 24);
    return ((float)sum - 510.0f) * (1.0f / 147.7994f);
}

static void normals(const synthetic_shape *s, int kind, int layer, int head, int32_t row, size_t n, float *out) {
    for (size_t i = 0; i < n; i += 4) {
        rng_block b = draw(s, kind, layer, (uint32_t)head, (uint32_t)row, (uint32_t)(i / 4));
        for (size_t j = 0; j < 4 && i + j < n; j++) out[i + j] = normal(b.v[j]);
    }
}

/* ---- what a head is --------------------------------------------------------------------------------------------- */

/* Coordinates: the sink, `pairs` pairs of position, `topic` of topic, `noise` of noise. */
typedef struct parts {
    size_t pairs, topic, noise;
} parts;

static parts parts_of(const synthetic_shape *s) {
    size_t d = (size_t)s->head_dim;
    parts p = {.pairs = d / 4, .topic = 3 * d / 16};
    if (p.topic > TOPIC_DIMS_MOST) p.topic = TOPIC_DIMS_MOST;
    p.noise = d - 1 - 2 * p.pairs - p.topic;
    return p;
}

typedef struct head {
    double share;        /* of the sink in a row */
    double near, reach;  /* weight falls as (t - i)^-near up to the reach */
    double topic, noise; /* factor of the topic's scores; standard deviation of the noise's */
} head;

static head head_of(const synthetic_shape *s, int layer, int h) {
    rng_block a = draw(s, STREAM_HEAD, layer, (uint32_t)h, 0, 0), b = draw(s, STREAM_HEAD, layer, (uint32_t)h, 0, 1);
    return (head){.share = between(0.05, 0.55, a.v[0]),
                  .near = between(0.4, 1.4, a.v[1]),
                  .reach = exp(between(log(32), log(8192), a.v[2])),
                  .topic = between(0.4, 1.6, a.v[3]),
                  .noise = between(0.3, 1.0, b.v[0])};
}

/* The j-th frequency of a kv head: one at random in each of `pairs` equal parts of the log scale. */
static double frequency(const synthetic_shape *s, const parts *p, int layer, int kv_head, size_t j) {
    rng_block b = draw(s, STREAM_FREQUENCY, layer, (uint32_t)kv_head, (uint32_t)j, 0);
    double place = ((double)j + rng_uniform(b.v[0])) / (double)p->pairs;
    return FREQUENCY_MOST * pow(FREQUENCY_LEAST / FREQUENCY_MOST, place);
}

/* What a frequency adds to the score at distance 0. */
static double weight(const parts *p, const head *h, double w) {
    return w * h->reach < 1 ? 0 : h->near * log(FREQUENCY_MOST / FREQUENCY_LEAST) / (double)p->pairs;
}

static uint32_t topic_at(const synthetic_shape *s, int32_t t) {
    return draw(s, STREAM_SEGMENT, 0, 0, (uint32_t)t / TOPIC_STEPS, 0).v[0] % TOPICS;
}

/* A topic's direction in a kv head: a unit vector, half of it what all topics have in common. */
static void topic_direction(const synthetic_shape *s, const parts *p, int layer, int kv_head, uint32_t topic,
                            float *out) {
    float common[TOPIC_DIMS_MOST], square = 0;
    normals(s, STREAM_TOPIC, layer, kv_head, (int32_t)topic, p->topic, out);
    normals(s, STREAM_TOPIC, layer, kv_head, TOPICS, p->topic, common);
    for (size_t i = 0; i < p->topic; i++) {
        out[i] += common[i];
        square += out[i] * out[i];
    }
    for (size_t i = 0; i < p->topic; i++) out[i] /= sqrtf(square + 1e-12f);
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

/* Add the pairs of position to n rows; a[j] is the amplitude of frequency w[j]. */
static void turn(const parts *p, size_t dim, const double *w, const double *a, int32_t row0, int32_t n, float *out) {
    for (int32_t r = 0; r < n; r++)
        for (size_t j = 0; j < p->pairs; j++) {
            double angle = w[j] * (double)(row0 + r);
            float *pair = out + (size_t)r * dim + 1 + 2 * j;
            pair[0] = (float)(a[j] * cos(angle));
            pair[1] = (float)(a[j] * sin(angle));
        }
}

/* How strongly an entry answers its topic. */
static double use_of(const synthetic_shape *s, int layer, int kv_head, int32_t i) {
    double use = -USE_MEAN * log(rng_uniform(draw(s, STREAM_USE, layer, (uint32_t)kv_head, (uint32_t)i, 0).v[0]));
    return use < USE_MOST ? use : USE_MOST;
}

void synthetic_key(const synthetic_shape *s, int layer, int kv_head, int32_t row0, int32_t n, float *out) {
    parts p = parts_of(s);
    size_t dim = (size_t)s->head_dim, topic = 1 + 2 * p.pairs, noise = topic + p.topic;
    double w[p.pairs], one[p.pairs];
    for (size_t j = 0; j < p.pairs; j++) w[j] = frequency(s, &p, layer, kv_head, j), one[j] = 1;
    turn(&p, dim, w, one, row0, n, out);
    for (int32_t r = 0; r < n; r++) {
        float *k = out + (size_t)r * dim;
        int32_t i = row0 + r;
        k[0] = 0;
        float use = (float)use_of(s, layer, kv_head, i);
        topic_direction(s, &p, layer, kv_head, topic_at(s, i), k + topic);
        for (size_t c = 0; c < p.topic; c++) k[topic + c] *= use;
        normals(s, STREAM_KEY, layer, kv_head, i, p.noise, k + noise);
        if (i >= SYNTHETIC_SINKS) continue;
        memset(k, 0, dim * sizeof *k);
        k[0] = SINK_OF[i];
    }
}

void synthetic_query(const synthetic_shape *s, int layer, int h, const float *background, int32_t row0, int32_t n,
                     float *out) {
    parts p = parts_of(s);
    int kv_head = h / (s->n_head / s->n_kv_head);
    head is = head_of(s, layer, h);
    size_t dim = (size_t)s->head_dim, topic = 1 + 2 * p.pairs, noise = topic + p.topic;
    double w[p.pairs], a[p.pairs], unscale = sqrt((double)dim), sink = log(is.share / (1 - is.share));
    for (size_t j = 0; j < p.pairs; j++) {
        w[j] = frequency(s, &p, layer, kv_head, j);
        a[j] = weight(&p, &is, w[j]) * unscale;
    }
    turn(&p, dim, w, a, row0, n, out);
    for (int32_t r = 0; r < n; r++) {
        float *q = out + (size_t)r * dim, wavering;
        int32_t t = row0 + r;
        topic_direction(s, &p, layer, kv_head, topic_at(s, t), q + topic);
        for (size_t c = 0; c < p.topic; c++) q[topic + c] *= (float)(is.topic * unscale);
        normals(s, STREAM_QUERY, layer, h, t, p.noise, q + noise);
        for (size_t c = 0; c < p.noise; c++) q[noise + c] *= (float)(is.noise * unscale / sqrt((double)p.noise));
        normals(s, STREAM_WAVER, layer, h, t, 1, &wavering);
        q[0] = (float)(unscale * (sink + (double)background[t] + 0.7 * (double)wavering));
    }
}

/* Mean weight of entries whose topic is `alike` (cosine) to the query's: E exp(strength * use). */
static double mean_use(double strength, double alike) {
    double x = (strength * alike - 1 / USE_MEAN) * USE_MOST;
    return USE_MOST / USE_MEAN * (fabs(x) < 1e-9 ? 1 : expm1(x) / x) + exp(x);
}

void synthetic_background(const synthetic_shape *s, int layer, int h, int32_t n, float *out) {
    parts p = parts_of(s);
    head is = head_of(s, layer, h);
    double w[p.pairs], a[p.pairs], sum = 0;
    double rest = is.noise * is.noise / 2 + log(mean_use(is.topic, TOPICS_ALIKE));
    for (size_t j = 0; j < p.pairs; j++) {
        w[j] = frequency(s, &p, layer, h / (s->n_head / s->n_kv_head), j);
        a[j] = weight(&p, &is, w[j]);
    }
    for (int32_t distance = 0; distance < n; distance++) {
        double score = 0;
        for (size_t j = 0; j < p.pairs; j++)
            if (a[j] != 0) score += a[j] * cos(w[j] * (double)distance);
        sum += exp(score);
        out[distance] = (float)(log(sum) + rest);
    }
}

void synthetic_value(const synthetic_shape *s, int layer, int kv_head, int32_t row0, int32_t n, float *out) {
    for (int32_t r = 0; r < n; r++) {
        float *v = out + (size_t)r * (size_t)s->head_dim;
        normals(s, STREAM_VALUE, layer, kv_head, row0 + r, (size_t)s->head_dim, v);
        /* What a sink holds is small: its share of a row is to change little. */
        if (row0 + r < SYNTHETIC_SINKS)
            for (int32_t c = 0; c < s->head_dim; c++) v[c] *= 0.1f;
    }
}

void synthetic_gradient(const synthetic_shape *s, int set, int layer, int h, int32_t row0, int32_t n, float *out) {
    for (int32_t r = 0; r < n; r++) {
        float *g = out + (size_t)r * (size_t)s->head_dim;
        normals(s, STREAM_GRADIENT + set, layer, h, row0 + r, (size_t)s->head_dim, g);
        rng_block size = draw(s, STREAM_GRADIENT + set, layer, (uint32_t)h, (uint32_t)(row0 + r), UINT32_MAX);
        float factor = (float)(0.02 * exp((double)normal(size.v[0])));
        for (int32_t c = 0; c < s->head_dim; c++) g[c] *= factor;
    }
}

/* ---- text ------------------------------------------------------------------------------------------------------- */

/* Zipf's law: the logarithm of a rank is uniform. */
static int32_t zipf(uint32_t word) {
    int32_t rank = (int32_t)exp(rng_uniform(word) * log(SYNTHETIC_VOCAB + 1.0));
    return rank < 1 ? 0 : rank > SYNTHETIC_VOCAB ? SYNTHETIC_VOCAB - 1 : rank - 1;
}

int32_t synthetic_token(uint64_t seed, int32_t t) {
    return zipf(rng_philox(seed, (uint32_t)STREAM_TOKEN << STREAM_SHIFT, 0, (uint32_t)t, 0).v[0]);
}

int32_t synthetic_label(uint64_t seed, int sample, int32_t t) {
    return zipf(rng_philox(seed, (uint32_t)STREAM_LABEL << STREAM_SHIFT, (uint32_t)sample, (uint32_t)t, 0).v[0]);
}

/* Most tokens are easy and a few are very hard. */
synthetic_prediction synthetic_predict(uint64_t seed, int32_t t) {
    rng_block b = rng_philox(seed, (uint32_t)STREAM_PREDICTION << STREAM_SHIFT, 0, (uint32_t)t, 0);
    double x = -log(rng_uniform(b.v[0])), loss = 1.2 * x * x;
    /* Above one half the target is the most likely token; a tenth of the probability likely is. The most likely one has
     * at least exp(-entropy). */
    uint8_t correct = loss < log(2) || (loss < log(10) && rng_uniform(b.v[1]) < 0.5);
    double entropy = fmin(0.5 * loss + between(0.05, 2.0, b.v[2]), log(SYNTHETIC_VOCAB));
    return (synthetic_prediction){(float)-loss, (float)(correct ? fmax(entropy, loss) : entropy), correct};
}
