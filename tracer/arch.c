#include "tracer/arch.h"

#include <stdio.h>
#include <string.h>

static const arch table[] = {
    {.name = "llama",
     .rope = ARCH_ROPE_INTERLEAVED,
     .embedding = "token_embd.weight",
     .output_norm = "output_norm.weight",
     .output = "output.weight",
     .layer = {[SLOT_ATTN_NORM] = {"attn_norm.weight", false},
               [SLOT_Q] = {"attn_q.weight", false},
               [SLOT_K] = {"attn_k.weight", false},
               [SLOT_V] = {"attn_v.weight", false},
               [SLOT_Q_BIAS] = {"attn_q.bias", true},
               [SLOT_K_BIAS] = {"attn_k.bias", true},
               [SLOT_V_BIAS] = {"attn_v.bias", true},
               [SLOT_O] = {"attn_output.weight", false},
               [SLOT_FFN_NORM] = {"ffn_norm.weight", false},
               [SLOT_GATE] = {"ffn_gate.weight", false},
               [SLOT_UP] = {"ffn_up.weight", false},
               [SLOT_DOWN] = {"ffn_down.weight", false}}},
};
enum { N_ARCH = sizeof table / sizeof *table };

const arch *arch_find(const char *name, size_t n) {
    for (int i = 0; i < N_ARCH; i++)
        if (strlen(table[i].name) == n && memcmp(table[i].name, name, n) == 0) return &table[i];
    return NULL;
}

char *arch_names(char *out, size_t size) {
    size_t used = 0;
    out[0] = 0;
    for (int i = 0; i < N_ARCH && used < size; i++)
        used += (size_t)snprintf(out + used, size - used, "%s%s", i ? ", " : "", table[i].name);
    return out;
}
