/* What a model file may say and what is refused, on files of a few numbers. */
#include "base/err.h"
#include "base/progress.h"
#include "tests/unit/model_build.h"
#include "tracer/model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static model *open_mini(mini m) {
    char path[32];
    model *out;
    int fd = mini_file(m, path);
    if (model_open(path, &out)) fail_msg("%s", err_message());
    close(fd);
    return out;
}

static void refuse(mini m, const char *message) {
    char path[32];
    model *out;
    int fd = mini_file(m, path);
    assert_int_equal(model_open(path, &out), ERR_DATA);
    assert_null(out);
    if (!strstr(err_message(), message)) fail_msg("'%s' does not say '%s'", err_message(), message);
    close(fd);
}

static void facts_are_read(void **state) {
    (void)state;
    model *m = open_mini((mini){.n_head = 4, .n_kv_head = 2});
    assert_int_equal(m->n_layer, 2);
    assert_int_equal(m->n_embd, 8);
    assert_int_equal(m->n_ff, 16);
    assert_int_equal(m->n_vocab, 5);
    assert_int_equal(m->n_context, 4096);
    assert_int_equal(m->head_dim, 2);
    assert_int_equal(m->rope_dims, 2);
    assert_int_equal(m->n_rope, 1);
    assert_true(m->rope[0].inverse[0] == 1 && m->rope[0].scale == 1);
    assert_string_equal(m->rope_text, "base 10000, interleaved, 2 dims");
    assert_float_equal(m->scale, 0.70710678f, 1e-7f);
    assert_int_equal(m->window[1], 0);
    model_close(m);
}

static void kv_heads_are_one_number_a_list_or_absent(void **state) {
    (void)state;
    const int kinds[] = {0, 2, 1}, want[] = {2, 2, 4};
    for (int i = 0; i < 3; i++) {
        model *m = open_mini((mini){.n_head = 4, .n_kv_head = 2, .kv_kind = kinds[i]});
        assert_int_equal(m->n_kv_head, want[i]);
        model_close(m);
    }
    refuse((mini){.n_head = 4, .kv_kind = 3}, "2 kv heads in layer 1");
    refuse((mini){.n_head = 2, .n_kv_head = 3}, "head_count_kv");
    refuse((mini){.n_head = 4, .n_kv_head = 3}, "4 query heads cannot share 3 kv heads");
}

static void head_dim_is_key_length_where_given(void **state) {
    (void)state;
    /* 8/2 = 4 would be the quotient; the file says 6. */
    model *m = open_mini((mini){.key_length = 6});
    assert_int_equal(m->head_dim, 6);
    model_close(m);
    refuse((mini){.n_embd = 9}, "n_embd 9 is not a multiple of 2 heads");
}

static void output_is_its_own_or_tied(void **state) {
    (void)state;
    model *m = open_mini((mini){0});
    assert_ptr_equal(m->output.tensor, m->embedding.tensor);
    model_close(m);
    m = open_mini((mini){.output = true});
    assert_string_equal(m->output.tensor->name, "output.weight");
    model_close(m);
}

static void biases_are_optional(void **state) {
    (void)state;
    model *m = open_mini((mini){0});
    assert_null(m->layer[0].weight[SLOT_Q_BIAS].tensor);
    model_close(m);
    m = open_mini((mini){.bias = true});
    assert_string_equal(m->layer[1].weight[SLOT_K_BIAS].tensor->name, "blk.1.attn_k.bias");
    model_close(m);
}

static void missing_tensors_are_named(void **state) {
    (void)state;
    refuse((mini){.without = "blk.0.attn_k.weight"}, "tensor 'blk.0.attn_k.weight' is missing");
    refuse((mini){.without = "token_embd.weight"}, "tensor 'token_embd.weight' is missing");
    refuse((mini){.without = "output_norm.weight"}, "tensor 'output_norm.weight' is missing");
    refuse((mini){.block_count = 100000},
           "tensor 'blk.2.attn_norm.weight' is missing (the file says that there are 100000 layers)");
}

static void shapes_are_checked(void **state) {
    (void)state;
    refuse((mini){.wide = "blk.1.ffn_down.weight"}, "tensor 'blk.1.ffn_down.weight' has shape [17, 8], want [16, 8]");
    refuse((mini){.wide = "token_embd.weight"}, "tensor 'token_embd.weight' has shape [9, 5], want [8, any]");
    refuse((mini){.wide = "blk.0.attn_q.bias", .bias = true}, "tensor 'blk.0.attn_q.bias' has shape [9, 1]");
}

static void what_is_not_supported_is_named(void **state) {
    (void)state;
    refuse((mini){.arch = "mamba"}, "architecture 'mamba' is not supported (supported: llama, qwen2, ");
    refuse((mini){.text_key = "llama.rope.scaling.type", .text = "dynamic"}, "RoPE scaling 'dynamic' is not supported");
    refuse((mini){.extra = "rope_freqs.weight"}, "'rope_freqs.weight' has 4 values for 4 rotated dimensions");
    refuse((mini){.u32_key = "llama.expert_count", .u32 = 8}, "llama.expert_count 8 is not supported");
    refuse((mini){.u32_key = "llama.rope.dimension_count", .u32 = 3}, "rope.dimension_count 3 is odd");
    model_close(open_mini((mini){.text_key = "llama.rope.scaling.type", .text = "none"}));
    model_close(open_mini((mini){.extra = "some.other.weight"}));
    model *m;
    assert_int_equal(model_open("/tmp", &m), ERR_DATA);
    assert_non_null(strstr(err_message(), "/tmp/config.json: there is no such file"));
}

static void flops_are_counted(void **state) {
    (void)state;
    /* Per token and layer: q 8x8, k and v 4x8 each, o 8x8, three of 16x8 = 576; two layers, 5x8 logits: 1192. Three
     * tokens: 2 * 3 * 1192. Attention: 6 entries, 2 layers, 2 heads, 4 per dimension of 4: 384. */
    model *m = open_mini((mini){0});
    assert_true(model_flops(m, 3) == 2 * 3 * 1192 + 384);
    model_close(m);
}

int main(void) {
    say_level(SAY_QUIET);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(facts_are_read),
        cmocka_unit_test(kv_heads_are_one_number_a_list_or_absent),
        cmocka_unit_test(head_dim_is_key_length_where_given),
        cmocka_unit_test(output_is_its_own_or_tied),
        cmocka_unit_test(biases_are_optional),
        cmocka_unit_test(missing_tensors_are_named),
        cmocka_unit_test(shapes_are_checked),
        cmocka_unit_test(what_is_not_supported_is_named),
        cmocka_unit_test(flops_are_counted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
