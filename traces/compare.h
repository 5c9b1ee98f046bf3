/* `kvlag info --compare`: how far two traces of the same tokens lie apart, say of two backends or two precisions. */
#pragma once

#include <cjson/cJSON.h>

/* As JSON, the caller's (cJSON_Delete):
 *
 * files [a, b], differs [{fact, a, b}] (texts), sequences [{name, tokens, datasets [..], only [[in a], [in b]]}]. A
 * dataset has `path` and, as far as they apply:
 *     mean, max      absolute difference over all values
 *     relative       norm of the difference / norm of a
 *     agree          share of equal values; of logits/topk_id the share of a's ids, in each row's first k of both,
 *                    that b has too; of grad/fisher_label over the counted steps
 *     forms [a, b]   of "attention rows": "dense" or "factored". Rows are compared as the reader hands them out; dense
 *                    ones where both traces have them
 *     layers [{norm_ratio, cosine}]   of gradients: norm of b / norm of a and the cosine between the two; of
 * grad/fisher the worst sample of each norm_ratio, norm_ratio_layer, cosine, cosine_layer   the worst of those
 *
 * Refused, naming what: other numbers of layers, heads or sequences, other tokens. */
int compare_traces(const char *a, const char *b, cJSON **out);
