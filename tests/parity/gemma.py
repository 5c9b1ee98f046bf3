"""Gemma 3 270M on its real weights against transformers, which reads the same file with its own loader: `gemma.py`.

Genesis at T = 2, 7, 300 and 600, the last beyond the window of the local layers (512): logits, attention rows, what
lies outside the windows, gradients. Then the perplexities of a few texts as `kvlag trace` stores them.
"""

import argparse
import os
import subprocess
import sys
import tempfile

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np
import torch
import transformers

from gradients import autograd, dump as dump_gradients
from logits import LOGITS, ROOT, ROWS

GRADIENTS, NLL = 1e-2, 1e-3
WINDOW, GLOBAL = 512, [5, 11, 17]  # of Gemma 3 270M: every sixth layer sees everything
LENGTHS = {2: 0, 7: 0, 300: 200, 600: 500}  # tokens: how many of them are prompt where gradients are taken
TEXTS = ["scripture", "legal", "python", "dialogue", "table"]
PERPLEXITY = 50  # at most: a model that is read wrongly gives thousands


def reference_model(path):
    transformers.utils.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    folder, file = os.path.split(path)
    options = dict(dtype=torch.float32, attn_implementation="eager")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, **options).eval()


def trace(kvlag, path, text, folder):
    """Token ids, log probabilities of the targets, and each layer's window, as stored."""
    out = os.path.join(folder, "trace.h5")
    command = [kvlag, "trace", path, text, "-o", out, "--tokens", str(max(LENGTHS)), "--force", "-q"]
    subprocess.run([*command, "--attention", "factored", "--gradients", "none"], check=True)
    with h5py.File(out) as f:
        return f["seq/0000/tokens"][:], f["seq/0000/logits/target_logprob"][:], f.attrs["window"][:]


def dump_forward(program, path, tokens, shape, folder):
    """Logits [T, n_vocab] and rows [n_layer, n_head, T, T], still in the file: at T = 600 they take 0.7 GB."""
    ids, out = os.path.join(folder, "tokens.i32"), os.path.join(folder, "dump.f32")
    tokens.astype(np.int32).tofile(ids)
    subprocess.run([program, path, ids, out], check=True)
    n_layer, n_head, n_vocab, T = *shape, len(tokens)
    values = np.memmap(out, np.float32, "r")
    rows = values[T * n_vocab :][: n_layer * n_head * T * T]
    return values[: T * n_vocab].reshape(T, n_vocab), rows.reshape(n_layer, n_head, T, T)


# ---- comparisons -----------------------------------------------------------------------------------------------------

failures = 0


def within(what, value, limit):
    global failures
    failures += not value <= limit
    print(f"  {'ok  ' if value <= limit else 'FAIL'} {what}: {value:.2e} (at most {limit:.0e})", flush=True)


def largest(ours, want):
    return max(float(np.max(np.abs(a - b))) for a, b in zip(ours, want, strict=True))


def relative(ours, want):
    """The norm of the difference over that of the reference, in the worst layer of the worst set of labels."""
    norm = lambda x: np.linalg.norm(x.astype(np.float64).reshape(*x.shape[:2], -1), axis=2)  # noqa: E731
    return float(np.max(norm(ours - want) / norm(want)))


def compare_windows(rows, window):
    """Local layers see the last entry of their windows and none beyond; global layers do see those."""
    n_layer, T = rows.shape[0], rows.shape[2]
    step, entry = np.indices((T, T))
    expected = [0 if layer in GLOBAL else WINDOW for layer in range(n_layer)]
    within("windows in the trace that are not the model's", float((window != expected).sum()), 0)
    last, outside = step - entry == WINDOW - 1, step - entry >= WINDOW
    blind = [layer for layer in range(n_layer) if not rows[layer][:, last].any()]
    far = [layer for layer in range(n_layer) if rows[layer][:, outside].any()]
    within("layers that do not see the last entry of a window", len(blind), 0)
    within("layers that see further and should not, or the reverse", len(set(far) ^ set(GLOBAL)), 0)


def compare(model, path, tokens, n_prompt, window, args, folder):
    config, T = model.config, len(tokens)
    shape = (config.num_hidden_layers, config.num_attention_heads)
    print(f"Genesis, {T} tokens")
    with torch.no_grad():
        want = model(torch.tensor(tokens[None].astype(np.int64)), output_attentions=True)
    logits, rows = dump_forward(args.forward, path, tokens, (*shape, config.vocab_size), folder)
    print(f"  logits lie between {logits.min():.1f} and {logits.max():.1f}")
    within("logits", largest(logits, want.logits[0].numpy()), LOGITS)
    within("attention rows", largest(rows, (a[0].numpy() for a in want.attentions)), ROWS)
    if T > WINDOW:
        compare_windows(rows, window)
    del want, logits, rows
    shape = (shape[0], T, shape[1] * config.head_dim)
    label, ours = dump_gradients(args.gradients, path, tokens, n_prompt, shape, folder)
    gradient, _ = autograd(model, tokens, n_prompt, label)
    within("gradients", relative(ours, gradient), GRADIENTS)


def compare_perplexity(model, path, name, args, folder):
    tokens, stored, _ = trace(args.kvlag, path, os.path.join(ROOT, f"tests/fidelity/texts/{name}.txt"), folder)
    target = torch.tensor(tokens[None].astype(np.int64))
    with torch.no_grad():
        want = torch.nn.functional.cross_entropy(model(target).logits[0, :-1], target[0, 1:]).item()
    ours = -float(stored.mean(dtype=np.float64))
    print(f"{name}, {len(tokens)} tokens: perplexity {np.exp(ours):.3f}, of transformers {np.exp(want):.3f}")
    within("nats per token", abs(ours - want), NLL)
    within("perplexity", np.exp(ours), PERPLEXITY)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    build = os.path.join(ROOT, os.environ.get("BUILD", "build/gcc-release"))
    parser.add_argument("--kvlag", default=os.path.join(build, "kvlag"))
    parser.add_argument("--forward", default=os.path.join(build, "tests/parity/dump_forward"))
    parser.add_argument("--gradients", default=os.path.join(build, "tests/parity/dump_gradients"))
    parser.add_argument("model", nargs="?", default=os.path.join(ROOT, "models/gemma-3-270m-q4_k_m.gguf"))
    args = parser.parse_args()
    if not os.path.exists(args.model):
        print(f"{args.model} is not there (make gemma fetches it): nothing is compared")
        return 0
    model = reference_model(args.model)
    with tempfile.TemporaryDirectory() as folder:
        tokens, _, window = trace(args.kvlag, args.model, os.path.join(ROOT, "demo/genesis.txt"), folder)
        for T, n_prompt in LENGTHS.items():
            compare(model, args.model, tokens[:T], n_prompt, window, args, folder)
        for name in TEXTS:
            compare_perplexity(model, args.model, name, args, folder)
    print("all within their limits" if not failures else f"{failures} comparisons failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
