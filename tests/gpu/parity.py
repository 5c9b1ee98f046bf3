"""CUDA against the CPU, and against itself: `parity.py MODEL.gguf TEXT [--tokens N] [--other MODEL2.gguf ...]`.

KVLAG names the program, which finds the CUDA backend. Prints a Markdown table of what was measured and what is allowed;
exit 1 where something is beyond it. Of an --other model only the forms of the weights are compared."""

import argparse
import filecmp
import json
import os
import subprocess
import sys
import tempfile

KVLAG = os.environ.get("KVLAG", "./kvlag")
F16_STEP = 2**-11  # of probabilities from 1/2 on: a stored value may round to either side

failed = 0


def line(what, value, bound="", good=True):
    global failed
    failed += not good
    print(f"| {what} | {value} | {bound} | {'ok' if good else 'FAILED'} |", flush=True)


class Traces:
    """Traces of one text, each in a file of its own in the folder."""

    def __init__(self, folder, model, text, tokens):
        self.folder, self.model, self.text, self.tokens = folder, model, text, tokens

    def make(self, *options):
        """Its path; None where it failed."""
        out = os.path.join(self.folder, f"{len(os.listdir(self.folder))}.h5")
        start = [KVLAG, "trace", self.model, self.text, "-o", out, "--tokens", str(self.tokens), "--attention", "both"]
        done = subprocess.run([*start, *options], capture_output=True, text=True)
        if done.returncode:
            why = " ".join(done.stderr.strip().splitlines()[-1:])
            line(f"trace {' '.join(options)}", f"exit {done.returncode}: {why}", good=False)
        return None if done.returncode else out

    def cuda(self, *options):
        return self.make("--backend", "cuda", *options)


def same_bytes(what, a, b):
    if a and b:
        same = filecmp.cmp(a, b, shallow=False)
        line(what, "same bytes" if same else "other bytes", "same bytes", same)


def compare(a, b):
    """{dataset: what info --compare says of it}; empty where a trace is missing."""
    if not a or not b:
        return {}
    done = subprocess.run([KVLAG, "info", "--compare", "--json", a, b], capture_output=True, text=True)
    if done.returncode:
        line("info --compare", done.stderr.strip(), good=False)
        return {}
    return {d["path"]: d for d in json.loads(done.stdout)["sequences"][0]["datasets"]}


def against_cpu(found):
    """f32 within the bounds; labels drawn from almost equal predictions may differ, and with them their gradients."""
    for path in "logits/target_logprob", "logits/topk_logprob", "logits/entropy":
        if path in found:
            most = found[path]["max"]
            line(f"f32 against the CPU: {path}, largest difference", f"{most:.2e}", "2e-3", most <= 2e-3)
    if rows := found.get("attention rows"):
        bound = 1e-4 + F16_STEP
        line("f32 against the CPU: probabilities, mean difference", f"{rows['mean']:.2e}", "1e-4", rows["mean"] <= 1e-4)
        line("f32 against the CPU: probabilities, largest difference", f"{rows['max']:.2e}", f"{bound:.2e}",
             rows["max"] <= bound)  # fmt: skip
    for path in "logits/topk_id", "grad/fisher_label":
        if path in found:
            line(f"f32 against the CPU: {path}, share that agrees", f"{found[path]['agree']:.4%}")
    labels_agree = found.get("grad/fisher_label", {}).get("agree") == 1
    for path in "grad/loss", "grad/fisher":
        if path in found:
            ratio, cosine = found[path]["norm_ratio"], found[path]["cosine"]
            bound = path == "grad/loss" or labels_agree
            good = not bound or abs(ratio - 1) <= 0.01 and cosine >= 0.9999
            line(f"f32 against the CPU: {path}, norm ratio and cosine of the worst layer", f"{ratio:.6f}, {cosine:.6f}",
                 "1 % off 1, .9999" if bound else "", good)  # fmt: skip


def forms(traces, precision):
    """The ways to hold the weights give equal bytes, and so do two runs. Returns the trace."""
    first = traces.cuda("--precision", precision)
    same_bytes(f"{precision}: a second run", first, traces.cuda("--precision", precision))
    for options in ["--weights", "blocks"], ["--offload"], ["--weights", "blocks", "--offload"]:
        same_bytes(f"{precision}: {' '.join(options)}", first, traces.cuda("--precision", precision, *options))
    return first


def check(folder, model, text, tokens):
    traces = Traces(folder, model, text, tokens)
    cpu = traces.make("--backend", "cpu")
    against_cpu(compare(cpu, forms(traces, "f32")))
    found = compare(cpu, forms(traces, "bf16")).get("logits/target_logprob")
    if found:
        mean = found["mean"]
        line("bf16 against f32: mean difference of target_logprob", f"{mean:.2e}", ".05", mean <= 0.05)
        line("bf16 against f32: largest difference of target_logprob", f"{found['max']:.2e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--other", nargs="*", default=[])
    options = parser.parse_args()
    print(f"{os.path.basename(options.model)}, {options.tokens} tokens:\n")
    print("| what | measured | allowed | |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        check(folder, options.model, options.text, options.tokens)
        for model in options.other:
            line(f"{os.path.basename(model)}:", "")
            forms(Traces(folder, model, options.text, options.tokens), "f32")
    print()
    sys.exit(1 if failed else 0)


main()
