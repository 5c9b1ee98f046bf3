/* Student's t distribution, for intervals from few observations. */
#pragma once

/* The 95 % point at `freedom` >= 1 degrees of freedom: what 5 % of all draws exceed. */
double student_95(double freedom);
