"""Our forward pass against transformers' on the same weights and token ids: `logits.py [--write]`.

Three comparisons for each model: what dump_forward computed in f32 (logits, attention rows, lse), what `kvlag trace`
stored of it, and, for the tiny model, the fixture that tests/unit/test_forward.c compares without Python
(tests/parity/fixtures/tiny_forward.h), which --write renews. Weights come from the GGUF file by the gguf package's own
dequantisation, and for the tiny model once more from its safetensors; token ids are ours.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile

import gguf
import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FIXTURE = os.path.join(ROOT, "tests/parity/fixtures/tiny_forward.h")
TEXT = (
    "In the beginning God created the heaven and the earth. And the earth was without form, and void; and darkness was "
    "upon the face of the deep. Tirzah gold. Seth honey. Asher myrrh. Tirzah gold. Asher myrrh. Seth honey.\n"
)
LOGITS, ROWS, LOGPROB = 2e-3, 1e-4, 2e-3  # what we promise
STORED = 5e-4  # dense rows in f16

# ---- the reference ---------------------------------------------------------------------------------------------------


def interleaved_to_halves(w, n_head):
    """GGUF keeps Llama's q and k rows so that RoPE pairs are neighbours; transformers wants the halves apart."""
    return w.reshape(n_head, w.shape[0] // n_head // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def model_from_gguf(path):
    reader = gguf.GGUFReader(path)
    key = lambda name, default=None: (  # noqa: E731
        reader.fields["llama." + name].contents() if "llama." + name in reader.fields else default
    )
    tensor = {t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
    n_head, n_kv_head = key("attention.head_count"), key("attention.head_count_kv", key("attention.head_count"))
    config = LlamaConfig(
        vocab_size=tensor["token_embd.weight"].shape[0],
        hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"),
        num_hidden_layers=key("block_count"),
        num_attention_heads=n_head,
        num_key_value_heads=n_kv_head,
        head_dim=key("attention.key_length", key("embedding_length") // n_head),
        max_position_embeddings=key("context_length"),
        rms_norm_eps=key("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": key("rope.freq_base", 10000.0)},
        tie_word_embeddings="output.weight" not in tensor,
        attn_implementation="eager",
    )
    state = {"model.embed_tokens.weight": tensor["token_embd.weight"], "model.norm.weight": tensor["output_norm.weight"]}
    state["lm_head.weight"] = tensor.get("output.weight", tensor["token_embd.weight"])
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    for name, w in tensor.items():
        if m := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
            heads = {"attn_q": n_head, "attn_k": n_kv_head}.get(m[2])
            state[f"model.layers.{m[1]}.{names[m[2]]}.weight"] = interleaved_to_halves(w, heads) if heads else w
    model = LlamaForCausalLM(config)
    model.load_state_dict({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in state.items()})
    return model.float().eval()


def model_from_safetensors(folder):
    return LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def reference(model, tokens):
    with torch.no_grad():
        out = model(torch.tensor(tokens[None].astype(np.int64)), output_attentions=True)
    return out.logits[0].numpy(), np.stack([a[0].numpy() for a in out.attentions])


def log_softmax(logits):
    x = logits.astype(np.float64)
    top = x.max(axis=1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(axis=1, keepdims=True))


# ---- ours ------------------------------------------------------------------------------------------------------------


def trace(kvlag, path, text, n_tokens, folder):
    source, out = os.path.join(folder, "text.txt"), os.path.join(folder, "trace.h5")
    with open(source, "w") as f:
        f.write(text)
    command = [kvlag, "trace", path, source, "--tokens", str(n_tokens), "--attention", "both", "--gradients", "none"]
    subprocess.run([*command, "-o", out, "--force", "-q"], check=True)
    return h5py.File(out, "r")


def dump(program, path, tokens, shape, folder):
    ids, out = os.path.join(folder, "tokens.i32"), os.path.join(folder, "dump.f32")
    tokens.astype(np.int32).tofile(ids)
    subprocess.run([program, path, ids, out], check=True)
    n_layer, n_head, T, n_vocab = shape
    values = np.fromfile(out, np.float32)
    logits, rows, lse = np.split(values, [T * n_vocab, T * n_vocab + n_layer * n_head * T * T])
    return logits.reshape(T, n_vocab), rows.reshape(n_layer, n_head, T, T), lse.reshape(n_layer, n_head, T)


# ---- comparisons -----------------------------------------------------------------------------------------------------

failures = 0


def within(what, difference, limit):
    global failures
    worst = float(np.max(np.abs(difference)))
    failures += not worst <= limit
    print(f"  {'ok  ' if worst <= limit else 'FAIL'} {what}: {worst:.2e} (at most {limit:.0e})")


def lse_of_factored(seq, scale):
    """The softmax normaliser's logarithm from the stored q and k, and how far f16 may have moved it: lse follows the
    scores with slope at most 1, and each factor of a score is off by at most 2^-11 of itself."""
    q, k = seq["attn/q"][:].astype(np.float64), seq["attn/k"][:].astype(np.float64)
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    above = np.triu(np.ones((q.shape[2], q.shape[2]), bool), 1)
    scores = np.einsum("lhtd,lhid->lhti", q, k) * scale
    moved = np.einsum("lhtd,lhid->lhti", np.abs(q), np.abs(k)) * scale * 2.0**-10
    scores[..., above], moved[..., above] = -np.inf, 0
    top = scores.max(axis=-1)
    return top + np.log(np.exp(scores - top[..., None]).sum(axis=-1)), moved.max(axis=-1)


def compare(name, model, ours, seq, scale):
    tokens = seq["tokens"][:]
    logits, rows, lse = ours
    want_logits, want_rows = reference(model, tokens)
    logprob = log_softmax(want_logits)
    step = np.arange(len(tokens) - 1)
    print(name)
    within("logits", logits - want_logits, LOGITS)
    within("attention rows in f32", rows - want_rows, ROWS)
    within("f32 rows sum to 1", rows.sum(axis=-1, dtype=np.float64) - 1, 1e-5)
    within("stored rows", seq["attn/probs"][:].astype(np.float32) - want_rows, STORED)
    within("stored lse is that of the run", seq["attn/lse"][:] - lse, 0)
    factored, moved = lse_of_factored(seq, scale)
    within("stored lse against stored q and k, over f16's reach", (seq["attn/lse"][:] - factored) / moved, 1)
    within("row_sum", seq["attn/row_sum"][:] - seq["attn/probs"][:].sum(axis=-1, dtype=np.float64), 1e-6)
    within("target_logprob", seq["logits/target_logprob"][:] - logprob[step, tokens[1:]], LOGPROB)
    within("entropy", seq["logits/entropy"][:] + (np.exp(logprob) * logprob).sum(axis=1)[:-1], LOGPROB)
    within("correct", seq["logits/correct"][:] - (want_logits.argmax(axis=1)[:-1] == tokens[1:]).astype(int), 0)
    top = seq["logits/topk_id"][:]
    within("top-k log probabilities", seq["logits/topk_logprob"][:] - np.take_along_axis(logprob, top, 1), LOGPROB)
    within("top-k holds the k largest", np.sort(np.take_along_axis(logprob, top, 1))[:, 0]
           - np.sort(logprob, axis=1)[:, -top.shape[1]], LOGPROB)  # fmt: skip


# ---- the fixture -----------------------------------------------------------------------------------------------------


def numbers(values, form):
    return ",\n    ".join(", ".join(form % v for v in values[i : i + 10]) for i in range(0, len(values), 10))


def fixture(model, tokens):
    """A few rows of logits and attention, and every target's log probability, as a C header."""
    logits, rows = reference(model, tokens)
    target = log_softmax(logits)[np.arange(len(tokens) - 1), tokens[1:]]
    T = len(tokens)
    steps, ids = [0, 7, T // 2, T - 1], list(range(0, logits.shape[1], 97))
    places = [(0, 0, 5), (1, 4, T // 2), (2, 5, T - 1)]
    kept = [rows[l, h, t, : t + 1] for l, h, t in places]
    return f"""/* Written by tests/parity/logits.py --write from transformers' LlamaForCausalLM on the tiny model. */
enum {{ FIXTURE_TOKENS = {T}, FIXTURE_STEPS = {len(steps)}, FIXTURE_IDS = {len(ids)}, FIXTURE_ROWS = {len(places)} }};
static const int32_t fixture_token[FIXTURE_TOKENS] = {{
    {numbers(tokens, "%d")}}};
static const int32_t fixture_step[FIXTURE_STEPS] = {{{", ".join(map(str, steps))}}};
static const int32_t fixture_id[FIXTURE_IDS] = {{{", ".join(map(str, ids))}}};
/* Logits of these steps and ids. */
static const float fixture_logits[FIXTURE_STEPS * FIXTURE_IDS] = {{
    {numbers(logits[np.ix_(steps, ids)].ravel(), "%.7ef")}}};
/* Attention rows (layer, head, step), each of step+1 values, one behind the other. */
static const int32_t fixture_row[FIXTURE_ROWS][3] = {{{", ".join("{%d, %d, %d}" % p for p in places)}}};
static const float fixture_probs[] = {{
    {numbers(np.concatenate(kept), "%.7ef")}}};
static const float fixture_target_logprob[FIXTURE_TOKENS - 1] = {{
    {numbers(target, "%.7ef")}}};
"""


def fixture_values(text):
    return np.array([float(x.rstrip("f")) for x in re.findall(r"-?\d[\d.]*(?:e[-+]?\d+)?f?\b", text)])


def check_fixture(text):
    with open(FIXTURE) as f:
        stored = f.read()
    a, b = fixture_values(stored), fixture_values(text)
    print(os.path.relpath(FIXTURE, ROOT))
    within("same number of values", len(a) - len(b), 0)
    if len(a) == len(b):
        within("values", a - b, 1e-4)


# ---- main ------------------------------------------------------------------------------------------------------------


def run(name, path, text, n_tokens, args, folder=None, write=None):
    with tempfile.TemporaryDirectory() as temp, trace(args.kvlag, path, text, n_tokens, temp) as h5:
        seq, facts = h5["seq/0000"], h5.attrs
        tokens = seq["tokens"][:]
        shape = (int(facts["n_layer"]), int(facts["n_head"]), len(tokens), int(facts["n_vocab"]))
        ours = dump(args.dump, path, tokens, shape, temp)
        model = model_from_gguf(path)
        scale = float(facts["head_dim"]) ** -0.5
        compare(f"{name}, weights from GGUF, {len(tokens)} tokens", model, ours, seq, scale)
        if folder:
            compare(f"{name}, weights from safetensors", model_from_safetensors(folder), ours, seq, scale)
            made = fixture(model, tokens)
            if write:
                with open(FIXTURE, "w") as f:
                    f.write(made)
            check_fixture(made)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvlag", default=os.path.join(ROOT, "kvlag"))
    parser.add_argument("--dump", default=os.path.join(ROOT, "build/gcc-release/tests/parity/dump_forward"))
    parser.add_argument("--tiny", default=os.path.join(ROOT, "build/tiny.gguf"))
    parser.add_argument("--smollm2", default=os.path.join(ROOT, "models/SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--check", action="store_true", help="compare everything, the fixture too (the default)")
    parser.add_argument("--write", action="store_true", help="renew the fixture first")
    args = parser.parse_args()
    torch.manual_seed(0)
    run("tiny", args.tiny, TEXT, 64, args, os.path.join(ROOT, "tests/tiny"), args.write)
    with open(os.path.join(ROOT, "tests/tiny/train.py")) as f:
        code = f.read()
    run("SmolLM2-135M Q4_1", args.smollm2, TEXT + code, 320, args)
    print("all within their limits" if not failures else f"{failures} comparisons failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
