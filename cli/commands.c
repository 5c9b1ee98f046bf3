#include "cli/commands.h"
#include "advise/advise.h"
#include "analyze/analyze.h"
#include "base/err.h"
#include "base/options.h"
#include "sim/registry.h"
#include "sim/sim.h"
#include "tracer/tracer.h"
#include "traces/info.h"
#include "traces/make_trace.h"

#include <string.h>

#define MODEL "models/SmolLM2-135M-Instruct.Q4_1.gguf"

const command commands[] = {
    {
        .name = "trace",
        .usage = "MODEL TEXT... -o FILE.h5",
        .help = "run a model once over texts and keep what replay needs",
        .about =
            "MODEL is a GGUF file (any file of a split one), or a folder with config.json, safetensors and "
            "tokenizer.json (kvlag help models: which ones). Each TEXT is a file, or - for standard input, and becomes "
            "a sequence of its own: a plain text, or what --jsonl, --chat or --ids say; --stride makes many of a long "
            "one, and --generate lets the model write an answer to each first. What is kept: the tokens and their "
            "text, the predictions, the attention (as probabilities or as q, k and v), and the gradients that losses "
            "are estimated from.",
        .run = cmd_trace,
        .first_round = true,
        .example =
            {
                {"the first 512 tokens of a text", "kvlag trace " MODEL " README.md -o out/t.h5 --tokens 512"},
                {"two texts, of which 64 tokens each are a prompt that sees everything",
                 "kvlag trace " MODEL " README.md LICENSE -o out/two.h5 --tokens 256 --prompt 64"},
                {"four samples of the model's own labels: narrower intervals, more time",
                 "kvlag trace " MODEL " LICENSE -o out/fine.h5 --tokens 128 --gradients fisher:4"},
                {"the model's own words after the first 64 tokens",
                 "kvlag trace " MODEL " LICENSE -o out/own.h5 --tokens 64 --generate 32"},
            },
    },
    {
        .name = "sim",
        .usage = "TRACE... -o FILE.csv",
        .help = "replay eviction policies over traces and price them",
        .about = "Every policy, budget and lag that is asked for is replayed over the recorded attention and becomes "
                 "one row "
                 "of FILE.csv: lost attention mass, estimated loss change and KL with 90 % intervals, footprint, peak. "
                 "Without -p, -b and -L a default set runs, from a sliding window to hindsight, at 10, 25 and 50 %. "
                 "kvlag help spec explains policies, kvlag help budgets budgets and lags.",
        .run = cmd_sim,
        .first_round = true,
        .example =
            {
                {"two policies at two budgets; RMM at lags 0, 1, 2, 4 ... 64",
                 "kvlag sim out/t.h5 -o out/r.csv -p rmm -p h2o -b 10%,25% -L 0:64:x2"},
                {"the default set", "kvlag sim out/t.h5 -o out/all.csv"},
                {"a list in a spec is a sweep; wrappers go around any policy",
                 "kvlag sim out/t.h5 -o out/w.csv -p 'snapkv(window=16|32)' -p 'ada(h2o)' -p 'lag(8,h2o)' -b 25%"},
                {"a sweep that stands in a file", "kvlag sim out/t.h5 -o out/sweep.csv --grid examples/sweep.grid"},
                {"keep when each entry left", "kvlag sim out/t.h5 -o out/h.csv -p h2o -b 64 --lifetimes out/h.h5"},
                {"price such a file, also that of a policy written elsewhere",
                 "kvlag sim out/t.h5 -o out/h2.csv --from-lifetimes out/h.h5"},
            },
    },
    {
        .name = "verify",
        .usage = "MODEL TRACE [RESULTS.csv] -o TRUTH.csv",
        .help = "rerun chosen configurations for real; calibrate the estimates",
        .about =
            "The model runs again with the evicted entries masked, and the true loss change and KL go to TRUTH.csv. "
            "Configurations come from -p, -b and -L, from rows of RESULTS.csv, or from a lifetimes file.",
        .run = cmd_verify,
        .example =
            {
                {"three policies; what is learnt is kept for sim --calibration",
                 "kvlag verify " MODEL
                 " out/t.h5 -o out/truth.csv -p h2o -p rmm -p streaming -b 64,128 --calibrate out/c.json"},
                {"three rows of earlier results, spread over families, budgets and lags",
                 "kvlag verify " MODEL " out/t.h5 out/r.csv --pick 3 -o out/truth3.csv"},
            },
    },
    {
        .name = "analyze",
        .usage = "FILE.csv... -o DIR",
        .help = "the recommendation, tables, figures and a report from results",
        .about = "Reads what sim and verify wrote, prints what to use and a short table, and leaves the figures and a "
                 "report in DIR: report.html, which needs nothing beside it, report.md, and summary.json for programs.",
        .run = cmd_analyze,
        .first_round = true,
        .example =
            {
                {"figures as PNG and SVG", "kvlag analyze out/r.csv -o out/fig --format png,svg"},
                {"estimates beside truths", "kvlag analyze out/r.csv out/truth3.csv -o out/fig2"},
                {"the smallest budget that loses at most .1 nats a token; for scripts",
                 "kvlag analyze out/r.csv -o out/fig3 --max-loss 0.1 --json"},
            },
    },
    {
        .name = "advise",
        .usage = "TRACE... -o DIR",
        .help = "which policy, budget and lag: sim and analyze in one step",
        .about =
            "Prices sim's default set of policies and lags over the traces, prints what to use and how sure that is, "
            "and leaves results, figures and the report in DIR.",
        .run = cmd_advise,
        .example =
            {
                {"which policy and which lag at 25 %", "kvlag advise out/t.h5 -o out/advice -b 25%"},
                {"the least memory that loses at most .1 nats a token",
                 "kvlag advise out/t.h5 -o out/cheap --max-loss 0.1 -p ema -p rmm -L 8,32"},
            },
    },
    {
        .name = "compare",
        .usage = "A.csv B.csv",
        .help = "what changed between two sets of results, and whether it is more than chance",
        .about =
            "Configurations are matched by policy, budget, lag and what else sets them apart. Of each the change of "
            "its estimates is shown with a 90 % interval. Both files must be about the same traces, since then "
            "their resamples are paired and small changes can be told from chance.",
        .run = cmd_compare,
        .example =
            {
                {"another run of the same work, here with a part of the steps",
                 "kvlag sim out/t.h5 -o out/quick.csv -p rmm -p h2o -b 10%,25% -L 0:64:x2 --sample steps:64"},
                {"is it good enough?", "kvlag compare out/r.csv out/quick.csv"},
                {"everything, as a table", "kvlag compare out/r.csv out/quick.csv -o out/changes.csv"},
            },
    },
    {
        .name = "merge",
        .usage = "SHARD.csv... -o FILE.csv",
        .help = "put together what sim --shard k/n wrote on several machines",
        .about = "The result is byte for byte what one process would have written. A shard that is missing, there "
                 "twice or of "
                 "other work is refused.",
        .run = cmd_merge,
        .example =
            {
                {"on one machine", "kvlag sim out/t.h5 -o out/s1.csv -p rmm -b 25% -L 0:8:x2 --shard 1/2"},
                {"on another", "kvlag sim out/t.h5 -o out/s2.csv -p rmm -b 25% -L 0:8:x2 --shard 2/2"},
                {"together", "kvlag merge out/s1.csv out/s2.csv -o out/merged.csv"},
            },
    },
    {
        .name = "info",
        .usage = "FILE",
        .help = "what a trace, lifetimes or blocks file holds; how far two traces lie apart",
        .about = "Prints the facts of a trace, lifetimes or blocks file. --compare takes two traces of one text and "
                 "says how "
                 "far they lie apart, for instance those of two backends.",
        .run = cmd_info,
        .example =
            {
                {"read and verify everything", "kvlag info out/t.h5 --check"},
                {"which configurations a lifetimes file holds", "kvlag info out/h.h5"},
                {"for scripts", "kvlag info out/t.h5 --json"},
            },
    },
    {
        .name = "make-trace",
        .usage = "KIND -o FILE.h5",
        .help = "write a trace that no model made: synthetic, of any size",
        .about =
            "For trying out long contexts and for texts whose structure is known. The file is a trace like any other.",
        .run = cmd_make_trace,
        .operand = OPERAND_SECTION,
        .example =
            {
                {"attention that looks real, without gradients",
                 "kvlag make-trace random -o out/long.h5 --tokens 2048 --layers 2 --heads 8"},
                {"facts that are needed again, with gradients to price them",
                 "kvlag make-trace reuse -o out/reuse.h5 --tokens 1024"},
            },
    },
    {
        .name = "policies",
        .usage = "[NAME]",
        .help = "the policies, their parameters and papers",
        .about =
            "Lists every policy and wrapper, or shows one: the paper or code it follows, its axes, its parameters with "
            "their defaults.",
        .run = cmd_policies,
        .operand = OPERAND_POLICY,
        .example =
            {
                {"one policy", "kvlag policies rmm"},
                {"a wrapper, which goes around any policy", "kvlag policies ada"},
                {"for scripts", "kvlag policies --json"},
            },
    },
    {
        .name = "help",
        .usage = "[COMMAND | TOPIC]",
        .help = "this page, a command's options and examples, or a topic",
        .about = "Shows the commands and topics, or everything about one of them.",
        .run = cmd_help,
        .operand = OPERAND_TOPIC,
        .example =
            {
                {"everything about sim", "kvlag help sim"},
                {"how policies are written", "kvlag help spec"},
            },
    },
    {
        .name = "man",
        .usage = "[COMMAND]",
        .help = "the manual as man pages",
        .about = "Prints kvlag.1, or the page of a command, in roff; with -o DIR writes all pages. make install puts "
                 "them where "
                 "man finds them.",
        .run = cmd_man,
        .operand = OPERAND_COMMAND,
        .example =
            {
                {"read the overview", "kvlag man | man -l -"},
                {"write kvlag.1, kvlag-sim.1 and so on", "kvlag man -o out/man"},
            },
    },
    {
        .name = "completion",
        .usage = "bash | zsh | fish",
        .help = "completion for a shell: commands, options, policies, parameters",
        .about = "Prints a script for the shell. It asks kvlag itself what could come next, with completion --line, so "
                 "that it knows every policy and parameter that this kvlag has, and those of a --plugin on the line, "
                 "which is loaded for it. Put specs in quotes: 'rmm(l<TAB> goes on with 'rmm(lag=.",
        .run = cmd_completion,
        .operand = OPERAND_SHELL,
        .example =
            {
                {"for this shell; in ~/.bashrc for all", "source <(kvlag completion bash)"},
                {"what could come next", "kvlag completion --line \"kvlag sim -p 'rmm(signal=\""},
            },
    },
    {.name = NULL},
};

const command *command_find(const char *name) {
    const char *names[sizeof commands / sizeof *commands];
    size_t n = 0;
    for (const command *c = commands; c->name; c++) {
        if (strcmp(c->name, name) == 0) return c;
        names[n++] = c->name;
    }
    const char *near = opt_nearest(name, names, n);
    if (near) err_set(ERR_USAGE, "unknown command '%s' (did you mean %s?)", name, near);
    else err_set(ERR_USAGE, "unknown command '%s' (see kvlag help)", name);
    return NULL;
}
