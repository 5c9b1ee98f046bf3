"""Speed: `bench.py [--quick] [--only NAME] [--callgrind]` (make bench). docs/performance.md says what a figure means.

Most figures are ratios. Both sides run in this one call, in turn (A B A B ...). The ratio is that of their least
seconds; the spread is the largest over the smallest ratio of a repeat's pair; `processor` is the ratio of processor
time, all threads together, which other programs disturb least. BUILD is the build folder.
"""

import argparse
import os
import re
import sys
import time
from pathlib import Path

import callgrind
import report
from programs import (BUILD, MODEL, Cost, costs_of_repeats, driver, grid, kvlag, kvlag_sim, kvlag_trace,  # fmt: skip
                      least)

# ---- the tracer ------------------------------------------------------------------------------------------------------


def bench_forward(b):
    n = b.tokens(1024)
    said = driver("bench_forward", MODEL, n, 0, b.repeats(5))
    pairs = [(s["forward"], s["products"]) for s in costs_of_repeats(said)]
    b.facts += re.findall(r"OpenBLAS \w+|kernels \w+", said)
    b.compare(f"forward pass over its matrix products, {n} tokens", pairs, ("<=", 1.3))


def bench_backward(b):
    n = b.tokens(1024)
    said = driver("bench_backward", MODEL, n, 0, b.repeats(4))
    pairs = [(s["backward"], s["products"]) for s in costs_of_repeats(said)]
    b.compare(f"pass with gradients (fisher:1) over its products, {n} tokens", pairs, ("<=", 1.6))


def bench_gradients(b):
    import pytorch_trace as theirs

    n, ours = b.tokens(1024), b.folder / "ours.h5"
    model = theirs.model_from_gguf(MODEL)
    kvlag_trace(ours, n, "factored", "fisher:1")
    tokens = theirs.tokens_of(ours)
    pairs = []
    for _ in range(b.repeats(2)):
        mine = kvlag_trace(ours, n, "factored", "fisher:1")
        pairs.append((Cost(*theirs.write_gradients(model, tokens, ours, b.folder / "theirs.h5")), mine))
    b.compare(f"PyTorch eager and autograd over kvlag trace, fisher:1, {n} tokens", pairs, (">=", 3))


def bench_trace(b):
    import torch  # only this figure needs these, and they take a while

    import pytorch_trace as theirs

    n, ours, other = b.tokens(1024), b.folder / "ours.h5", b.folder / "theirs.h5"
    model = theirs.model_from_gguf(MODEL)
    b.facts.append(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for form in "factored", "dense":
        kvlag_trace(ours, n, form)
        tokens = theirs.tokens_of(ours)
        theirs.write_trace(model, tokens, other, form == "dense")  # the first run of each is only for comparing them
        if found := theirs.differences(ours, other):
            sys.exit("not the same trace: " + "; ".join(found))
        pairs = []
        for _ in range(b.repeats(4)):
            mine = kvlag_trace(ours, n, form)
            pairs.append((Cost(*theirs.write_trace(model, tokens, other, form == "dense")), mine))
        b.compare(f"PyTorch eager over kvlag trace, {form}, {n} tokens", pairs, (">=", 3))


# ---- the reader ------------------------------------------------------------------------------------------------------


def bench_reader(b):
    n = b.tokens(1024)
    said = driver("bench_reader", b.trace(n, "dense"), b.repeats(5))
    repeats = costs_of_repeats(said)
    goal = (">=", 0.8)
    for way, what, wanted in (
        ("unpack", "frames to f16", goal),
        ("tiles", "file to f16", goal),
        ("rows", "file to normalised f32 rows", None),
    ):
        b.compare(f"ZSTD_decompress over reader, {what}", [(s["zstd"], s[way]) for s in repeats], wanted)


def bench_rows(b):
    n = b.tokens(2048)
    repeats = costs_of_repeats(driver("bench_rows", b.trace(n, "both"), 0, b.repeats(3), "factored", "dense"))
    pairs = [(s["factored"], s["dense"]) for s in repeats]
    b.compare(f"rows from q and k over rows from attn/probs, {n} tokens", pairs, ("<=", 1.0))


# ---- sim -------------------------------------------------------------------------------------------------------------


def decode(trace):
    """Rows and gradient tiles and nothing else, and how many row entries that are."""
    said = driver("bench_rows", trace, 0, 2, "factored", "gradients")
    return least([s["factored"] + s["gradients"] for s in costs_of_repeats(said)]), int(
        re.search(r"(\d+) row entries", said)[1]
    )


def loads_per_second():
    """Of f32 values by one core, from a working set of 32 KiB: four arrays of 2048."""
    seconds = least(s["kib32"] for s in costs_of_repeats(driver("bench_load", 5))).wall
    return 2**31 / 4 / seconds


def bench_sim200(b):
    """lost_mass, first and fisher of 200 configurations."""
    n, threads = b.tokens(2048), len(os.sched_getaffinity(0))
    trace, pairs, rates, shares = b.trace(n, "factored", "fisher:1"), [], [], []
    for _ in range(b.repeats(3)):
        ran, configurations, _ = kvlag_sim(trace, b.folder / "r.csv", *grid(n), "--metrics", "loss", expected=200)
        cost, entries = decode(trace)
        pairs.append((ran.whole, cost))
        rates.append(configurations * entries / ran.whole.wall / threads)
        # A configuration needs a row, two gradient streams and the lifetimes: four loads an entry.
        shares.append(rates[-1] / (loads_per_second() / 4))
    b.compare(f"sweep of 200 configurations over decoding alone, {n} tokens", pairs, ("<=", 12))
    b.state("the same: row entries priced, a second and core", [r * 1e-9 for r in rates], "G/s")
    b.state("the same over what loads from cache allow", shares, "")


def bench_marginal(b):
    """What one more configuration costs in sim, from sweeps of 40 and of 200, against one masked rerun."""
    n, one = b.tokens(2048), b.folder / "one.csv"
    trace, pairs = b.trace(n, "factored", "fisher:1"), []
    specs = ["-p", "h2o", "-p", "ema", "-p", "tova", "-p", "streaming"]
    for _ in range(b.repeats(2)):
        few, many = (kvlag_sim(trace, b.folder / "r.csv", *grid(n, k), expected=20 * k)[0].whole for k in (2, 10))
        once, twice = (kvlag("verify", MODEL, trace, "-o", one, *specs, "-b", x).whole for x in ("64", "64,72"))
        pairs.append(((many - few).times(1 / 160), (twice - once).times(1 / 4)))
    b.compare(f"sim, one more configuration, over a masked rerun, {n} tokens", pairs, ("<=", 1 / 100))


def bench_pytorch_sweep(b):
    """3 configurations rerun in PyTorch, scaled to 200, over the sweep."""
    import pytorch_masked as theirs
    from logits import model_from_gguf

    n, given, pairs = b.tokens(2048), b.folder / "given.h5", []
    trace = b.trace(n, "factored", "fisher:1")
    model, tokens = model_from_gguf(MODEL), theirs.tokens_of(trace)
    theirs.prepare(model)
    kvlag_sim(trace, b.folder / "r.csv", "-p", "h2o", "-p", "tova", "-p", "rmm", "-b", n // 8, "--lifetimes", given,
              expected=3)  # fmt: skip
    for visible in theirs.masks(given):
        rerun = Cost(*theirs.rerun(model, tokens, visible))
        sweep = kvlag_sim(trace, b.folder / "r.csv", *grid(n), "--metrics", "loss", expected=200)[0].whole
        pairs.append((rerun.times(200), sweep))
    b.compare(f"200 configurations in PyTorch over kvlag sim, {n} tokens", pairs, (">=", 300))


def bench_threads(b):
    n = b.tokens(2048)
    name = f"sweep of 40 configurations, 1 thread over 2, {n} tokens"
    if len(os.sched_getaffinity(0)) < 2:
        b.leave_out(name, "there is one processor")
        return
    trace, pairs = b.trace(n, "factored", "fisher:1"), []
    for _ in range(b.repeats(3)):
        pairs.append([kvlag_sim(trace, b.folder / "r.csv", *grid(n, 2), "--threads", k, expected=40)[0].whole
                      for k in (1, 2)])  # fmt: skip
    b.compare(name, pairs, (">=", 1.8))


def bench_growth(b):
    """Seconds a row entry; budgets are shares, so that the work on an entry is the same."""
    short, long = (256, 1024) if b.quick else (2048, 8192)
    words, pairs = ["-p", "h2o", "-p", "ema", "-p", "rmm(lag=16)", "-p", "streaming", "-b", "6.25%,12.5%,25%,40%"], []
    for name, tokens, layers in ("short", short, 4), ("long", long, 1):
        kvlag("make-trace", "random", "-o", b.folder / f"{name}.h5", "--tokens", tokens, "--layers", layers,
              "--gradients", "fisher:1")  # fmt: skip
    for _ in range(b.repeats(3)):
        costs = []
        for name, tokens, layers in ("long", long, 1), ("short", short, 4):
            ran = kvlag_sim(b.folder / f"{name}.h5", b.folder / "r.csv", *words, expected=16)[0]
            costs.append(ran.whole.times(1e9 / (layers * 8 * tokens * (tokens + 1) / 2)))
        pairs.append(costs)
    b.compare(f"sim, a row entry, {long} over {short} tokens (ns for s)", pairs, ("<=", 1.1))


def bench_replay(b):
    """Policy steps a second of one core; libCacheSim's paper reports 2.8 to 5.4 million requests."""
    n = b.tokens(2048)
    said = driver("bench_replay", b.trace(n, "factored", "fisher:1"), b.repeats(5), f"{n // 32},{n // 8},{n // 2}")
    names = dict(re.findall(r"^configuration (\w+): (.*)", said, re.M))
    repeats = costs_of_repeats(said)
    for key, name in names.items():
        b.state(f"replay alone, {name}, {n} tokens", [n / s[key].wall * 1e-6 for s in repeats], "M steps/s")


def bench_sim(b):
    for wanted, repeats in (1024, 3), (2048, 2):
        n = b.tokens(wanted)
        trace, pairs = b.trace(n, "factored"), []
        for _ in range(b.repeats(repeats)):
            ran, configurations, seconds = kvlag_sim(trace, b.folder / "r.csv")
            each = Cost(seconds, ran.whole.processor).times(1 / configurations)
            said = driver("bench_forward", MODEL, n, 0, 2)
            pairs.append((each, least(s["forward"] for s in costs_of_repeats(said))))
        b.compare(f"sim, a configuration, over a forward pass, {n} tokens", pairs, ("<=", 0.05))
        if b.quick:
            return


def long_context(b, gradients):
    n, long = 8192 if b.quick else 131072, b.folder / "long.h5"
    kvlag("make-trace", "random", "-o", long, "--tokens", n, "--heads", 8, "--gradients", gradients)
    words = ["-p", "h2o", "-p", "ema", "-p", "rmm(lag=16)", "-p", "streaming", "-b", "256,1024,4096,25%"]
    ran = kvlag_sim(long, b.folder / "r.csv", *words, expected=16)[0]
    print(ran.said.strip())
    with_ = "" if gradients == "none" else f", {gradients}"
    b.state(f"resident memory of sim, 16 configurations, {n} tokens{with_}", [ran.peak], "MiB", ("<=", 1024))
    b.state(f"the same: row entries priced, a second and core{with_}",
            [16 * 8 * n * (n + 1) / 2 / ran.whole.wall / len(os.sched_getaffinity(0)) * 1e-9], "G/s")  # fmt: skip


def bench_memory(b):
    long_context(b, "none")


def bench_memory_loss(b):
    long_context(b, "fisher:1")


BENCHES = {"forward": bench_forward, "backward": bench_backward, "trace": bench_trace, "gradients": bench_gradients,
           "reader": bench_reader, "rows": bench_rows, "sim": bench_sim, "sim200": bench_sim200,
           "threads": bench_threads, "growth": bench_growth, "replay": bench_replay, "marginal": bench_marginal,
           "pytorch_sweep": bench_pytorch_sweep, "memory": bench_memory,
           "memory_loss": bench_memory_loss}  # fmt: skip
ON_REQUEST = {"memory", "memory_loss"}  # many minutes each


def measure(folder, quick, only):
    load, start = os.getloadavg()[0], time.monotonic()
    b = report.Bench(folder, quick)
    for name, run in BENCHES.items():
        if name in only or (not only and name not in ON_REQUEST):
            run(b)
    report.print_table(("figure", "value", "goal", "met", "spread", "processor"), b.rows)
    report.print_facts(b.facts, load, time.monotonic() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="512 tokens, two repeats")
    parser.add_argument("--only", choices=BENCHES, metavar="NAME", action="append", default=[],
                        help=f"may repeat: {', '.join(BENCHES)}; only on request: {', '.join(sorted(ON_REQUEST))}")  # fmt: skip
    parser.add_argument("--callgrind", action="store_true", help="instructions per row entry instead of seconds")
    args = parser.parse_args()
    if not (BUILD / "kvlag").exists():
        sys.exit(f"{BUILD}/kvlag is not built (make all unit)")
    with report.folder() as folder:
        if not args.callgrind:
            return measure(folder, args.quick, args.only)
        load, start = os.getloadavg()[0], time.monotonic()
        callgrind.run(Path(folder))
        report.print_facts([], load, time.monotonic() - start)


main()
