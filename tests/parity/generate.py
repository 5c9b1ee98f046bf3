"""`kvlag trace --generate` against transformers' generate, both taking the most likely token, on the same weights.

Two programs differ in the last bits, so that two tokens that are as likely as each other may be taken in another order: from
there on the texts are different ones, and are not compared. That this is what happened is checked.
"""
import os
import subprocess
import sys
import tempfile

import h5py
import torch

from logits import ROOT, model_from_gguf

MODEL = os.path.join(ROOT, "models/SmolLM2-135M-Instruct.Q4_1.gguf")
PROMPTS = [
    "In the beginning God created",
    "The three laws of motion are as follows.",
    "def fibonacci(n):\n",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
]
TOKENS, NEAR = 48, 1e-3


def ours(kvlag, prompt, folder):
    out = os.path.join(folder, "t.h5")
    command = [kvlag, "trace", MODEL, "-", "-o", out, "--special", "--generate", str(TOKENS), "--gradients", "none", "--force", "-q"]
    subprocess.run(command, input=prompt.encode(), check=True)
    with h5py.File(out) as f:
        s = f["seq/0000"]
        return s["tokens"][:].tolist(), int(s.attrs["n_prompt"])


def main():
    kvlag = os.path.join(ROOT, os.environ.get("BUILD", "build/gcc-release"), "kvlag")
    model, worst, ended = model_from_gguf(MODEL), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for prompt in PROMPTS:
            ids, n = ours(kvlag, prompt, folder)
            with torch.no_grad():
                want = model.generate(torch.tensor([ids[:n]]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=[0, 2],
                                      pad_token_id=0, use_cache=True, attention_mask=torch.ones(1, n, dtype=torch.long))[0].tolist()  # fmt: skip
                same = next((t for t, (a, b) in enumerate(zip(ids, want)) if a != b), min(len(ids), len(want)))
                if same < max(len(ids), len(want)):
                    logprob = model(torch.tensor([want[:same]])).logits[0, -1].log_softmax(-1)
                    gap = float(logprob.max() - logprob[ids[same]]) if same < len(ids) else float("inf")
                    worst = max(worst, gap)
                    print(f"  {prompt[:30]!r}: {same - n} tokens are equal, then a gap of {gap:.1e}")
                else:
                    print(f"  {prompt[:30]!r}: {same - n} tokens are equal")
            ended += ids[-1] in (0, 2)
    ok = worst < NEAR and ended
    print(f"{'ok  ' if ok else 'FAIL'} greedy answers, {ended} of {len(PROMPTS)} ended by themselves, largest gap {worst:.1e} (below {NEAR:.0e})")
    return not ok


if __name__ == "__main__":
    sys.exit(main())
