/* From the Fisher term to a KL divergence with an error bar (DESIGN section 6).
 *
 * kl_est = c * fisher. c comes from true reruns (kvlag verify --calibrate): with r = log(true KL / fisher) over runs
 * with true KL >= CALIBRATION_LEAST_KL, m the mean of all r and m_f, n_f mean and number of a family's, log c_f = (n_f
 * m_f + 2 m) / (n_f + 2),    s^2 = pooled variance within families, and the 90 % interval is log kl_est +- t(.95, n-1)
 * s sqrt(1 + 1/n). Without a calibration c = 1.5 and the interval is a factor of 1.5 either way at one standard
 * deviation, and the results say "uncalibrated". */
#pragma once

#include "sim/policy.h"

enum { CALIBRATION_FAMILIES = 4 }; /* policy_family */
#define CALIBRATION_LEAST_KL 0.003

/* One true rerun. family < 0: unknown (foreign lifetimes); it counts for the global scale only. */
typedef struct calibration_point {
    int family;
    double fisher, true_kl;
} calibration_point;

typedef struct calibration {
    bool is_default;   /* uncalibrated */
    char model[128];   /* trace_model.name of the reruns */
    int32_t n_tokens;  /* T of the reruns */
    char budgets[256]; /* budgets as asked, comma-separated */
    int n;             /* reruns used */
    double log_c, s;   /* global mean of r; pooled standard deviation within families */
    struct {
        int n;
        double log_c; /* shrunk towards the global one; equal to it where n = 0 */
    } family[CALIBRATION_FAMILIES];
} calibration;

/* The uncalibrated default. */
void calibration_none(calibration *out);

/* Fit from n points; ERR_DATA where fewer than 6 have true KL >= CALIBRATION_LEAST_KL and fisher > 0. Fills everything
 * but model, n_tokens and budgets, which the caller sets. */
int calibration_fit(const calibration_point *points, size_t n, calibration *out);

/* JSON files. Written through base/outfile; reading refuses by name what is missing or not a number. */
int calibration_write(const char *path, bool force, const calibration *c);
int calibration_read(const char *path, calibration *out);

/* kl_est = exp(log_c) * fisher and its 90 % interval, for a policy family (< 0: unknown). fisher 0 gives 0, 0, 0. */
void calibration_apply(const calibration *c, int family, double fisher, double *est, double *lo, double *hi);
