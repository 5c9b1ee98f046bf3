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
        .name = "models",
        .title = "Models",
        .help = "which models, weights, tokenizers and chat templates are known",
        .body = "MODEL is a GGUF file (of a split one, any file) or a folder with config.json,\n"
                "safetensors and tokenizer.json. What is not listed is refused by name.\n"
                "\n"
                "  architectures             llama, qwen2, qwen3, gemma, gemma2, gemma3,\n"
                "                            phi3, gpt2, smollm3, olmo2\n"
                "  model_type of folders     llama, mistral, qwen2, qwen3, gemma, gemma2,\n"
                "                            gemma3_text, phi3, gpt2, smollm3, olmo2\n"
                "  RoPE scaling              linear, llama3, yarn, longrope\n"
                "  weights in GGUF           F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1,\n"
                "                            Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL,\n"
                "                            IQ4_XS, MXFP4\n"
                "  weights in safetensors    F32, F16, BF16\n"
                "  tokenizers in GGUF        gpt2, llama\n"
                "  pre-tokenizers in GGUF    gpt-2, smollm, llama-bpe, smaug-bpe, dbrx,\n"
                "                            qwen2, gpt-4o, tekken\n"
                "  tokenizer.json            BPE\n"
                "  chat templates            Qwen3, ChatML, SmolLM3, Phi-4, Llama 3.1,\n"
                "                            Llama 3, Gemma 3, Gemma, Llama 2,\n"
                "                            Mistral v1, Mistral v3, Mistral Nemo,\n"
                "                            Mistral 7B v0.1, Mistral 7B v0.2,\n"
                "                            Phi-3 of April 2024, Phi-3, Phi-4-mini,\n"
                "                            OLMo 2, Zephyr\n"
                "\n"
                "Other models that transformers runs: tracer/from_transformers.py writes their\n"
                "traces (docs/recipes.md).\n",
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
