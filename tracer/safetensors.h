/* Weights in a folder as Hugging Face writes them: model.safetensors, or model.safetensors.index.json and its shards
 * (format: https://github.com/huggingface/safetensors#format). Memory-mapped; every offset and length is checked before
 * use, so that a damaged file gets one line and never a signal. Types F32, F16 and BF16; others are refused by name
 * when a tensor of that type is read. What goes beyond four dimensions is counted with the fourth; scalars have none.
 */
#pragma once

#include "tracer/tensor.h"

typedef struct safetensors safetensors;

/* `folder`, or one .safetensors file. Refused by name: no weights there, a shard that is missing or holds other tensors
 * than the index says, headers that are no JSON objects or larger than 100 MB, names given twice, offsets that overlap,
 * leave gaps or reach beyond the file, unknown types, dimensions of 0, shapes whose size is not that of the bytes. */
int safetensors_open(const char *folder, safetensors **out);
void safetensors_close(safetensors *s); /* accepts NULL */

size_t safetensors_n_tensors(const safetensors *s);
const tensor *safetensors_tensor_at(const safetensors *s, size_t i);
const tensor *safetensors_find(const safetensors *s, const char *name); /* NULL if absent; no message */
