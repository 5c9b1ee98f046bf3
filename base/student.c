#include "base/student.h"

#include <math.h>

/* Regularised incomplete beta function I_x(a, b) by its continued fraction (Lentz), for x < (a+1)/(a+b+2). */
static double beta_fraction(double a, double b, double x) {
    double c = 1, d = 1 - (a + b) * x / (a + 1), f;
    d = 1 / d;
    f = d;
    for (int m = 1; m < 500; m++) {
        double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
        d = 1 / (1 + even * d);
        c = 1 + even / c;
        f *= c * d;
        double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
        d = 1 / (1 + odd * d);
        c = 1 + odd / c;
        f *= c * d;
        if (fabs(c * d - 1) < 1e-14) break;
    }
    return f * exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a;
}

/* P(T <= t) of Student's t distribution, t >= 0. */
static double student(double t, double freedom) {
    double x = freedom / (freedom + t * t), a = freedom / 2, b = 0.5;
    double tail = x < (a + 1) / (a + b + 2) ? beta_fraction(a, b, x) : 1 - beta_fraction(b, a, 1 - x);
    return 1 - tail / 2;
}

/* The 95 % point of Student's t, by bisection. */
double student_95(double freedom) {
    double low = 1, high = 10;
    for (int i = 0; i < 60; i++) {
        double middle = (low + high) / 2;
        if (student(middle, freedom) < 0.95) low = middle;
        else high = middle;
    }
    return low;
}
