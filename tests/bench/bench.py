"""Speed as ratios: `bench.py [--quick] [--only NAME]` (make bench). docs/performance.md says what each figure means.

Both sides of a ratio run in this one call, in turn (A B A B ...). The ratio is that of their least seconds; the spread
is the largest over the smallest ratio of a repeat's pair; `processor` is the ratio of processor time, all threads
together, which other programs disturb least. BUILD is the build folder.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("BUILD", "build/gcc-release")
MODEL = ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = ROOT / "demo/genesis.txt"  # about 2700 tokens


class Cost(typing.NamedTuple):
    """Seconds, and seconds of processor time of all threads together."""

    wall: float
    processor: float


def least(costs):
    return Cost(*map(min, zip(*costs)))


class Bench:
    def __init__(self, folder, quick):
        self.folder, self.quick = folder, quick
        self.rows, self.facts = [], []

    def repeats(self, n):
        return min(n, 2) if self.quick else n

    def tokens(self, n):
        return min(n, 512) if self.quick else n

    def compare(self, figure, pairs, goal=None):
        """pairs: Cost of numerator and denominator of each repeat; goal: ("<=" or ">=", number), None where the figure
        only informs."""
        ratios = [a.wall / b.wall for a, b in pairs]
        a, b = (least(side) for side in zip(*pairs))
        ratio = a.wall / b.wall
        met = goal and (ratio <= goal[1] if goal[0] == "<=" else ratio >= goal[1])
        said = (f"{goal[0]} {goal[1]:.3g}", "yes" if met else "no") if goal else ("", "")
        self.rows.append((figure, ratio, *said, max(ratios) / min(ratios), a.processor / b.processor))
        print(f"{figure}: {a.wall:.3f} s / {b.wall:.3f} s, repeats {' '.join(f'{r:.3f}' for r in ratios)}", flush=True)


# ---- programs and what they print ------------------------------------------------------------------------------------


def output_of(*command):
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout


def costs_of_repeats(output):
    """[{name: Cost}] of the lines "repeat  products 1.293 s (2.473 s)  forward 1.480 s (2.836 s)"."""
    found = re.findall(r"^repeat.*", output, re.M)
    one = re.compile(r"(\w+) ([\d.]+) s \(([\d.]+) s\)")
    return [{name: Cost(float(wall), float(cpu)) for name, wall, cpu in one.findall(line)} for line in found]


def forward(n_tokens, repeats):
    return output_of(BUILD / "tests/bench/bench_forward", MODEL, n_tokens, 0, repeats)


def processor_seconds(pid):
    """Of all threads of a process so far (proc(5): utime and stime)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def kvlag(*arguments):
    """Run it. Returns what it said, its cost from the end of its first line on, and of all of it."""
    command = [str(a) for a in (BUILD / "kvlag", *arguments, "--force")]
    launched = time.perf_counter()
    program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said = program.stderr.readline()
    first, used = time.perf_counter(), processor_seconds(program.pid)
    said += program.stderr.read()
    _, status, usage = os.wait4(program.pid, 0)
    program.returncode = os.waitstatus_to_exitcode(status)
    end, processor = time.perf_counter(), usage.ru_utime + usage.ru_stime
    if program.returncode:
        sys.exit(f"{' '.join(command)}: {said}")
    return said, Cost(end - first, processor - used), Cost(end - launched, processor)


def kvlag_trace(path, n_tokens, form, gradients="none"):
    """From the line that announces the file, printed when the model is loaded, to the end of the process."""
    said, cost, _ = kvlag("trace", MODEL, TEXT, "--tokens", n_tokens, "--attention", form, "--gradients", gradients, "-o",
                          path)
    if "will take about" not in said.splitlines()[0]:
        sys.exit(f"kvlag trace no longer begins with what it plans: {said}")
    return cost


def kvlag_sim(trace, results):
    """Of one configuration: the closing line's seconds; processor time of the whole process."""
    said, _, whole = kvlag("sim", trace, "-o", results)
    found = re.search(r"from (\d+) configurations in ([\d.]+) s", said)
    n = int(found[1])
    return Cost(float(found[2]) / n, whole.processor / n)


# ---- the figures -----------------------------------------------------------------------------------------------------


def bench_forward(b):
    n = b.tokens(1024)
    said = forward(n, b.repeats(5))
    pairs = [(s["forward"], s["products"]) for s in costs_of_repeats(said)]
    b.facts += re.findall(r"OpenBLAS \w+|kernels \w+", said)
    b.compare(f"forward pass over its matrix products, {n} tokens", pairs, ("<=", 1.3))


def bench_backward(b):
    n = b.tokens(1024)
    said = output_of(BUILD / "tests/bench/bench_backward", MODEL, n, 0, b.repeats(4))
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


def bench_marginal(b):
    """What one more configuration costs in sim, from sweeps of 8 and of 40, against one masked rerun."""
    n, path, one = b.tokens(1024), b.folder / "factored.h5", b.folder / "one.csv"
    kvlag_trace(path, n, "factored", "fisher:1")
    specs = ["-p", "h2o", "-p", "ema", "-p", "tova", "-p", "streaming"]
    few, many = (["-b", ",".join(str(64 + 8 * i) for i in range(k))] for k in (2, 10))
    pairs = []
    for _ in range(b.repeats(3)):
        costs = [kvlag("sim", path, "-o", b.folder / "results.csv", *specs, *budgets)[2] for budgets in (few, many)]
        more = Cost((costs[1].wall - costs[0].wall) / 32, (costs[1].processor - costs[0].processor) / 32)
        reruns = [kvlag("verify", MODEL, path, "-o", one, *specs, "-b", ",".join(budgets))[2]
                  for budgets in (["64"], ["64", "72"])]  # fmt: skip
        pairs.append((more, Cost((reruns[1].wall - reruns[0].wall) / 4, (reruns[1].processor - reruns[0].processor) / 4)))
    b.compare(f"sim, one more configuration, over a masked rerun, {n} tokens", pairs, ("<=", 1 / 40))


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


def bench_reader(b):
    n, path = b.tokens(1024), b.folder / "dense.h5"
    kvlag_trace(path, n, "dense")
    said = output_of(BUILD / "tests/bench/bench_reader", path, b.repeats(5))
    repeats = costs_of_repeats(said)
    goal = (">=", 0.8)
    for way, what, wanted in (
        ("unpack", "frames to f16", goal),
        ("tiles", "file to f16", goal),
        ("rows", "file to normalised f32 rows", None),
    ):
        b.compare(f"ZSTD_decompress over reader, {what}", [(s["zstd"], s[way]) for s in repeats], wanted)


def bench_sim(b):
    for wanted, repeats in (1024, 3), (2048, 2):
        n, path = b.tokens(wanted), b.folder / "factored.h5"
        kvlag_trace(path, n, "factored")
        pairs = []
        for _ in range(b.repeats(repeats)):
            each = kvlag_sim(path, b.folder / "results.csv")
            pairs.append((each, least(s["forward"] for s in costs_of_repeats(forward(n, 2)))))
        b.compare(f"sim, a configuration, over a forward pass, {n} tokens", pairs, ("<=", 0.05))
        if b.quick:
            return


BENCHES = {"forward": bench_forward, "backward": bench_backward, "trace": bench_trace, "gradients": bench_gradients,
           "reader": bench_reader, "sim": bench_sim, "marginal": bench_marginal}  # fmt: skip


# ---- the report ------------------------------------------------------------------------------------------------------


def processor_name():
    found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    return found[1] if found else "unknown processor"


def git(*arguments):
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True).stdout.strip()


def commit():
    return git("rev-parse", "--short", "HEAD") + (" and changes" if git("status", "--porcelain", "-uno") else "")


def report(b, load, seconds):
    print(f"\n{'figure':58} {'ratio':>6} {'goal':>8} {'met':>4} {'spread':>7} {'processor':>10}")
    for figure, ratio, goal, met, spread, processor in b.rows:
        print(f"{figure:58} {ratio:6.3f} {goal:>8} {met:>4} {spread:7.2f} {processor:10.3f}")
    facts = [processor_name(), f"{len(os.sched_getaffinity(0))} threads", *dict.fromkeys(b.facts), f"commit {commit()}"]
    print(f"\n{', '.join(facts)}\nload {load:.2f} at the start, {os.getloadavg()[0]:.2f} at the end, {seconds:.0f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="512 tokens, two repeats")
    parser.add_argument("--only", choices=BENCHES, metavar="NAME", help=", ".join(BENCHES))
    args = parser.parse_args()
    load, start = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        b = Bench(Path(folder), args.quick)
        for name, run in BENCHES.items():
            if args.only in (None, name):
                run(b)
        report(b, load, time.monotonic() - start)


main()
