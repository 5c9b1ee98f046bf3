"""Traces made by tracer/from_transformers.py against our own tracer's: `from_transformers.py`.

SmolLM2 with the weights of the GGUF file, in transformers: datasets by their values, `kvlag info --compare`, and what
`kvlag sim` makes of both. A label drawn from the tail of a large vocabulary may fall on the neighbour in one of them;
gradients of samples are compared where no label differs. Small random models of families that kvlag knows: the same. Of families that it does not know:
the trace passes `kvlag info --check` and is priced. What is refused, by name and without leaving a file; bytes of tokens;
the recipe in docs/recipes.md.
"""

import argparse
import contextlib
import csv
import filecmp
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np
import tokenizers
import torch
import transformers

from logits import ROOT, TEXT, interleaved_to_halves, model_from_gguf

spec = importlib.util.spec_from_file_location("capture", os.path.join(ROOT, "tracer/from_transformers.py"))
capture = importlib.util.module_from_spec(spec)
spec.loader.exec_module(capture)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

LOGITS, ROWS, STORED, GRADIENTS, RESULTS, LABELS = 2e-3, 1e-4, 5e-4, 1e-2, 1e-2, 1e-2  # what we promise; rows beside their rounding
POLICIES = [word for p in ("h2o", "rmm-sinks(lag=8)", "streaming", "tova", "oracle(loss)") for word in ("-p", p)]
SIZES = dict(vocab_size=320, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=512, bos_token_id=None, eos_token_id=0,
             pad_token_id=None)  # fmt: skip
GPT2 = dict(vocab_size=320, n_embd=48, n_layer=3, n_head=4, n_positions=512, bos_token_id=None, eos_token_id=0)
MLA = dict(num_key_value_heads=4, head_dim=None, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16,
           v_head_dim=12, n_routed_experts=4, num_experts_per_tok=1, n_group=1, topk_group=1, first_k_dense_replace=3,
           moe_intermediate_size=32)  # fmt: skip
KNOWN = {
    "Gemma2": dict(SIZES, sliding_window=40, query_pre_attn_scalar=24, attn_logit_softcapping=5.0),
    "Qwen3": SIZES,
    "GPT2": GPT2,
}
UNKNOWN = {"Cohere": SIZES, "GPTNeoX": SIZES, "OPT": dict(SIZES, ffn_dim=64, word_embed_proj_dim=48)}
DENSE = {"DeepseekV3": dict(SIZES, **MLA)}
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1)

# ---- making ----------------------------------------------------------------------------------------------------------


def save_tokenizer(folder):
    """256 bytes and some merges of this text."""
    bytes_ = tokenizers.pre_tokenizers.ByteLevel
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.pre_tokenizer, t.decoder = bytes_(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=bytes_.alphabet(),
                                             show_progress=False)  # fmt: skip
    t.train_from_iterator([TEXT], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<|end|>").save_pretrained(folder)


def save_random(family, facts, folder):
    """Weights six times as large as transformers draws them: attention that is not flat."""
    config = getattr(transformers, family + "Config")(**{k: v for k, v in facts.items() if v is not None or k != "head_dim"})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(6)
    model.save_pretrained(folder)
    save_tokenizer(folder)


def save_smollm2(gguf, folder):
    model_from_gguf(gguf).save_pretrained(folder)
    where, name = os.path.split(gguf)
    transformers.AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(folder)


def theirs(model, texts, out, *more):
    """What main said; SystemExit where it refused."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        capture.main([model, *texts, "-o", out, *map(str, more)])
    return said.getvalue()


# ---- comparisons -----------------------------------------------------------------------------------------------------

failures = 0


def within(what, value, limit):
    global failures
    failures += not value <= limit
    print(f"  {'ok  ' if value <= limit else 'FAIL'} {what}: {value:.2e} (at most {limit:.0e})")


def holds(what, fact):
    global failures
    failures += not fact
    print(f"  {'ok  ' if fact else 'FAIL'} {what}")


def apart(a, b, name):
    return float(np.abs(a[name][:].astype("f8") - b[name][:].astype("f8")).max(initial=0))


def gradients(seq, kind):
    """[.., layer, T*heads*dim]"""
    values = seq[f"grad/{kind}"][:].astype("f8") * seq[f"grad/{kind}_scale"][:][..., None]
    return values.reshape(*values.shape[:-3], -1)


def of_rows(a, b, swap):
    """The largest difference over the magnitude of its row: rows of q and k, ours with RoPE pairs side by side."""
    a, b = a[:].astype("f8"), b[:].astype("f8")
    if swap:  # interleaved_to_halves takes rows of a matrix
        a = np.moveaxis(interleaved_to_halves(np.moveaxis(a, -1, 0), 1), 0, -1)
    return float((np.abs(a - b).max(-1) / np.abs(b).max(-1)).max())


def same_labels(a, b):
    """Of each sample, whether all its labels agree."""
    return (a["grad/fisher_label"][:] == b["grad/fisher_label"][:]).all(axis=1)


def compare_sequence(name, a, b, swap):
    for array in "tokens", "pieces", "piece_offset":
        holds(f"{name}/{array}: equal", np.array_equal(a[array], b[array]))
    for array in "target_logprob", "entropy", "topk_logprob":
        within(f"{name}/logits/{array}", apart(a, b, f"logits/{array}"), LOGITS)
    for array in "correct", "topk_id":
        x, y = a[f"logits/{array}"][:], b[f"logits/{array}"][:]
        within(f"{name}/logits/{array}: share that differs", float((x != y).mean()), 1e-3)
    within(f"{name}/attn/probs", apart(a, b, "attn/probs"), ROWS + STORED)
    within(f"{name}/attn/row_sum", apart(a, b, "attn/row_sum"), 2 * STORED)
    within(f"{name}/attn/lse", apart(a, b, "attn/lse"), 1e-3)
    for array in "qkv":
        x, y = a[f"attn/{array}"], b[f"attn/{array}"]
        within(f"{name}/attn/{array}, of a row's largest", of_rows(x, y, swap and array != "v"), 2e-3)
    differ = float((a["grad/fisher_label"][:] != b["grad/fisher_label"][:]).mean())
    within(f"{name}/grad/fisher_label: share that differs", differ, LABELS)
    for kind, sets in ("loss", slice(None)), ("fisher", same_labels(a, b)):
        x, y = gradients(a, kind)[sets], gradients(b, kind)[sets]
        norm = np.linalg.norm(x - y, axis=-1) / np.linalg.norm(x, axis=-1)
        within(f"{name}/grad/{kind}: norm of the difference ({len(x)} of them)", float(norm.max(initial=0)), GRADIENTS)


def compare_files(kvlag, ours, other):
    with h5py.File(ours) as a, h5py.File(other) as b:
        names = "n_layer", "n_head", "n_kv_head", "head_dim", "n_embd", "n_vocab", "softcap"
        holds("facts of the model: equal", all(a.attrs[k] == b.attrs[k] for k in names))
        holds("windows: equal", np.array_equal(a.attrs["window"], b.attrs["window"]))
        within("scale", abs(a.attrs["scale"] - b.attrs["scale"]), 1e-7)
        within("model/wo", apart(a, b, "model/wo"), 2e-3)
        swap = "interleaved" in a.attrs["rope"] and "neox" in b.attrs["rope"]
        for name in a["seq"]:
            compare_sequence(f"seq/{name}", a[f"seq/{name}"], b[f"seq/{name}"], swap)
        agree = [int(name) for name in a["seq"] if same_labels(a["seq"][name], b["seq"][name]).all()]
    holds(f"sequences whose labels agree throughout: {agree}", agree)
    done = subprocess.run([kvlag, "info", "--compare", ours, other], capture_output=True, text=True)
    holds("info --compare", done.returncode == 0 and "only in" not in done.stdout)
    return agree


def results(kvlag, trace, out, *more):
    command = [kvlag, "sim", trace, "-o", out, *POLICIES, "-b", "24,64", "--force", "-q", *more]
    done = subprocess.run(command, capture_output=True, text=True)
    holds(f"sim of {os.path.basename(trace)}", done.returncode == 0)
    with open(out) as f:
        return list(csv.DictReader(line for line in f if not line.startswith("#")))


def compare_results(a, b, agree):
    holds(f"sim: the same {len(a)} configurations", [r["spec"] for r in a] == [r["spec"] for r in b] and len(a) > 8)
    for column in "lost_mass", "kl_est", "out_err":
        pairs = [(float(x[column]), float(y[column])) for x, y in zip(a, b) if column != "kl_est" or int(x["seq"]) in agree]
        within(f"sim: {column}, relatively", max(abs(x / y - 1) for x, y in pairs), RESULTS)


def check(kvlag, path):
    done = subprocess.run([kvlag, "info", path, "--check"], capture_output=True, text=True)
    holds(f"info --check: {done.stderr.strip() or 'passed'}", done.returncode == 0)


# ---- what is compared ------------------------------------------------------------------------------------------------


def against_ours(title, kvlag, ours, model, texts, folder, tokens):
    """`ours` is the file or folder that our own tracer reads, `model` what transformers does."""
    print(title)
    a, b = (os.path.join(folder, name) for name in ("ours.h5", "theirs.h5"))
    options = ["--tokens", tokens, "--prompt", 16, "--attention", "both", "--gradients", "fisher:2", "--seed", 2**33 + 3]
    subprocess.run([kvlag, "trace", ours, *texts, "-o", a, "--force", "-q", *map(str, options)], check=True)
    theirs(model, texts, b, "--force", "--device", "cpu", *options)
    check(kvlag, a)
    check(kvlag, b)
    agree = compare_files(kvlag, a, b)
    compare_results(*(results(kvlag, path, path + ".csv", "--metrics", "lost_mass,loss,out_err") for path in (a, b)), agree)


def alone(title, kvlag, model, texts, folder, *more):
    print(title)
    path = os.path.join(folder, "alone.h5")
    for tokens in 2, 300:
        theirs(model, texts, path, "--force", "--device", "cpu", "--tokens", tokens, *more)
        check(kvlag, path)
    results(kvlag, path, path + ".csv")


def refused(what, words, folder, model, texts, *more):
    path = os.path.join(folder, "refused.h5")
    try:
        theirs(model, texts, path, *more)
        said = "nothing"
    except SystemExit as error:
        said = str(error)
    left = [name for name in os.listdir(folder) if name.startswith("refused.h5")]
    fine = words in said and "\n" not in said and not left
    holds(f"refused: {what}" + ("" if fine else f"; it said {said}, left {left}"), fine)


def refusals(folder, model, texts):
    print("refusals")
    for family, facts, words in (("GptOss", dict(SIZES, **EXPERTS), "layer 0, head 0: rows reach later entries or beyond the window, or do not sum"),
                                 ("Bloom", dict(vocab_size=320, hidden_size=48, n_layer=2, n_head=4), "BloomForCausalLM does not call"),
                                 ("DeepseekV3", dict(SIZES, **MLA), "keys of 24, values of 12: only --attention dense")):  # fmt: skip
        save_random(family, facts, os.path.join(folder, family))
        refused(family, words, folder, os.path.join(folder, family), texts, "--tokens", 100)
    broken = os.path.join(folder, "latin1.txt")
    with open(broken, "wb") as f:
        f.write("é".encode("latin-1"))
    refused("more tokens than positions", "512 (--tokens)", folder, model, [os.path.join(ROOT, "tests/tiny/train.py")])
    refused("no such model", "no-such-model", folder, os.path.join(folder, "no-such-model"), texts)
    refused("no such text", "gone.txt", folder, model, ["gone.txt"])
    refused("one token", "1 tokens; a trace takes 2 to 512", folder, model, texts, "--tokens", 1)
    refused("a prompt of all tokens", "--prompt 19 leaves no step", folder, model, texts, "--tokens", 20, "--prompt", 19)
    refused("a prompt below 0", "--prompt -1 leaves no step", folder, model, texts, "--tokens", 20, "--prompt", -1)
    refused("a device that is none", "nonsense", folder, model, texts, "--device", "nonsense")
    refused("text that is not UTF-8", "latin1.txt", folder, model, [broken])
    refused("no such folder", "refused.h5/x.h5: there is no such folder", folder, model, texts, "-o", os.path.join(folder, "refused.h5", "x.h5"))
    own = os.path.join(folder, "own.txt")
    shutil.copy(texts[0], own)
    refused("a text as the output", "own.txt: is an input", folder, model, [own], "-o", own, "--force")
    holds("the text is still there", filecmp.cmp(texts[0], own, shallow=False))
    there = os.path.join(folder, "there.h5")
    open(there, "w").close()
    try:
        theirs(model, texts, there)
        said = "nothing"
    except SystemExit as error:
        said = str(error)
    holds("refused: to overwrite a file", "there.h5: exists" in said and os.path.getsize(there) == 0)


def pieces():
    """Bytes of tokens, joined: the text, whatever the vocabulary."""
    print("pieces")
    text = "  Grüße,\nHello 世界 \u200d👩‍👩‍👧 x\t<|end|> e\u0301\r\n\n"
    models, trainers, pre = tokenizers.models, tokenizers.trainers, tokenizers.pre_tokenizers
    for name, model, trainer in (("unigram", models.Unigram(), trainers.UnigramTrainer(vocab_size=90, show_progress=False, unk_token="?", special_tokens=["?"])),
                                 ("BPE with bytes", models.BPE(byte_fallback=True, unk_token="?"), trainers.BpeTrainer(
                                     vocab_size=330, special_tokens=["?", *(f"<0x{b:02X}>" for b in range(256))], show_progress=False))):  # fmt: skip
        t = tokenizers.Tokenizer(model)
        t.pre_tokenizer = pre.Metaspace()
        t.train_from_iterator([TEXT], trainer)
        split_and_join(name, transformers.PreTrainedTokenizerFast(tokenizer_object=t), text)
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        split_and_join("bytes", tokenizer, text)
        ids, ends = capture.split(tokenizer, text)
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in visible]
        alphabet = {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(others)}
        words = [bytes(alphabet[c] for c in word) for word in tokenizer.convert_ids_to_tokens(ids)]
        holds("bytes: each token has its own", np.array_equal(ends, np.cumsum([len(w) for w in words])))


def split_and_join(name, tokenizer, text):
    ids, ends = capture.split(tokenizer, text)
    holds(f"{name}: {len(ids)} tokens end within the text, the last with it",
          len(ends) == len(ids) and ends[-1] == len(text.encode()) and (np.diff(ends, prepend=0) >= 0).all())  # fmt: skip


def recipe(kvlag, folder):
    """The commands of docs/recipes.md, in a folder that looks like the checkout."""
    print("docs/recipes.md")
    with open(os.path.join(ROOT, "docs/recipes.md")) as f:
        commands = re.search(r"```sh\n(\S*python tracer/from_transformers.py.*?)```", f.read(), re.S)[1].splitlines()
    there = os.path.join(folder, "recipe")
    os.makedirs(os.path.join(there, "out"))
    os.symlink(os.path.abspath(kvlag), os.path.join(there, "kvlag"))
    for name in "tracer", "tests", "demo":
        os.symlink(os.path.join(ROOT, name), os.path.join(there, name))
    for command in commands:
        command = command.replace(".venv-parity/bin/python", sys.executable)
        done = subprocess.run(command, shell=True, cwd=there, capture_output=True, text=True)
        holds(re.sub(r"\S*/python", "python", command) + (f": {done.stderr}" if done.returncode else ""), done.returncode == 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvlag", default=os.path.join(ROOT, "kvlag"))
    parser.add_argument("--smollm2", default=os.path.join(ROOT, "models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    args = parser.parse_args()
    torch.manual_seed(0)
    texts = [os.path.join(ROOT, name) for name in ("demo/genesis.txt", "demo/my_policy.py")]
    with tempfile.TemporaryDirectory() as folder:
        for family, facts in KNOWN.items():
            save_random(family, facts, os.path.join(folder, family))
            model = os.path.join(folder, family)
            against_ours(family, args.kvlag, model, model, texts, folder, 300)
        for family, facts in UNKNOWN.items():
            save_random(family, facts, os.path.join(folder, family))
            alone(family, args.kvlag, os.path.join(folder, family), texts, folder)
        for family, facts in DENSE.items():
            save_random(family, facts, os.path.join(folder, family))
            alone(family, args.kvlag, os.path.join(folder, family), texts, folder, "--attention", "dense")
        alone("Qwen3, bf16", args.kvlag, os.path.join(folder, "Qwen3"), texts, folder, "--compute", "bf16", "--attention", "both")
        refusals(folder, os.path.join(folder, "Qwen3"), texts)
        pieces()
        recipe(args.kvlag, folder)
        save_smollm2(args.smollm2, os.path.join(folder, "smollm2"))
        against_ours("SmolLM2-135M Q4_1", args.kvlag, args.smollm2, os.path.join(folder, "smollm2"), texts, folder, 120)
    print("all within their limits" if not failures else f"{failures} comparisons failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
