/* Tokens as they are shown, laid out, and kept: all by hand. */
#include "trace_build.h"

#include "analyze/glyphs.h"
#include "analyze/html_text.h"
#include "analyze/lettering.h"
#include "analyze/page.h"
#include "analyze/shade.h"
#include "analyze/tokens.h"
#include "base/text.h"
#include "traces/lifetimes.h"

/* ---- pieces ----------------------------------------------------------------------------------------------------- */

typedef struct piece {
    const char *bytes;
    size_t n;
} piece;
#define PIECE(literal) \
    { literal, sizeof(literal) - 1 }

typedef struct pieces {
    uint8_t bytes[2048];
    int64_t offset[64];
    int32_t n;
} pieces;

static pieces join(const piece *p, int32_t n) {
    pieces all = {.n = n};
    for (int32_t i = 0; i < n; i++) {
        memcpy(all.bytes + all.offset[i], p[i].bytes, p[i].n);
        all.offset[i + 1] = all.offset[i] + (int64_t)p[i].n;
    }
    return all;
}
#define JOIN(list) join(list, (int32_t)(sizeof(list) / sizeof *(list)))

static void read_glyphs(const pieces *p, glyphs *g) {
    BUILD_OK(glyphs_read(p->bytes, p->offset, p->n, g));
}

/* What token t shows, and in how many columns. */
static void shows(const glyphs *g, size_t t, const char *words, size_t columns) {
    text out = {0};
    BUILD_OK(glyphs_add(g, g->begin[t], g->begin[t + 1], &out));
    assert_string_equal(out.data, words);
    assert_int_equal(glyphs_columns(g, g->begin[t], g->begin[t + 1]), columns);
    text_free(&out);
}

static void test_plain_and_control(void **state) {
    (void)state;
    static const piece list[] = {
        PIECE(" it's"), PIECE(".\n\n"), PIECE("\t"), PIECE("\0\x1b\x7f\r"), PIECE(""), PIECE("a\xc2\xa0z"),
    };
    pieces p = JOIN(list);
    glyphs g;
    read_glyphs(&p, &g);
    shows(&g, 0, " it's", 5);
    shows(&g, 1, ".\xe2\x86\xb5\xe2\x86\xb5", 3);
    shows(&g, 2, "\xe2\x86\x92", 1);
    shows(&g, 3, "^@^[^?^M", 8);
    shows(&g, 4, "\xe2\x96\xaf", 1);
    shows(&g, 5, "a z", 3);
    assert_int_equal(g.item[g.begin[1]].kind, GLYPH_PLAIN);
    assert_int_equal(g.item[g.begin[1] + 2].kind, GLYPH_BREAK);
    assert_int_equal(g.item[0].kind, GLYPH_SPACE);
    glyphs_free(&g);
}

/* A grinning face, F0 9F 98 80, in three tokens; then bytes that are no characters. */
static void test_split_and_broken(void **state) {
    (void)state;
    static const piece list[] = {
        PIECE("x\xf0\x9f"),    PIECE("\x98"),     PIECE("\x80y"),        PIECE("\xff\xc3"),         PIECE("("),
        PIECE("\xed\xa0\x80"), PIECE("\xc0\xaf"), PIECE("\xef\xbf\xbe"), PIECE("\xf4\x90\x80\x80"), PIECE("\xe4\xb8"),
    };
    pieces p = JOIN(list);
    glyphs g;
    read_glyphs(&p, &g);
    shows(&g, 0, "x\xf0\x9f\x98\x80", 3);
    shows(&g, 1, GLYPH_CONTINUED, 1);
    shows(&g, 2, "y", 1);
    shows(&g, 3, "\xef\xbf\xbd\xef\xbf\xbd", 4);
    shows(&g, 4, "(", 1);
    shows(&g, 5, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd", 6); /* half of a surrogate pair */
    shows(&g, 6, "\xef\xbf\xbd\xef\xbf\xbd", 4);             /* '/' in two bytes */
    shows(&g, 7, "\xef\xbf\xbd", 2);                         /* U+FFFE, which XML does not take */
    shows(&g, 8, "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd", 8);
    shows(&g, 9, "\xef\xbf\xbd\xef\xbf\xbd", 4); /* the text ends inside a character */
    glyphs_free(&g);
}

static void test_wide_joining_invisible(void **state) {
    (void)state;
    static const piece list[] = {
        PIECE("\xe7\x94\x9f\xe5\x91\xbd"), /* two ideographs */
        PIECE("e\xcc\x81"),                /* e and an acute accent */
        PIECE("\xcc\x81"),                 /* the accent alone */
        PIECE("\xe2\x80\xae"
              "ab"),               /* right-to-left override */
        PIECE("\xe2\x80\x8b"),     /* zero-width space */
        PIECE("\xd7\xa9\xd7\x9c"), /* Hebrew */
    };
    pieces p = JOIN(list);
    glyphs g;
    read_glyphs(&p, &g);
    shows(&g, 0, "\xe7\x94\x9f\xe5\x91\xbd", 4);
    shows(&g, 1, "e\xcc\x81", 1);
    assert_int_equal(g.begin[2] - g.begin[1], 1);
    shows(&g, 2, "\xe2\x97\x8c\xcc\x81", 1);
    shows(&g, 3, "ab", 2);
    shows(&g, 4, "\xe2\x96\xaf", 1);
    shows(&g, 5, "\xd7\xa9\xd7\x9c", 2);
    glyphs_free(&g);
}

/* ---- lines ------------------------------------------------------------------------------------------------------ */

static void segment_is(const page_segment *s, int32_t token, int32_t line, int32_t column, int32_t columns) {
    assert_int_equal(s->token, token);
    assert_int_equal(s->line, line);
    assert_int_equal(s->column, column);
    assert_int_equal(s->columns, columns);
}

/* Ten columns:
 *     In the
 *     firmament.<break>
 *     A<break><break>
 *     f(<break>
 *       x) and */
static void test_page(void **state) {
    (void)state;
    static const piece list[] = {
        PIECE("In"), PIECE(" the"), PIECE(" firm"),   PIECE("ament"), PIECE("."),    PIECE("\n"),
        PIECE("A"),  PIECE("\n\n"), PIECE("f(\n  x"), PIECE(")"),     PIECE(" and"),
    };
    pieces p = JOIN(list);
    glyphs g;
    page lines;
    read_glyphs(&p, &g);
    BUILD_OK(page_lay_out(&g, p.n, 10, &lines));
    assert_int_equal(lines.n, 12);
    assert_int_equal(lines.n_lines, 5);
    segment_is(&lines.item[0], 0, 0, 0, 2);
    segment_is(&lines.item[1], 1, 0, 2, 4);
    segment_is(&lines.item[2], 2, 1, 0, 4); /* the blank before it is left out */
    segment_is(&lines.item[3], 3, 1, 4, 5);
    segment_is(&lines.item[4], 4, 1, 9, 1);
    segment_is(&lines.item[5], 5, 1, 10, 1); /* the mark stands behind a full line */
    segment_is(&lines.item[6], 6, 2, 0, 1);
    segment_is(&lines.item[7], 7, 2, 1, 2); /* an empty line takes no room */
    segment_is(&lines.item[8], 8, 3, 0, 3);
    segment_is(&lines.item[9], 8, 4, 0, 3);
    segment_is(&lines.item[10], 9, 4, 3, 1);
    segment_is(&lines.item[11], 10, 4, 4, 4);
    assert_int_equal(lines.item[2].from, g.begin[2] + 1);
    page_free(&lines);
    glyphs_free(&g);
}

/* A word longer than a line is cut; wide characters wrap anywhere and never straddle the edge. */
static void test_page_long_and_wide(void **state) {
    (void)state;
    static const piece list[] = {
        PIECE("ab"), PIECE(" 0123456789"), PIECE("\xe7\x94\x9f"), PIECE("\xe5\x91\xbd"), PIECE("\xe7\x94\x9f"),
    };
    pieces p = JOIN(list);
    glyphs g;
    page lines;
    read_glyphs(&p, &g);
    BUILD_OK(page_lay_out(&g, p.n, 5, &lines));
    assert_int_equal(lines.n, 7);
    segment_is(&lines.item[0], 0, 0, 0, 2);
    segment_is(&lines.item[1], 1, 0, 2, 3);
    segment_is(&lines.item[2], 1, 1, 0, 5);
    segment_is(&lines.item[3], 1, 2, 0, 3);
    segment_is(&lines.item[4], 2, 2, 3, 2);
    segment_is(&lines.item[5], 3, 3, 0, 2);
    segment_is(&lines.item[6], 4, 3, 2, 2);
    page_free(&lines);
    glyphs_free(&g);
}

/* ---- words for gnuplot ------------------------------------------------------------------------------------------ */

static void test_lettering(void **state) {
    (void)state;
    lettering l = {0};
    text t = {0};
    const char *words = "na\xc3\xafve \xed\x95\x9c\xea\xb5\xad\xed\x95\x9c x";
    BUILD_OK(lettering_note(&l, words, strlen(words)));
    assert_int_equal(l.n, 2);
    BUILD_OK(lettering_define(&l, &t));
    assert_non_null(strstr(t.data, "\nhas_ad = has('ad6d')\nhas_d5 = has('d55c')\n"));
    t.n = 0;
    BUILD_OK(lettering_quote(&t, words));
    assert_string_equal(t.data, "('na\xc3\xafve '.(has_d5 ? '\xed\x95\x9c' : ''.box).(has_ad ? '\xea\xb5\xad' : ''.box)"
                                ".(has_d5 ? '\xed\x95\x9c' : ''.box).' x')");
    t.n = 0;
    BUILD_OK(lettering_quote(&t, "it's"));
    assert_string_equal(t.data, "'it''s'");
    text_free(&t);
    lettering_free(&l);
}

/* ---- shares ----------------------------------------------------------------------------------------------------- */

enum { T = 6 };
static char trace_file[64], life_file[64];

/* A layer without a window and one with a window of 3; one head of each, a trace of six tokens. */
static void write_trace(const pieces *p) {
    trace_model m = {.name = "m", .arch = "a", .n_layer = 2, .n_head = 1, .n_kv_head = 1, .head_dim = 4, .n_embd = 4};
    m.window = (int32_t[]){0, 3};
    m.scale = 0.5F;
    m.n_vocab = 9;
    m.rope = m.backend = m.device = m.compute = "";
    trace_writer *w;
    BUILD_OK(trace_writer_new(trace_file, true, NULL, 0, &m, "test", "", 1, &w));
    float wo[16] = {0}, values[T * 4] = {0};
    for (int layer = 0; layer < 2; layer++) BUILD_OK(trace_write_wo(w, layer, wo));
    trace_sequence s = {.n_tokens = T, .n_prompt = 1, .source = "", .tokens = (int32_t[T]){0}};
    s.pieces = p ? p->bytes : NULL;
    s.piece_offset = p ? p->offset : NULL;
    trace_plan plan = {.factored = true};
    BUILD_OK(trace_write_sequence(w, &s, &plan));
    for (int array = TRACE_Q; array <= TRACE_V; array++)
        for (int layer = 0; layer < 2; layer++) {
            trace_chunk c;
            BUILD_OK(trace_pack(w, (trace_array)array, values, T, 4, 4, NULL, &c));
            BUILD_OK(trace_put(w, (trace_array)array, layer, 0, 0, 0, &c));
        }
    int64_t bytes;
    BUILD_OK(trace_writer_finish(w, &bytes));
}

typedef struct kept {
    lifetimes_config config;
    int32_t evict_at[2 * T];
    const char *hold;
} kept;

static void write_lifetimes(const kept *k, size_t n, const char *hash) {
    lifetimes_writer *w;
    BUILD_OK(lifetimes_writer_new(life_file, true, NULL, 0, "text", hash, &w));
    for (size_t i = 0; i < n; i++) {
        BUILD_OK(lifetimes_write_config(w, i, &k[i].config));
        BUILD_OK(lifetimes_write_seq(w, i, 0, &(lifetimes_seq){"3", k[i].hold, "0"}, 2, 1, T, k[i].evict_at));
    }
    BUILD_OK(lifetimes_writer_finish(w));
}

/* Config 0 is the full cache, 1 and 2 a policy at two lags, 3 one without, 4 and 5 oracles; 6 another budget. */
static const kept sample[] = {
    {{"full", "full", "", "", "head", "step", "", ""}, {7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7}, "0"},
    {{"rmm", "rmm", "50%", "0", "head", "step", "charged", ""}, {1, 2, 7, 7, 7, 7, 1, 2, 3, 4, 5, 7}, "0"},
    {{"rmm", "rmm", "50%", "8", "head", "step", "charged", ""}, {7, 2, 4, 7, 6, 7, 2, 4, 5, 4, 7, 7}, "8"},
    {{"h2o", "h2o", "50%", "", "head", "step", "", ""}, {7, 7, 3, 4, 5, 7, 7, 7, 3, 4, 5, 7}, "1"},
    {{"oracle", "oracle(mass)", "50%", "", "head", "step", "", ""}, {7, 7, 7, 4, 5, 6, 7, 7, 7, 4, 5, 6}, "0"},
    {{"oracle", "oracle(mass,hold=lag)", "50%", "8", "head", "step", "charged", ""},
     {7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7},
     "8"},
    {{"h2o", "h2o", "10%", "", "head", "step", "", ""}, {7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7}, "1"},
};

static pieces six(void) {
    static const piece list[] = {PIECE("In"), PIECE(" the"), PIECE(" \"sea\""), PIECE("<b>"), PIECE("\n"), PIECE(" &")};
    return JOIN(list);
}

static int setup(void **state) {
    (void)state;
    snprintf(trace_file, sizeof trace_file, "/tmp/kvlag-tokens-%d.h5", (int)getpid());
    snprintf(life_file, sizeof life_file, "/tmp/kvlag-tokens-%d.l.h5", (int)getpid());
    pieces p = six();
    write_trace(&p);
    write_lifetimes(sample, 7, "");
    return 0;
}

static int teardown(void **state) {
    (void)state;
    unlink(trace_file);
    unlink(life_file);
    return 0;
}

/* Entry 1 under config 2: without a window it can be seen by 4 later steps and is by none; in the window of 3 by steps
 * 2 and 3, and is by both. */
static void test_shares(void **state) {
    (void)state;
    tokens t;
    token_shares s;
    BUILD_OK(tokens_open(life_file, trace_file, &t));
    assert_int_equal(t.n_prompt, 1);
    BUILD_OK(tokens_shares(&t, 2, &s));
    const double share[T] = {(5 + 1) / 7.0, (0 + 2) / 6.0, (1 + 2) / 5.0, (2 + 0) / 4.0, (1 + 1) / 2.0, 1};
    const double at_end[T] = {0.5, 0, 0, 0.5, 1, 1}; /* of entries 0 to 2 only the first layer sees any by then */
    for (int i = 0; i < T; i++) {
        assert_float_equal(s.kept[i], share[i], 1e-12);
        assert_float_equal(s.at_end[i], at_end[i], 1e-12);
    }
    token_shares_free(&s);
    tokens_close(&t);
}

static void test_pairs(void **state) {
    (void)state;
    tokens t;
    token_pairs p;
    text name = {0};
    BUILD_OK(tokens_open(life_file, trace_file, &t));
    BUILD_OK(tokens_pairs(&t, NULL, 0, &p)); /* two specs at 50 %, one at 10 % */
    assert_int_equal(p.n, 2);
    assert_int_equal(p.item[0].config, 2); /* of lags 0 and 8 */
    assert_int_equal(p.item[0].oracle, 5); /* of the same lag */
    assert_int_equal(p.item[1].config, 3);
    assert_int_equal(p.item[1].oracle, 4); /* the one without a lag */
    BUILD_OK(tokens_name(&t, 2, &name));
    assert_string_equal(name.data, "rmm, lag 8");
    name.n = 0;
    BUILD_OK(tokens_add_subject(&t, 2, &name));
    assert_string_equal(name.data, ", budget 50%, text");
    text_free(&name);
    token_pairs_free(&p);
    tokens_close(&t);
}

static void test_pairs_by_results(void **state) {
    (void)state;
    result configs[3] = {0};
    for (int i = 0; i < 3; i++) {
        configs[i] =
            (result){.spec = i == 2 ? "h2o" : "rmm", .budget_asked = "50%", .unit = "head", .schedule = "step"};
        configs[i].pending = i == 2 ? "" : "charged";
        configs[i].lag = (double[]){0, 8, -1}[i];
        configs[i].metric[KL_EST] = (double[]){0.2, 0.3, 0.1}[i];
    }
    results r = {.configs = configs, .n_configs = 3};
    tokens t;
    token_pairs p;
    BUILD_OK(tokens_open(life_file, trace_file, &t));
    BUILD_OK(tokens_pairs(&t, &r, KL_EST, &p));
    assert_int_equal(p.n, 2);
    assert_int_equal(p.item[0].config, 3); /* the least loss first */
    assert_int_equal(p.item[1].config, 1); /* lag 0 is better than 8 here */
    assert_int_equal(p.item[1].oracle, 4); /* no oracle of lag 0: the one of equal hold, before that of equal pending */
    assert_float_equal(p.item[1].loss, 0.2, 0);
    token_pairs_free(&p);
    tokens_close(&t);
}

/* h2o against oracle(mass): entry 2 alone is kept longer, by 3 of 3 later steps and by 2 of 2. */
static void test_lost(void **state) {
    (void)state;
    tokens t;
    token_shares h2o, oracle;
    lost_tokens l;
    BUILD_OK(tokens_open(life_file, trace_file, &t));
    BUILD_OK(tokens_shares(&t, 3, &h2o));
    BUILD_OK(tokens_shares(&t, 4, &oracle));
    BUILD_OK(tokens_lost(&t, &h2o, &oracle, 20, 4, &l));
    assert_int_equal(l.n, 1);
    assert_int_equal(l.item[0].position, 2);
    assert_float_equal(l.item[0].policy, 0, 0);
    assert_float_equal(l.item[0].oracle, 1, 0);
    assert_float_equal(l.item[0].oracle_at_end, 0.5, 0);
    assert_string_equal(l.item[0].before, " the");
    assert_string_equal(l.item[0].piece, " \"sea\"");
    assert_string_equal(l.item[0].after, "<b>\xe2\x86\xb5");
    lost_tokens_free(&l);
    /* The other way round: rmm of lag 8 keeps entries 2, 3 and 4 longer: by 3/5, 2/4 and 2/2. */
    token_shares rmm;
    BUILD_OK(tokens_shares(&t, 2, &rmm));
    BUILD_OK(tokens_lost(&t, &h2o, &rmm, 2, 0, &l));
    assert_int_equal(l.n, 2);
    assert_int_equal(l.item[0].position, 4);
    assert_int_equal(l.item[1].position, 2);
    assert_string_equal(l.item[1].before, "");
    lost_tokens_free(&l);
    assert_int_equal(tokens_too_new(&t), 1);
    token_shares_free(&rmm);
    token_shares_free(&h2o);
    token_shares_free(&oracle);
    tokens_close(&t);
}

static void test_refused(void **state) {
    (void)state;
    tokens t;
    bool ready = true;
    write_lifetimes(sample, 7, "0123");
    assert_int_equal(tokens_open(life_file, trace_file, &t), ERR_DATA);
    assert_non_null(strstr(err_message(), "is not the trace that"));
    write_lifetimes(sample, 7, "");
    BUILD_OK(tokens_open_for("text", life_file, NULL, &t, &ready));
    assert_false(ready);
    write_trace(NULL);
    BUILD_OK(tokens_open_for("text", life_file, trace_file, &t, &ready));
    assert_false(ready);
    pieces p = six();
    write_trace(&p);
}

/* ---- HTML ------------------------------------------------------------------------------------------------------- */

static void test_html(void **state) {
    (void)state;
    tokens t;
    token_shares s;
    text html = {0};
    BUILD_OK(tokens_open(life_file, trace_file, &t));
    BUILD_OK(tokens_shares(&t, 2, &s));
    BUILD_OK(html_text_add(&html, &t, &s, 0, 100));
    /* 6/7 is nearest to the ninth tenth, 1/3 to the third. */
    assert_non_null(strstr(html.data,
                           "<span class=\"r9\" title=\"token 0: 86 % of later steps, at the end in 50 %\">In</span>"
                           "<span class=\"r3\" title=\"token 1: 33 % of later steps, at the end in 0 %\"> the</span>"));
    assert_non_null(strstr(html.data, "> &quot;sea&quot;</span>"));
    assert_non_null(strstr(html.data, ">&lt;b&gt;</span>"));
    assert_non_null(strstr(html.data, ">\xe2\x86\xb5\n</span>"));
    assert_non_null(strstr(html.data, "> &amp;</span></p>"));
    assert_non_null(strstr(html.data, "All 6 tokens are shown."));
    html.n = 0;
    BUILD_OK(html_text_add(&html, &t, &s, 1, 2));
    assert_non_null(strstr(html.data, "Tokens 1 to 2 of 6 are shown."));
    assert_null(strstr(html.data, "token 0:"));
    assert_null(strstr(html.data, "token 3:"));
    text_free(&html);
    token_shares_free(&s);
    tokens_close(&t);
}

/* Relative luminance (WCAG 2): darker with every step, and black stays readable on all (4.5 to 1). */
static void test_shades(void **state) {
    (void)state;
    double before = 2;
    for (int i = 0; i <= SHADES; i++) {
        unsigned rgb = 0;
        assert_int_equal(sscanf(shade_colour(i), "#%6x", &rgb), 1);
        double luminance = 0;
        for (int c = 0; c < 3; c++) {
            double x = (double)(rgb >> (16 - 8 * c) & 255) / 255;
            luminance +=
                (double[]){0.2126, 0.7152, 0.0722}[c] * (x <= 0.04045 ? x / 12.92 : pow((x + 0.055) / 1.055, 2.4));
        }
        assert_true(luminance < before - 0.02);
        assert_true((luminance + 0.05) / 0.05 > 4.5);
        before = luminance;
    }
    assert_int_equal(shade_of(0), 0);
    assert_int_equal(shade_of(0.049), 0);
    assert_int_equal(shade_of(0.051), 1);
    assert_int_equal(shade_of(1), 10);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain_and_control),
        cmocka_unit_test(test_split_and_broken),
        cmocka_unit_test(test_wide_joining_invisible),
        cmocka_unit_test(test_page),
        cmocka_unit_test(test_page_long_and_wide),
        cmocka_unit_test(test_lettering),
        cmocka_unit_test(test_shares),
        cmocka_unit_test(test_pairs),
        cmocka_unit_test(test_pairs_by_results),
        cmocka_unit_test(test_lost),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_html),
        cmocka_unit_test(test_shades),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
