/* The text itself: how long the policy kept each token, how long the oracle did, and what the oracle kept longer. */
#include "analyze/html_text.h"
#include "analyze/report_parts.h"
#include "analyze/tokens.h"
#include "base/err.h"

enum { MOST_SHOWN = 2000, MOST_LOST = 20, CONTEXT = 24 };

static int add_spans(const tokens *t, size_t config, const token_shares *s, report *out) {
    text words = {0}, html = {0};
    int code = tokens_name(t, config, &words);
    if (!code) code = report_add(out, REPORT_GROUP, "Kept by %s", words.data);
    if (!code) code = html_text_add(&html, t, s, 0, MOST_SHOWN);
    if (!code) code = report_add_fragment(out, &html);
    text_free(&words);
    text_free(&html);
    return code;
}

static int add_lost_row(const lost_token *l, report *out) {
    TRY(report_cell(out, "%d", l->position));
    TRY(report_cell(out, "%s", l->before));
    TRY(report_cell(out, "%s", l->piece));
    TRY(report_cell(out, "%s", l->after));
    TRY(report_cell(out, "%.0f %%", 100 * l->policy));
    return report_cell(out, "%.0f %%", 100 * l->oracle);
}

static int add_lost(const tokens *t, const token_pair *pair, const token_shares *policy, const token_shares *oracle,
                    report *out) {
    static const char *const column[] = {"position", "before", "token", "after", "policy", "oracle"};
    lost_tokens lost;
    text caption = {0};
    TRY(tokens_lost(t, policy, oracle, MOST_LOST, CONTEXT, &lost));
    int code = text_add(&caption, "Share of later steps that see the token under ");
    if (!code) code = tokens_name(t, pair->config, &caption);
    if (!code) code = text_add(&caption, " and under ");
    if (!code) code = tokens_name(t, pair->oracle, &caption);
    if (!code) code = report_add(out, REPORT_GROUP, "Tokens that the oracle keeps longer");
    if (!code && !lost.n) code = report_add(out, REPORT_PARAGRAPH, "There are none.");
    if (!code && lost.n) code = report_add_table(out, caption.data, "rrllrr", column);
    for (size_t i = 0; i < lost.n && !code; i++) code = add_lost_row(&lost.item[i], out);
    text_free(&caption);
    lost_tokens_free(&lost);
    return code;
}

static int add_pair(const tokens *t, const token_pair *pair, report *out) {
    token_shares policy = {0}, oracle = {0};
    bool has_oracle = pair->oracle != TOKENS_NONE;
    int code = tokens_shares(t, pair->config, &policy);
    if (!code && has_oracle) code = tokens_shares(t, pair->oracle, &oracle);
    if (!code) code = add_spans(t, pair->config, &policy, out);
    if (!code && has_oracle) code = add_spans(t, pair->oracle, &oracle, out);
    if (!code && has_oracle) code = add_lost(t, pair, &policy, &oracle, out);
    token_shares_free(&policy);
    token_shares_free(&oracle);
    return code;
}

static int add_text(const report_input *in, const tokens *t, report *out) {
    token_pairs pairs;
    TRY(tokens_pairs(t, in->in->results, in->in->n_metrics ? in->in->metrics[0] : 0, &pairs));
    const char *budget = pairs.n ? tokens_config(t, pairs.item[0].config)->budget_asked : "";
    int code = report_add(out, REPORT_SECTION, "The text under the policies");
    if (!code) code = html_text_style(&out->style);
    if (!code && !pairs.n) code = report_add(out, REPORT_PARAGRAPH, "The lifetimes file holds no policy but oracles.");
    if (!code && pairs.n)
        code =
            report_add(out, REPORT_PARAGRAPH,
                       "The policy of least loss at a budget of %s, and the oracle under the same conditions.", budget);
    if (!code && pairs.n) code = add_pair(t, &pairs.item[0], out);
    token_pairs_free(&pairs);
    return code;
}

int report_add_text(const report_input *in, report *out) {
    tokens t;
    bool ready;
    if (!in->in->lifetimes || !in->in->trace) return 0;
    TRY(tokens_open_for("report", in->in->lifetimes, in->in->trace, &t, &ready));
    if (!ready) return 0;
    int code = add_text(in, &t, out);
    tokens_close(&t);
    return code;
}
