#include "analyze/anatomy.h"
#include "analyze/canvas.h"
#include "base/err.h"
#include "base/mem.h"
#include "base/text.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

bool anatomy_tells(size_t metric) {
    return metric == DLOSS_EST || metric == KL_EST || metric == LOST_MASS;
}

/* The calibration of a row: what its Fisher terms are multiplied by. */
static double scale_of(const result *row) {
    return row->metric[FISHER] > 0 ? row->metric[KL_EST] / row->metric[FISHER] : 0;
}

/* ---- by head ---------------------------------------------------------------------------------------------------- */

static bool has_parts(blocks_row b, size_t metric) {
    return metric == LOST_MASS || (b.head_fisher && b.fisher && (metric == KL_EST || (b.head_first && b.first)));
}

static double head_value(blocks_row b, size_t metric, double scale, size_t at) {
    if (metric == LOST_MASS) return b.head_lost_mass[at];
    double kl = scale * b.head_fisher[at];
    return metric == KL_EST ? kl : b.head_first[at] + kl;
}

static void add_row(const evidence *e, const result *row, size_t metric, double weight, head_map *to) {
    evidence_shape shape = evidence_get_shape(e, row);
    blocks_row b = evidence_row(e, row);
    double scale = scale_of(row);
    bool there = has_parts(b, metric) && !isnan(row->metric[metric]);
    for (size_t l = 0; l < to->n_layer; l++)
        for (size_t h = 0; h < to->n_head; h++) {
            bool inside = there && l < shape.n_layer && h < shape.n_head;
            double value = inside ? head_value(b, metric, scale, l * shape.n_head + h) : NAN;
            to->value[l * to->n_head + h] += weight * value;
        }
}

int head_map_new(const evidence *e, const result *config, size_t metric, head_map *out) {
    *out = (head_map){0};
    for (size_t s = 0; s < config->n_parts; s++) {
        evidence_shape shape = evidence_get_shape(e, config->part[s]);
        if (shape.n_layer > out->n_layer) out->n_layer = shape.n_layer;
        if (shape.n_head > out->n_head) out->n_head = shape.n_head;
    }
    out->value = mem_new(out->n_layer * out->n_head + 1, sizeof *out->value, "values by head");
    if (!out->value) return ERR_DATA;
    for (size_t s = 0; s < config->n_parts; s++) add_row(e, config->part[s], metric, 1 / (double)config->n_parts, out);
    return 0;
}

void head_map_free(head_map *map) {
    mem_free(map->value);
    *map = (head_map){0};
}

bool head_map_has_values(const head_map *map) {
    for (size_t i = 0; i < map->n_layer * map->n_head; i++)
        if (!isnan(map->value[i])) return true;
    return false;
}

void head_map_lowest(const head_map *map, size_t n, double least, int *out) {
    for (size_t i = 0; i < map[0].n_layer * map[0].n_head; i++) {
        size_t lowest = 0;
        double highest = -INFINITY;
        bool whole = true;
        for (size_t k = 0; k < n; k++) {
            double value = map[k].value[i];
            whole &= !isnan(value);
            if (value < map[lowest].value[i]) lowest = k;
            highest = fmax(highest, value);
        }
        double fall = highest - map[lowest].value[i];
        out[i] = whole && fall > 0 && fall >= least * fabs(highest) ? (int)lowest : -1;
    }
}

/* ---- along the text --------------------------------------------------------------------------------------------- */

static double steps_of(blocks_row b) {
    double n = 0;
    for (size_t k = 0; k < BLOCKS_PER_ROW; k++) n += b.steps[k];
    return n;
}

/* Blocks end at floor(k * n / 64) of n steps. Where every step counts, n is the sum of the counted ones. */
static bool all_counted(blocks_row b) {
    int64_t n = (int64_t)steps_of(b);
    for (int64_t k = 0; k < BLOCKS_PER_ROW; k++)
        if (b.steps[k] != (k + 1) * n / BLOCKS_PER_ROW - k * n / BLOCKS_PER_ROW) return false;
    return true;
}

static double block_sum(blocks_row b, size_t metric, double scale, size_t samples, size_t k) {
    if (metric == LOST_MASS) return b.lost_mass[k];
    double fisher = 0;
    for (size_t s = 0; s < samples; s++) fisher += b.fisher[s * BLOCKS_PER_ROW + k] / (double)samples;
    return scale * fisher + (metric == KL_EST ? 0 : b.first[k]);
}

/* Steps that do not count have a disturbance, too, but nothing tells how many a block has of them: each block then
 * stands for an equal share of the counted ones. Only counted steps have a lost mass. */
static double block_steps(blocks_row b, size_t metric, size_t k) {
    return metric == LOST_MASS || all_counted(b) ? b.steps[k] : steps_of(b) / BLOCKS_PER_ROW;
}

void anatomy_along(const evidence *e, const result *config, size_t metric, double value[BLOCKS_PER_ROW]) {
    for (size_t k = 0; k < BLOCKS_PER_ROW; k++) {
        double sum = 0, n = 0;
        for (size_t s = 0; s < config->n_parts; s++) {
            const result *row = config->part[s];
            blocks_row b = evidence_row(e, row);
            double steps = block_steps(b, metric, k);
            if (!has_parts(b, metric) || isnan(row->metric[metric]) || !(steps > 0)) continue;
            sum += block_sum(b, metric, scale_of(row), evidence_get_shape(e, row).n_fisher, k) / steps;
            n++;
        }
        value[k] = n > 0 ? sum / n : NAN;
    }
}

static bool prompt_of(const result *row, double *prompt) {
    return text_parse_number(row->n_prompt, prompt) == 0;
}

bool anatomy_bounds(const evidence *e, const result *config, double bound[BLOCKS_PER_ROW + 1]) {
    blocks_row first = evidence_row(e, config->part[0]);
    double prompt, n = steps_of(first);
    bool tokens = prompt_of(config->part[0], &prompt);
    for (size_t s = 0; s < config->n_parts; s++) {
        blocks_row b = evidence_row(e, config->part[s]);
        double other;
        tokens = tokens && all_counted(b) && steps_of(b) == n && prompt_of(config->part[s], &other) && other == prompt;
    }
    for (size_t k = 0; k <= BLOCKS_PER_ROW; k++)
        bound[k] = tokens ? prompt + floor((double)k * n / BLOCKS_PER_ROW) : 100 * (double)k / (double)BLOCKS_PER_ROW;
    return tokens;
}

void anatomy_smooth(const double value[BLOCKS_PER_ROW], size_t width, double mean[BLOCKS_PER_ROW]) {
    for (size_t k = 0; k < BLOCKS_PER_ROW; k++) {
        double sum = 0, n = 0;
        size_t before = width / 2, from = k < before ? 0 : k - before;
        for (size_t i = from; i < k + width - before && i < BLOCKS_PER_ROW; i++) {
            if (isnan(value[i])) continue;
            sum += value[i];
            n++;
        }
        mean[k] = isnan(value[k]) ? NAN : sum / n;
    }
}

/* ---- which configurations --------------------------------------------------------------------------------------- */

bool config_waits(const result *c) {
    return !result_is_oracle(c) && c->lag >= 0;
}

bool config_is_filter(const result *c) {
    return !result_is_oracle(c) && c->lag < 0;
}

bool config_better(const result *a, const result *b, size_t metric) {
    if (result_is_free(a) != result_is_free(b)) return !result_is_free(a);
    return a->metric[metric] < b->metric[metric];
}

const result *anatomy_best(const results *r, size_t metric, const char *budget_asked, config_test *passes) {
    const result *best = NULL;
    for (size_t i = 0; i < r->n_configs; i++) {
        const result *c = &r->configs[i];
        if (isnan(c->metric[metric]) || strcmp(c->budget_asked, budget_asked) != 0) continue;
        if (passes(c) && (!best || config_better(c, best, metric))) best = c;
    }
    return best;
}

const char *anatomy_budget(const results *r, size_t metric, config_test *passes) {
    size_t n = 0, seen = 0;
    for (size_t i = 0; i < r->n_budgets; i++) n += anatomy_best(r, metric, r->budgets[i].asked, passes) != NULL;
    for (size_t i = 0; i < r->n_budgets; i++)
        if (anatomy_best(r, metric, r->budgets[i].asked, passes) && seen++ == (n - 1) / 2) return r->budgets[i].asked;
    return NULL;
}

char *anatomy_name(const results *r, const result *c, size_t most) {
    char *series = result_series_name(r, c), lag[40] = "";
    text name = {0};
    if (c->lag >= 0) snprintf(lag, sizeof lag, ", lag %.10g", c->lag);
    int code = series ? canvas_cut(&name, series, most - strlen(lag)) : ERR_DATA;
    if (!code) code = text_add(&name, "%s", lag);
    mem_free(series);
    if (!code) return name.data;
    text_free(&name);
    return NULL;
}
