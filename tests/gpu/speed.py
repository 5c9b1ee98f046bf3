"""End to end: `speed.py FOLDER` makes a random 1 B-class model there and traces it at several lengths, precisions and
forms, next to the rate of the model's own matrix products (the ladder's) and to PyTorch eager (torch_eager.py). Prints
Markdown tables and the goals that they meet or miss; exit 1 where something did not run. Goals missed are no failure.

KVLAG and LADDER name the programs; TEXT a text. `--small` shrinks everything, for tests without a device."""

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass

HERE = os.path.dirname(os.path.abspath(__file__))
CLOSING = re.compile(r": (\d+) tokens in ([\d.]+) s \(([\d.]+) tokens/s, ([\d.]+) GFLOP/s\), ([\d.]+) MiB")
TIMES = re.compile(r"time: compute ([\d.]+) s, copy ([\d.]+) s, compress ([\d.]+) s \(\d+ threads\), "
                   r"write ([\d.]+) s of ([\d.]+) s; bound by (.*)")  # fmt: skip
PRECISIONS = "bf16", "f32"  # the first first: time may run out

failed = 0


@dataclass
class Size:
    layers: int
    embd: int
    heads: int
    kv_heads: int
    ff: int
    vocab: int
    factored: list  # numbers of tokens
    dense: list

    def options(self):
        return ["--layers", self.layers, "--embd", self.embd, "--heads", self.heads, "--kv-heads", self.kv_heads,
                "--ff", self.ff]  # fmt: skip

    def forward_flop(self, n):
        """Of a pass over n tokens: all products, attention as the triangle it is."""
        dim = self.embd // self.heads
        layer = 2 * self.embd * self.embd + 2 * self.embd * self.kv_heads * dim + 3 * self.embd * self.ff
        attention = 4 * n * (n + 1) / 2 * self.heads * dim * self.layers
        return 2 * n * (layer * self.layers + self.embd * self.vocab) + attention


FULL = Size(16, 2048, 32, 8, 8192, 1024, [8192, 4096, 1024], [1024, 2048])
SMALL = Size(2, 128, 4, 2, 256, 1024, [100], [40])


def run(*command):
    """Its output, or None after a line that says why not."""
    global failed
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout + done.stderr
    failed = 1
    print(f"\nFAILED, exit {done.returncode}: `{' '.join(map(str, command[:4]))} ...`: "
          f"{' '.join((done.stderr.strip() or done.stdout.strip()).splitlines()[-1:])}\n", flush=True)  # fmt: skip
    return None


# ---- kvlag -----------------------------------------------------------------------------------------------------------


@dataclass
class Traced:
    seconds: float
    compute: float
    bound: str


def trace(folder, model, n, precision, attention, gradients):
    """One line of the table."""
    out = os.path.join(folder, "speed.h5")
    said = run(os.environ["KVLAG"], "trace", model, os.path.join(folder, "text.txt"), "-o", out, "--force",
               "--tokens", n, "--backend", "cuda", "--precision", precision, "--attention", attention,
               "--gradients", gradients)  # fmt: skip
    if said is None:
        return None
    os.remove(out)
    closing, times = CLOSING.search(said), TIMES.search(said)
    if not closing or not times:
        run("false", "the lines of kvlag trace read otherwise than expected:", said)
        return None
    tokens_per_second, mib = float(closing[3]), closing[5]
    compute, copy, compress, write = map(float, times.groups()[:4])
    seconds = float(closing[1]) / tokens_per_second if tokens_per_second else float(closing[2])
    print(f"| {n} | {precision} | {attention} | {gradients} | {seconds:.3f} | {tokens_per_second:.0f} | {closing[4]} | "
          f"{compute} | {copy} | {compress} | {write} | {mib} | {times[6]} |", flush=True)  # fmt: skip
    return Traced(seconds, compute, times[6])


def traces(folder, model, size):
    """{(tokens, precision, attention, gradients): Traced}."""
    print("| tokens | products | attention | gradients | s | tokens/s | GFLOP/s | compute s | copy s | compress s "
          "| write s | MiB | bound by |\n|" + "---|" * 13, flush=True)  # fmt: skip
    plan = [(n, p, "factored", g) for n in size.factored for p in PRECISIONS for g in ("none", "fisher:1")]
    plan += [(n, p, "dense", "none") for n in size.dense for p in PRECISIONS]
    plan += [(n, p, "factored", "none") for n in size.dense for p in PRECISIONS if n not in size.factored]
    return {key: traced for key in plan if (traced := trace(folder, model, *key))}


# ---- what it is measured by ------------------------------------------------------------------------------------------


def product_rates(size, n):
    """{precision: FLOP/s} of a layer's products over n tokens."""
    said = run(os.environ["LADDER"], "products=1", f"tokens={n}", f"embd={size.embd}", f"heads={size.heads}",
               f"kv={size.kv_heads}", f"ff={size.ff}")  # fmt: skip
    rows = [line.split() for line in (said or "").splitlines()]
    return {row[0]: float(row[2]) / float(row[1]) for row in rows if len(row) == 3}


def against_products(size, found):
    print("\nForward and capture against the products' own rate (all of the pass's multiply-adds over the time that "
          "the device computed; attention is f32 in both modes):\n\n"
          "| tokens | products | forward TFLOP/s | cuBLAS TFLOP/s, a layer's products | share | goal 60 % |\n"
          "|---|---|---|---|---|---|")  # fmt: skip
    for n in size.factored:
        rates = product_rates(size, n)
        for precision in PRECISIONS:
            traced = found.get((n, precision, "factored", "none"))
            if not traced or precision not in rates or not traced.compute:
                continue
            rate = size.forward_flop(n) / traced.compute
            share = rate / rates[precision]
            print(f"| {n} | {precision} | {rate * 1e-12:.2f} | {rates[precision] * 1e-12:.2f} | {share:.0%} | "
                  f"{'met' if share >= 0.6 else 'missed'} |", flush=True)  # fmt: skip


def against_torch(size, found):
    if not any(n in size.dense for n, *_ in found):
        return
    try:
        import torch  # noqa: F401
    except ImportError:
        print("\nPyTorch is not installed: no comparison.", flush=True)
        return
    said = run(sys.executable, os.path.join(HERE, "torch_eager.py"), *size.options(), "--tokens",
               ",".join(map(str, size.dense)), "--precision", ",".join(PRECISIONS))  # fmt: skip
    print("\nPyTorch eager, probabilities to the host as f16 and no file, over kvlag trace, file written, no "
          "gradients:\n\n"
          "| tokens | products | PyTorch s | without the copy | kvlag factored s | ratio | kvlag dense s | ratio "
          "| goal 10 |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for row in map(str.split, (said or "").splitlines()):
        if len(row) != 4 or row[0] not in PRECISIONS:
            continue
        eager, cells = float(row[2]), []
        ratios = []
        for attention in "factored", "dense":
            traced = found.get((int(row[1]), row[0], attention, "none"))
            ratios.append(eager / traced.seconds if traced else 0)
            cells.append(f"{traced.seconds:.3f} | {ratios[-1]:.1f}" if traced else " | ")
        print(f"| {row[1]} | {row[0]} | {row[2]} | {row[3]} | {cells[0]} | {cells[1]} | "
              f"{'met' if max(ratios) >= 10 else 'missed'} |", flush=True)  # fmt: skip


def bound_of_longest(size, found):
    n = max(size.factored)
    for gradients in "none", "fisher:1":
        traced = found.get((n, "bf16", "factored", gradients))
        if traced:
            good = traced.bound in ("compression", "writing")
            print(f"\nbf16 at {n} tokens, gradients {gradients}: bound by {traced.bound} (goal: compression or disk, "
                  f"{'met' if good else 'missed'}).")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    size = SMALL if options.small else FULL
    model, start = os.path.join(options.folder, "random.gguf"), time.monotonic()
    made = run(sys.executable, os.path.join(HERE, "make_model.py"), model, *size.options())
    if made is None:
        sys.exit(1)
    print(f"{os.path.basename(made.strip())}, made in {time.monotonic() - start:.1f} s; {size.layers} layers, "
          f"embedding {size.embd}, {size.heads} heads over {size.kv_heads}, feed-forward {size.ff}, vocabulary "
          f"{size.vocab}. Seconds run from the loaded model to the last byte.\n", flush=True)  # fmt: skip
    with open(os.environ["TEXT"], encoding="utf-8") as f:
        words = f.read()
    with open(os.path.join(options.folder, "text.txt"), "w", encoding="utf-8") as f:
        f.write(words * (6 * max(size.factored) // len(words) + 1))
    found = traces(options.folder, model, size)
    bound_of_longest(size, found)
    against_torch(size, found)
    against_products(size, found)
    sys.exit(failed)


main()
