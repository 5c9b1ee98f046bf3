#include "cli/topics.h"

const topic topics[] = {
    {
        .name = "spec",
        .title = "Specs",
        .help = "how policies are written: parameters, lists, expressions, wrappers",
        .body = "-p SPEC names a policy, and may be given as often as wanted. kvlag policies\n"
                "lists the names, kvlag policies NAME shows the parameters. Put specs in\n"
                "quotes: shells give ( and | meanings of their own.\n"
                "\n"
                "  rmm                         with its defaults\n"
                "  h2o(hold=8,sinks=4)         parameters by name, in any order\n"
                "  oracle(mass)                some need no name\n"
                "  rmm(lag=0|8|64)             a list: three configurations\n"
                "  h2o(hold=8|16,sinks=0|4)    lists combine: four configurations\n"
                "\n"
                "Values may be expressions, worked out for each configuration:\n"
                "\n"
                "  h2o(hold=budget/2)          half the budget, rounded down\n"
                "  ema(hold=lag)               tied to the lag: -L sweeps it\n"
                "  lfu(tau=1/resident)         one over the number of resident entries\n"
                "  oracle(mass,horizon=inf)    no end\n"
                "\n"
                "Wrappers go around any policy and nest. Each is short for parameters that\n"
                "every policy has; kvlag policies lists them.\n"
                "\n"
                "  lag(0|8,h2o)                evidence ends 0 or 8 rows after arrival\n"
                "  ada(h2o)                    the heads of a layer share one budget\n"
                "  lag(8,ada(pyramid(h2o)))    nested\n"
                "\n"
                "mix puts a policy together from evidence (what a step tells of an entry) and\n"
                "memory (how evidence adds up):\n"
                "\n"
                "  mix(evidence=attn,memory=ema:0.98,hold=16)\n"
                "\n"
                "A value in a spec beats an option of the command, which beats the default.\n",
    },
    {
        .name = "budgets",
        .title = "Budgets and lags",
        .help = "-b, -L, --schedule, --unit and --pending",
        .body = "A budget is the number of entries that stay in a unit after eviction, sinks\n"
                "and entries on hold included. The unit is a kv head of a layer; with --unit\n"
                "layer or model a position leaves all heads of the unit at once.\n"
                "\n"
                "  -b 64,128                   entries\n"
                "  -b 10%,25%                  shares of the sequence, rounded down\n"
                "\n"
                "The lag is the number of rows after an entry's arrival that are looked at\n"
                "before it is judged. -L goes to every policy that has a lag and does not fix\n"
                "it in its spec.\n"
                "\n"
                "  -L 8,16                     lags\n"
                "  -L 0:64:8                   0, 8, 16 ... 64\n"
                "  -L 0:256:x2                 0, 1, 2, 4 ... 256\n"
                "  -L budget/2                 half the budget\n"
                "\n"
                "Entries that wait for their lag are pending. --pending charged counts them in\n"
                "the budget, as a server must; free does not, which shows what the information\n"
                "alone is worth; both does both.\n"
                "\n"
                "  --schedule step             evict after every step\n"
                "  --schedule every:P          every P steps, never above the budget\n"
                "  --schedule watermark:F      when above the budget, down to F of it\n"
                "  --schedule block:N          whole blocks of N positions\n"
                "  --schedule prompt           once, at the prompt's end\n"
                "\n"
                "Points of a grid that cannot be (a hold above the budget) are skipped by name;\n"
                "alone they are an error.\n",
    },
    {
        .name = "grid",
        .title = "Option files",
        .help = "--grid FILE: a sweep that is worth keeping",
        .body = "--grid FILE takes options from a file: lines of key = value, where the keys\n"
                "are the long names of the command's options.\n"
                "\n"
                "  # rmm against h2o\n"
                "  policy = rmm(lag=0|8|64)\n"
                "  policy = h2o\n"
                "  budget = 10%,25%\n"
                "  pending = both\n"
                "  output = results/first.csv\n"
                "\n"
                "A # at the start of a line or behind a blank begins a comment. Options that\n"
                "may repeat on the command line (policy, plugin) may repeat here. Flags are\n"
                "true or false. Relative file names start from the file's folder.\n"
                "\n"
                "The command line goes before the file: an option that is given there replaces\n"
                "all of the file's values for it, all policies too. Results are the same bytes\n"
                "as with the same options on the command line.\n",
    },
    {
        .name = "files",
        .title = "Files",
        .help = "what is read and written",
        .body = "  FILE.h5                     a trace (HDF5; traces/FORMAT.md)\n"
                "  FILE.csv                    results: a row for each configuration\n"
                "  FILE.blocks.h5              beside it: sums over blocks of steps, from\n"
                "                              which intervals are made\n"
                "  FILE.csv.partial            what a stopped sim --resume had finished\n"
                "  FILE.h5.partial             what a stopped trace --resume had finished\n"
                "  FILE.lifetimes.h5           when each entry left (sim --lifetimes)\n"
                "  FILE.json                   a calibration (verify --calibrate)\n"
                "\n"
                "An output appears under its name when it is whole, and not before. Existing\n"
                "files are replaced only with --force.\n",
    },
    {
        .name = "environment",
        .title = "Environment",
        .help = "variables that are looked at",
        .body = "  NO_COLOR                    set and not empty: no colours on terminals\n"
                "  TERM                        dumb: no colours either\n"
                "  COLUMNS                     width of figures that are drawn as text\n"
                "  KVLAG_CUDA_PLUGIN           the CUDA backend, instead of kvlag-cuda.so\n"
                "                              beside kvlag or in ../lib/kvlag\n"
                "  KVLAG_KERNELS               vector code: portable, avx2 or avx512;\n"
                "                              results are the same\n",
    },
    {.name = 0},
};
