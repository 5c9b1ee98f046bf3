"""Instructions per row entry, counted by valgrind's callgrind: for machines on which time says little.

Everything runs on one thread over small synthetic traces. A count is the difference of two runs that differ in nothing
but how often, or for how many configurations, the work was done, so that start-up drops out. Valgrind knows no AVX-512:
the kernels are those for AVX2.
"""

import os
import re
import shutil
import subprocess
import sys

from programs import BUILD, kvlag
from report import print_table

TOKENS, HEADS, BUDGETS = 512, 4, [64, 80, 96, 112, 128, 144, 160, 176]
ENTRIES = TOKENS * (TOKENS + 1) // 2 * HEADS
SPECS = ["h2o", "ema", "tova(unit=head)", "rmm(lag=16)", "streaming"]


def instructions(*command):
    done = subprocess.run(
        ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", *map(str, command)],
        capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})  # fmt: skip
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or not found:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr}")
    return int(found[1])


def reading(trace, way):
    counts = [instructions(BUILD / "tests/bench/bench_rows", trace, 1, n, way) for n in (1, 3)]
    return (counts[1] - counts[0]) / 2


def replaying(trace, spec):
    """One configuration, budget 64, in the first half of the heads."""
    counts = [instructions(BUILD / "tests/bench/bench_replay", trace, n, 64, spec) for n in (1, 3)]
    return (counts[1] - counts[0]) / 2 * 2  # two kv heads


def budgets(n):
    return ["-b", ",".join(map(str, BUDGETS[:n]))]


def sweeping(trace, folder, spec):
    """One more configuration: replay and price."""
    base = BUILD / "kvlag", "sim", trace, "-o", folder / "r.csv", "-p", spec, "--threads", 1, "-q", "--force"
    return (instructions(*base, *budgets(8)) - instructions(*base, *budgets(4))) / 4


def pricing(trace, folder, spec):
    """One more configuration whose lifetimes are given."""
    counts = []
    for n in (4, 8):
        given = folder / f"{n}.lifetimes.h5"
        kvlag("sim", trace, "-o", folder / "r.csv", "-p", spec, *budgets(n), "--lifetimes", given)
        counts.append(instructions(BUILD / "kvlag", "sim", trace, "-o", folder / "r.csv", "--from-lifetimes", given,
                                   "--threads", 1, "-q", "--force"))  # fmt: skip
    return (counts[1] - counts[0]) / 4


def run(folder):
    if not shutil.which("valgrind"):
        print("skipped: instruction counts (--callgrind) need valgrind, which is not here")
        return
    trace = folder / "small.h5"
    kvlag("make-trace", "random", "-o", trace, "--tokens", TOKENS, "--heads", HEADS, "--kv-heads", 2, "--attention",
          "both", "--gradients", "fisher:1")  # fmt: skip
    found = [(f"reader, {way}", reading(trace, way)) for way in ("factored", "dense", "gradients")]
    found += [(f"replay alone, {spec}, budget 64", replaying(trace, spec)) for spec in SPECS]
    found += [("pricing, one more configuration (lost_mass, first, fisher)", pricing(trace, folder, "h2o"))]
    found += [("sweep, one more configuration of h2o", sweeping(trace, folder, "h2o"))]
    rows = [(name, f"{count:.0f}", f"{count / ENTRIES:.3f}") for name, count in found]
    print(f"synthetic trace, {TOKENS} tokens, {HEADS} heads over 2, {ENTRIES} row entries\n")
    print_table(("what", "instructions", "per row entry"), rows)
