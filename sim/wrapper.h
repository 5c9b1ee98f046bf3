/* Wrappers: other spellings, in specs, of parameters that any policy has. `ada(h2o,floor=0.1)` is
 * `h2o(unit=head,share=layer,floor=0.1)`. They nest, each at most once: `lag(8,ada(h2o))`. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

enum { WRAPPERS_MOST = 8, WRAPPER_SETS = 2 };

typedef struct wrapper {
    const char *name; /* NULL ends the list */
    const char *usage;
    const char *help; /* one line */
    const char *source;
    struct {
        const char *param, *value; /* NULL = none */
        bool yields;               /* to a value that the wrapped spec gives */
    } set[WRAPPER_SETS];
    /* Its one argument besides the policy: the name, the parameter that takes its values, each behind `prefix`; the
     * value where none is given ("" = the parameter's own default, NULL = it must be given); and the value that leaves
     * the policy as it is, or NULL. */
    struct {
        const char *name, *param, *prefix, *initial, *neutral;
    } argument;
    bool argument_first; /* by position: NAME(ARGUMENT, POLICY), else NAME(POLICY, ARGUMENT) */
} wrapper;

extern const wrapper wrappers[]; /* at most WRAPPERS_MOST */

/* NULL if there is none of that name [n]. */
const wrapper *wrapper_find(const char *name, size_t n);
