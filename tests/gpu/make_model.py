"""Write a Llama of any size with random weights as GGUF: `make_model.py OUT.gguf [--layers N] [--type f16|q8_0] ...`.

The tokenizer is the tiny model's, so the vocabulary has 1024 entries. Weights are drawn from one pool of random blocks,
from another place for each tensor: a model of 1 B parameters takes seconds. Queries and keys are drawn larger than the
rest, so that attention is about as peaked as that of a trained model and its probabilities pack about as well."""

import argparse
import json
import os
import struct
import sys

import numpy as np

TINY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tiny")
sys.path.insert(0, TINY)
from make_gguf import TYPES, model_keys, padding, text, tokenizer_keys, value_bytes  # noqa: E402

POOL = 1 << 22  # values
STD = 0.02


def config_of(options):
    return {
        "num_hidden_layers": options.layers,
        "hidden_size": options.embd,
        "intermediate_size": options.ff,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.embd // options.heads,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 500000.0},
        "vocab_size": 1024,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def shapes(c):
    """[(name, rows, row length, scale of its weights)] of the matrices; [(name, length)] of the norms."""
    embd, ff, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    fan = (2048 / embd) ** 0.5  # keeps activations' sizes for other widths
    matrices, norms = [("token_embd", c["vocab_size"], embd, 1)], [("output_norm", embd)]
    for n in range(c["num_hidden_layers"]):
        matrices += [(f"blk.{n}.attn_q", q, embd, 2 * fan), (f"blk.{n}.attn_k", kv, embd, 2 * fan),
                     (f"blk.{n}.attn_v", kv, embd, fan), (f"blk.{n}.attn_output", embd, q, fan),
                     (f"blk.{n}.ffn_gate", ff, embd, fan), (f"blk.{n}.ffn_up", ff, embd, fan),
                     (f"blk.{n}.ffn_down", embd, ff, fan)]  # fmt: skip
        norms += [(f"blk.{n}.attn_norm", embd), (f"blk.{n}.ffn_norm", embd)]
    return matrices, norms


def pool_of(kind, scale, rng):
    """A pool of weights in the file's form, [blocks, bytes of a block], and the values in a block."""
    x = rng.standard_normal((POOL // 32, 32), dtype=np.float32) * np.float32(STD * scale)
    if kind == "f16":
        return x.astype("<f2").view(np.uint8), 32
    d = (np.abs(x).max(1) / 127).astype("<f2")
    q = np.rint(x / d.astype(np.float32)[:, None]).clip(-127, 127).astype(np.int8)
    return np.concatenate([d[:, None].view(np.uint8), q.view(np.uint8)], 1), 32


def write_matrix(f, pool, values, n, rng):
    """n values, from a place in the pool that differs from tensor to tensor, round and round."""
    blocks, at, size = n // values, int(rng.integers(len(pool))), 0
    while blocks:
        part = pool[at : at + blocks]
        size += f.write(part)
        blocks, at = blocks - len(part), 0
    f.write(padding(size))


def sizes(matrices, norms, kind):
    """[(name, ggml type, dims with the row length first, bytes)] in the order of the file."""
    each = {"f16": 2, "q8_0": 34 / 32}[kind]
    number, of_norms = TYPES[kind][0], TYPES["f32"][0]
    out = [(name + ".weight", number, [cols, rows], int(rows * cols * each)) for name, rows, cols, _ in matrices]
    return out + [(name + ".weight", of_norms, [n], 4 * n) for name, n in norms]


def head_bytes(keys, tensors):
    head, at = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(keys))], 0
    for name, kind, value in keys:
        head += [text(name), struct.pack("<I", kind), value_bytes(kind, value)]
    for name, kind, dims, size in tensors:
        head.append(text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, at))
        at += size + len(padding(size))
    head = b"".join(head)
    return head + padding(len(head))


def write_model(path, options):
    config = config_of(options)
    with open(os.path.join(TINY, "tokenizer.json"), encoding="utf-8") as f:
        keys = model_keys(config, options.type) + tokenizer_keys(config, json.load(f))
    keys = [(name, kind, f"random {options.name}" if name == "general.name" else value) for name, kind, value in keys]
    matrices, norms = shapes(config)
    rng = np.random.default_rng(0)
    pools = {scale: pool_of(options.type, scale, rng) for scale in {m[3] for m in matrices}}
    with open(path, "wb") as f:
        f.write(head_bytes(keys, sizes(matrices, norms, options.type)))
        for _, rows, cols, scale in matrices:
            write_matrix(f, *pools[scale], rows * cols, rng)
        for _, n in norms:
            f.write(np.ones(n, "<f4").tobytes() + padding(4 * n))
    return sum(rows * cols for _, rows, cols, _ in matrices)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", metavar="OUT.gguf")
    parser.add_argument("--type", choices=["f16", "q8_0"], default="q8_0")
    parser.add_argument("--name", default="1B")
    for name, default in ("layers", 16), ("embd", 2048), ("heads", 32), ("kv-heads", 8), ("ff", 8192):
        parser.add_argument("--" + name, type=int, default=default)
    options = parser.parse_args()
    if options.embd % options.heads or options.heads % options.kv_heads or options.embd % 32 or options.ff % 32:
        parser.error("--embd and --ff are multiples of 32, --embd of --heads, --heads of --kv-heads")
    n = write_model(options.out, options)
    print(f"{options.out}: {n * 1e-9:.3f} B weights, {os.path.getsize(options.out) * 1e-9:.2f} GB")


main()
