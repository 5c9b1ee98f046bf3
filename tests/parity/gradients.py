"""Our gradients against PyTorch's autograd on the same weights, token ids and labels: `gradients.py`.

For each model, gradients of the summed cross-entropy with respect to the heads' outputs (the input of the output
projection), for the text's own labels and for the labels that we drew: what dump_gradients computed in f32, and what
`kvlag trace` stored. Per layer and label set, the norm of the difference over the norm of the reference, and 1 minus
the cosine; the largest of each is printed. The draws themselves are checked too.
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
from logits import ROOT, TEXT, model_from_gguf

sys.path.insert(0, os.path.join(ROOT, "tests/oracle"))
from philox import words  # noqa: E402

NORM, COSINE = 1e-2, 1e-3  # what we promise
MISSED = 1e-4
SAMPLES = 2

# ---- the reference ---------------------------------------------------------------------------------------------------


def autograd(model, tokens, n_prompt, labels):
    return autograd_of(model, [layer.self_attn.o_proj for layer in model.model.layers], tokens, n_prompt, labels)


def autograd_of(model, projections, tokens, n_prompt, labels):
    """[1 + samples, n_layer, T, n_head*head_dim], and the logits."""
    outputs = []

    def keep(module, args):
        args[0].retain_grad()
        outputs.append(args[0])

    hooks = [module.register_forward_pre_hook(keep) for module in projections]
    logits = model(torch.tensor(tokens[None].astype(np.int64))).logits[0]
    for hook in hooks:
        hook.remove()
    found = []
    for label in (tokens[1:], *labels):
        target = torch.tensor(label[n_prompt:].astype(np.int64))
        loss = torch.nn.functional.cross_entropy(logits[n_prompt:-1], target, reduction="sum")
        found.append([g[0].numpy() for g in torch.autograd.grad(loss, outputs, retain_graph=True)])
    return np.array(found), logits.detach().numpy()


def missed(logits, label, n_prompt, seed, sequence):
    """How far the uniform number of a draw lies outside its label's stretch of the running sum, at most."""
    p = torch.softmax(torch.from_numpy(logits[:-1]), -1).numpy().astype(np.float64)
    running, worst = np.pad(p.cumsum(axis=1), ((0, 0), (1, 0))), 0.0
    for sample in range(SAMPLES):
        for t in range(n_prompt, len(p)):
            u = (words(seed, t, sample, sequence, 2)[0] + 0.5) / 2**32
            drawn = label[sample, t]
            worst = max(worst, running[t, drawn] - u, u - running[t, drawn + 1])
    return worst


# ---- ours ------------------------------------------------------------------------------------------------------------


def dump(program, path, tokens, n_prompt, shape, folder):
    ids, out = os.path.join(folder, "tokens.i32"), os.path.join(folder, "dump")
    tokens.astype(np.int32).tofile(ids)
    subprocess.run([program, path, ids, str(n_prompt), str(SAMPLES), out], check=True)
    n_label = SAMPLES * (len(tokens) - 1)
    label, gradient = np.fromfile(out, np.int32, n_label), np.fromfile(out, np.float32, offset=4 * n_label)
    return label.reshape(SAMPLES, -1), gradient.reshape(1 + SAMPLES, *shape)


def trace(kvlag, path, text, n_tokens, n_prompt, folder):
    source, out = os.path.join(folder, "text.txt"), os.path.join(folder, "trace.h5")
    with open(source, "w") as f:
        f.write(text)
    command = [kvlag, "trace", path, source, "--tokens", n_tokens, "--prompt", n_prompt, "--attention", "factored"]
    command += ["--gradients", f"fisher:{SAMPLES}", "-o", out, "--force", "-q"]
    subprocess.run([str(c) for c in command], check=True)
    return h5py.File(out, "r")


def stored(seq):
    values = [seq["grad/loss"][:].astype(np.float32) * seq["grad/loss_scale"][:][..., None]]
    values += list(seq["grad/fisher"][:].astype(np.float32) * seq["grad/fisher_scale"][:][..., None])
    heads_last = np.array(values).transpose(0, 1, 3, 2, 4)
    return heads_last.reshape(*heads_last.shape[:3], -1)


# ---- comparisons -----------------------------------------------------------------------------------------------------

failures = 0


def within(what, value, limit):
    global failures
    failures += not value <= limit
    print(f"  {'ok  ' if value <= limit else 'FAIL'} {what}: {value:.2e} (at most {limit:.0e})")


def compare(what, ours, want):
    a, b = (x.astype(np.float64).reshape(x.shape[0] * x.shape[1], -1) for x in (ours, want))
    norm = np.linalg.norm(b, axis=1)
    within(f"{what}: norm of the difference", float(np.max(np.linalg.norm(a - b, axis=1) / norm)), NORM)
    within(f"{what}: 1 - cosine", float(np.max(1 - (a * b).sum(axis=1) / norm / np.linalg.norm(a, axis=1))), COSINE)


def run(name, path, text, n_tokens, n_prompt, args):
    with tempfile.TemporaryDirectory() as temp, trace(args.kvlag, path, text, n_tokens, n_prompt, temp) as h5:
        seq, facts = h5["seq/0000"], h5.attrs
        tokens = seq["tokens"][:]
        shape = (int(facts["n_layer"]), len(tokens), int(facts["n_head"]) * int(facts["head_dim"]))
        label, ours = dump(args.dump, path, tokens, n_prompt, shape, temp)
        want, logits = autograd(model_from_gguf(path), tokens, n_prompt, label)
        print(f"{name}, {len(tokens)} tokens, the first {n_prompt} prompt")
        compare("f32", ours, want)
        compare("stored", stored(seq), want)
        within("stored labels are those of the run", float((seq["grad/fisher_label"][:] != label).sum()), 0)
        within("labels before the counted steps", float((label[:, :n_prompt] != -1).sum()), 0)
        within("draws outside their labels' stretch, by", missed(logits, label, n_prompt, 0, 0), MISSED)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvlag", default=os.path.join(ROOT, "kvlag"))
    build = os.path.join(ROOT, os.environ.get("BUILD", "build/gcc-release"))
    parser.add_argument("--dump", default=os.path.join(build, "tests/parity/dump_gradients"))
    parser.add_argument("--tiny", default=os.path.join(ROOT, "build/tiny.gguf"))
    parser.add_argument("--smollm2", default=os.path.join(ROOT, "models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    args = parser.parse_args()
    torch.manual_seed(0)
    with open(os.path.join(ROOT, "tests/tiny/train.py")) as f:
        code = f.read()
    run("tiny", args.tiny, TEXT * 3, 200, 0, args)
    run("SmolLM2-135M Q4_1", args.smollm2, TEXT + code, 256, 16, args)
    print("all within their limits" if not failures else f"{failures} comparisons failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
