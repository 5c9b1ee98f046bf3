#include "sim/policies/rows.h"
#include "base/err.h"

#include <math.h>
#include <string.h>

static int check(const policy_setup *s, const char *name, double max) {
    const policy_value *value = policy_get(s, name);
    if (!value || (value->number >= 1 && value->number <= max)) return 0;
    return err_set(ERR_USAGE, "%s: %s=%s is %g, want 1 to %g", s->policy->name, name, value->text, value->number, max);
}

int rows_check(const policy_setup *s) {
    TRY(check(s, "window", ROWS_MAX));
    return rows_check_kernel(s);
}

int rows_check_kernel(const policy_setup *s) {
    TRY(check(s, "kernel", KERNEL_MAX));
    const policy_value *kernel = policy_get(s, "kernel");
    if (kernel && fmod(kernel->number, 2) == 0)
        return err_set(ERR_USAGE, "%s: kernel=%s is even; it must be odd to have a centre", s->policy->name,
                       kernel->text);
    return 0;
}

void rows_observe(const policy_view *v, int w) {
    double *f = v->field[v->t % w];
    for (int32_t j = 0; j < v->n; j++) f[j] = (double)v->row[j];
}

/* Oldest row first, so that the sum does not depend on where the ring begins. */
void rows_sum(const policy_view *v, int w, double *sum) {
    memset(sum, 0, (size_t)v->n * sizeof *sum);
    for (int k = 1; k <= w; k++) {
        const double *f = v->field[(v->t + k) % w];
        for (int32_t j = 0; j < v->n; j++) sum[j] += f[j];
    }
}

int32_t rows_older(const policy_view *v, int w) {
    int32_t n = v->n;
    while (n > 0 && v->t - v->entry[n - 1] < w) n--;
    return n;
}

void pool_around(pool_kind kind, const double *x, int32_t n, int kernel, double *out) {
    for (int32_t j = 0; j < n; j++) {
        int32_t from = j - kernel / 2, to = j + kernel / 2;
        if (from < 0) from = 0;
        if (to > n - 1) to = n - 1;
        double sum = 0, most = x[from];
        for (int32_t i = from; i <= to; i++) {
            sum += x[i];
            most = fmax(most, x[i]);
        }
        out[j] = kind == POOL_AVG ? sum / kernel : most;
    }
}

void pool_ahead(double *x, int32_t n, int length) {
    for (int32_t j = 0; j < n; j++)
        for (int32_t i = j + 1; i < n && i < j + length; i++) x[j] = fmax(x[j], x[i]);
}
