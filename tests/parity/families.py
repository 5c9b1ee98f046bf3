"""Every architecture against transformers on small random models: `families.py [NAME...]`.

For each family a model of random weights is made by transformers and saved twice: as a folder of safetensors
(save_pretrained), and as a GGUF file by the gguf package, with the changes that llama.cpp's conversion makes (rows of q
and k in rotation order for Llama's, norms plus one for Gemma's, transposed for GPT-2's). Both are read by our loader,
and logits, attention rows and gradients compared at T = 2, 7 and 300: more than every window here.
"""

import argparse
import os
import subprocess
import sys
import tempfile

import gguf
import numpy as np
import torch
import transformers

from gradients import autograd_of, dump as dump_gradients
from logits import LOGITS, ROOT, ROWS

GRADIENTS = 1e-2
transformers.utils.logging.disable_progress_bar()
transformers.logging.set_verbosity_error()
LENGTHS = (2, 7, 300)
VOCABULARY, CONTEXT = 160, 512
SIZES = dict(vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=CONTEXT, bos_token_id=1, eos_token_id=2, pad_token_id=0)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=4.0)
LONG = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0, 1.1, 1.3, 1.7, 2.0, 3.0],
            long_factor=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], original_max_position_embeddings=CONTEXT)
GEMMA = dict(head_dim=16, hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=24)

# name: (class, GGUF architecture or None where the format cannot say it, config)
FAMILIES = {
    "llama": ("Llama", "llama", dict(tie_word_embeddings=False)),
    "llama, head_dim 20, biases": ("Llama", None, dict(head_dim=20, attention_bias=True, tie_word_embeddings=True)),
    "llama, linear": ("Llama", "llama", dict(rope_parameters=LINEAR)),
    "llama, llama3": ("Llama", "llama", dict(rope_parameters=LLAMA3)),
    "llama, yarn": ("Llama", "llama", dict(rope_parameters=YARN)),
    "mistral, window": ("Mistral", None, dict(sliding_window=24)),
    "qwen2": ("Qwen2", "qwen2", dict(tie_word_embeddings=True)),
    "qwen2, window": ("Qwen2", None, dict(use_sliding_window=True, sliding_window=24, max_window_layers=2)),
    "qwen3": ("Qwen3", "qwen3", dict(head_dim=16)),
    "gemma": ("Gemma", "gemma", dict(head_dim=16, hidden_act="gelu_pytorch_tanh")),
    "gemma2": ("Gemma2", None, dict(GEMMA, sliding_window=24, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    "gemma2, scale of its heads": ("Gemma2", "gemma2", dict(GEMMA, query_pre_attn_scalar=16, sliding_window=24,
                                                            attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    "gemma3": ("Gemma3", "gemma3", dict(GEMMA, query_pre_attn_scalar=16, num_hidden_layers=7, sliding_window=24)),
    "gemma3, linear": ("Gemma3", None, dict(GEMMA, num_hidden_layers=7, sliding_window=24, rope_parameters={
        "full_attention": dict(LINEAR, rope_theta=1e6), "sliding_attention": dict(rope_type="default", rope_theta=1e4)})),
    "phi3": ("Phi3", "phi3", dict(sliding_window=None)),
    "phi3, window, part of the head": ("Phi3", "phi3", dict(head_dim=12, sliding_window=24, partial_rotary_factor=0.5,
                                                            rope_parameters=dict(rope_type="default", rope_theta=1e4,
                                                                                 partial_rotary_factor=0.5))),
    "phi3, longrope": ("Phi3", "phi3", dict(sliding_window=None, rope_parameters=LONG, max_position_embeddings=1024,
                                            original_max_position_embeddings=CONTEXT)),
    "gpt2": ("GPT2", "gpt2", None),
    "smollm3": ("SmolLM3", "smollm3", dict(no_rope_layer_interval=4, tie_word_embeddings=True)),
    "olmo2": ("Olmo2", "olmo2", dict(tie_word_embeddings=False)),
}

# ---- models ----------------------------------------------------------------------------------------------------------


def make(kind, options):
    """Weights large enough that every part of the computation matters: norms and biases, too."""
    if kind == "GPT2":
        config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=48, n_layer=3, n_head=4,
                                         bos_token_id=1, eos_token_id=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager")
    else:
        name = "Gemma3Text" if kind == "Gemma3" else kind
        config = getattr(transformers, name + "Config")(**{**SIZES, **options})
        model = getattr(transformers, kind + "ForCausalLM")._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.3)
            else:
                p.copy_(torch.randn_like(p) * (1.5 / p.shape[-1] ** 0.5 if "embed" not in name else 0.5))
    return model.float().eval()


def rotation_order(w, n_head):
    return w.reshape(n_head, 2, w.shape[0] // n_head // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def converted(arch, name, w, config):
    """One weight as llama.cpp's conversion writes it."""
    if arch in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
        w = rotation_order(w, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        w = w + 1
    if arch == "gpt2" and w.ndim == 2 and any(part in name for part in ("c_attn", "c_proj", "c_fc")):
        w = w.T
    return np.ascontiguousarray(w)


def write_rope(writer, config, shape):
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if not rope:
        return
    writer.add_rope_freq_base(rope["rope_theta"])
    dims = int(shape["head_dim"] * rope.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(dims)
    kind = rope.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR if kind == "linear" else gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        plain = rope["rope_theta"] ** -(torch.arange(0, dims, 2) / dims)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy().astype(np.float32))
    if kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for which in ("short", "long"):
            writer.add_tensor(f"rope_factors_{which}.weight", np.array(rope[which + "_factor"], np.float32))


def write_gguf(path, model, arch):
    config = model.config
    gpt2 = arch == "gpt2"
    shape = dict(n_layer=config.num_hidden_layers, n_head=config.num_attention_heads)
    shape["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // shape["n_head"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(shape["n_layer"])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(4 * config.hidden_size if gpt2 else config.intermediate_size)
    writer.add_head_count(shape["n_head"])
    if gpt2:
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_key_length(shape["head_dim"])
        writer.add_value_length(shape["head_dim"])
    if getattr(config, "sliding_window", None) and arch != "qwen3":
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    write_rope(writer, config, shape)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch.upper()), shape["n_layer"])
    for name, w in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        to = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert to, name
        writer.add_tensor(to, converted(arch, name, w.numpy(), config).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---- comparisons -----------------------------------------------------------------------------------------------------

failures = 0


def within(what, value, limit, show):
    global failures
    good = value <= limit
    failures += not good
    if show or not good:
        print(f"  {'ok  ' if good else 'FAIL'} {what}: {value:.2e} (at most {limit:.0e})")
    return value


def dump_forward(program, path, tokens, shape, folder):
    ids, out = os.path.join(folder, "tokens.i32"), os.path.join(folder, "dump")
    tokens.astype(np.int32).tofile(ids)
    subprocess.run([program, path, ids, out], check=True)
    values, T = np.fromfile(out, np.float32), len(tokens)
    n_rows = shape[0] * shape[1] * T * T
    return values[: T * VOCABULARY].reshape(T, -1), values[T * VOCABULARY :][:n_rows].reshape(*shape[:2], T, T)


def output_projections(model):
    if hasattr(model, "transformer"):
        return [h.attn.c_proj for h in model.transformer.h]
    return [layer.self_attn.o_proj for layer in model.model.layers]


def relative(ours, want):
    a, b = (x.astype(np.float64).reshape(x.shape[0] * x.shape[1], -1) for x in (ours, want))
    norm = np.linalg.norm(b, axis=1)
    return float(np.max(np.linalg.norm(a - b, axis=1) / np.maximum(norm, 1e-12)))


def compare(model, path, T, args, folder):
    config = model.config
    heads, head_dim = config.num_attention_heads, getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // heads
    tokens = np.random.default_rng(T).integers(3, VOCABULARY, T).astype(np.int32)
    with torch.no_grad():
        want = model(torch.tensor(tokens[None].astype(np.int64)), output_attentions=True)
    logits, rows = dump_forward(args.forward, path, tokens, (config.num_hidden_layers, heads), folder)
    reference = np.stack([a[0].numpy() for a in want.attentions])
    worst = [float(np.max(np.abs(logits - want.logits[0].numpy()))), float(np.max(np.abs(rows - reference)))]
    shape = (config.num_hidden_layers, T, heads * head_dim)
    label, ours = dump_gradients(args.gradients, path, tokens, 0, shape, folder)
    gradient, _ = autograd_of(model, output_projections(model), tokens, 0, label)
    return worst + [relative(ours, gradient)]


def run(name, args):
    kind, arch, options = FAMILIES[name]
    torch.manual_seed(1)
    model = make(kind, options)
    with tempfile.TemporaryDirectory() as temp:
        folder, file = os.path.join(temp, "model"), os.path.join(temp, "model.gguf")
        model.save_pretrained(folder)
        if arch:
            write_gguf(file, model, arch)
        for form, path in (("safetensors", folder), ("GGUF", file))[: 2 if arch else 1]:
            worst = np.max([compare(model, path, T, args, temp) for T in LENGTHS], axis=0)
            print(f"{name}, {form}")
            for what, value, limit in zip(("logits", "attention rows", "gradients"), worst, (LOGITS, ROWS, GRADIENTS)):
                within(what, value, limit, True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    build = os.path.join(ROOT, os.environ.get("BUILD", "build/gcc-release"))
    parser.add_argument("--forward", default=os.path.join(build, "tests/parity/dump_forward"))
    parser.add_argument("--gradients", default=os.path.join(build, "tests/parity/dump_gradients"))
    parser.add_argument("names", nargs="*", help="of FAMILIES; default: all")
    args = parser.parse_args()
    for name in args.names or FAMILIES:
        run(name, args)
    print("all within their limits" if not failures else f"{failures} comparisons failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
