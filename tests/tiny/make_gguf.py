"""Write the tiny model as a GGUF file: `make_gguf.py OUT.gguf [--type T] [--shards N] [--version V]`.

Only the standard library is used, so that a test can make its model anywhere. The result is what llama.cpp's
convert_hf_to_gguf.py would give for this model: arch llama, rows of q and k permuted to the interleaved order of RoPE
pairs, norms in F32, embeddings tied (no output.weight). The same options give the same bytes.
"""

import argparse
import json
import math
import os
import struct
import sys
from array import array

HERE = os.path.dirname(os.path.abspath(__file__))
ALIGNMENT = 32

# ---- GGUF ------------------------------------------------------------------------------------------------------------

UINT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 2, 4, 5, 6, 7, 8, 9
NUMBER = {UINT16: "<H", UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(kind, value):
    if kind == STRING:
        return text(value)
    if kind == ARRAY:
        element, items = value
        return struct.pack("<IQ", element, len(items)) + b"".join(value_bytes(element, i) for i in items)
    return struct.pack(NUMBER[kind], value)


def padding(n):
    return b"\0" * (-n % ALIGNMENT)


def gguf_bytes(keys, tensors, version=3):
    """keys: [(name, kind, value)]; tensors: [(name, ggml type, dims with the row length first, bytes)]."""
    head = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(keys))]
    for name, kind, value in keys:
        head += [text(name), struct.pack("<I", kind), value_bytes(kind, value)]
    body, at = [], 0
    for name, kind, dims, raw in tensors:
        head += [text(name), struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, at)]
        body += [raw, padding(len(raw))]
        at += len(raw) + len(body[-1])
    head = b"".join(head)
    return b"".join([head, padding(len(head)), *body])


# ---- weights ---------------------------------------------------------------------------------------------------------


def read_safetensors(path):
    """name -> (shape, bytes of f16)."""
    with open(path, "rb") as f:
        raw = f.read()
    (n,) = struct.unpack_from("<Q", raw)
    tensors = {}
    for name, t in json.loads(raw[8 : 8 + n]).items():
        if name == "__metadata__":
            continue
        if t["dtype"] != "F16":
            sys.exit(f"{path}: {name} is {t['dtype']}, expected F16")
        first, last = t["data_offsets"]
        tensors[name] = t["shape"], raw[8 + n + first : 8 + n + last]
    return tensors


def permute(raw, rows, n_head):
    """Row (head, half, pair) goes to (head, pair, half): the two halves that RoPE rotates together become neighbours."""
    size, dim = len(raw) // rows, rows // n_head
    order = (h * dim + half * (dim // 2) + pair for h in range(n_head) for pair in range(dim // 2) for half in (0, 1))
    return b"".join(raw[r * size : (r + 1) * size] for r in order)


def floats(raw):
    return struct.unpack(f"<{len(raw) // 2}e", raw)


def to_f16(raw):
    return raw


def to_f32(raw):
    out = array("f", floats(raw))
    if sys.byteorder == "big":
        out.byteswap()
    return out.tobytes()


def to_bf16(raw):
    out = []
    for bits in struct.unpack(f"<{len(raw) // 2}I", to_f32(raw)):
        out.append((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)  # to nearest, ties to even; the weights are finite
    return struct.pack(f"<{len(out)}H", *out)


def blocks(raw):
    values = floats(raw)
    return (values[i : i + 32] for i in range(0, len(values), 32))


def nibbles(q):
    return bytes(low | high << 4 for low, high in zip(q[:16], q[16:]))


def to_q8_0(raw):
    out = []
    for x in blocks(raw):
        d = max(map(abs, x)) / 127
        inverse = 1 / d if d else 0.0
        q = [math.floor(v * inverse + 0.5) for v in x]
        out.append(struct.pack("<e32b", d, *q))
    return b"".join(out)


def to_q4_0(raw):
    out = []
    for x in blocks(raw):
        d = max(x, key=abs) / -8  # the largest value becomes exactly -8 d
        inverse = 1 / d if d else 0.0
        q = [min(15, int(v * inverse + 8.5)) for v in x]
        out.append(struct.pack("<e", d) + nibbles(q))
    return b"".join(out)


def to_q4_1(raw):
    out = []
    for x in blocks(raw):
        low = min(x)
        d = (max(x) - low) / 15
        inverse = 1 / d if d else 0.0
        q = [min(15, int((v - low) * inverse + 0.5)) for v in x]
        out.append(struct.pack("<2e", d, low) + nibbles(q))
    return b"".join(out)


# name -> ggml type, general.file_type, conversion from f16 bytes
TYPES = {
    "f32": (0, 0, to_f32),
    "f16": (1, 1, to_f16),
    "bf16": (30, 32, to_bf16),
    "q8_0": (8, 7, to_q8_0),
    "q4_0": (2, 2, to_q4_0),
    "q4_1": (3, 3, to_q4_1),
}

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole:
        return whole[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def model_tensors(config, weights, kind):
    number, _, convert = TYPES[kind]
    tensors = []
    for name, (shape, raw) in weights.items():
        if name.endswith("q_proj.weight"):
            raw = permute(raw, shape[0], config["num_attention_heads"])
        if name.endswith("k_proj.weight"):
            raw = permute(raw, shape[0], config["num_key_value_heads"])
        if len(shape) == 1:
            tensors.append((gguf_name(name), TYPES["f32"][0], shape, to_f32(raw)))
        else:
            tensors.append((gguf_name(name), number, shape[::-1], convert(raw)))
    return tensors


# ---- metadata --------------------------------------------------------------------------------------------------------


def model_keys(config, kind):
    head_dim = config["head_dim"]
    return [
        ("general.architecture", STRING, "llama"),
        ("general.type", STRING, "model"),
        ("general.name", STRING, "tiny"),
        ("general.file_type", UINT32, TYPES[kind][1]),
        ("general.quantization_version", UINT32, 2),
        ("llama.block_count", UINT32, config["num_hidden_layers"]),
        ("llama.context_length", UINT32, config["max_position_embeddings"]),
        ("llama.embedding_length", UINT32, config["hidden_size"]),
        ("llama.feed_forward_length", UINT32, config["intermediate_size"]),
        ("llama.attention.head_count", UINT32, config["num_attention_heads"]),
        ("llama.attention.head_count_kv", UINT32, config["num_key_value_heads"]),
        ("llama.attention.key_length", UINT32, head_dim),
        ("llama.attention.value_length", UINT32, head_dim),
        ("llama.attention.layer_norm_rms_epsilon", FLOAT32, config["rms_norm_eps"]),
        ("llama.rope.dimension_count", UINT32, head_dim),
        ("llama.rope.freq_base", FLOAT32, config["rope_parameters"]["rope_theta"]),
        ("llama.vocab_size", UINT32, config["vocab_size"]),
    ]


def tokenizer_keys(config, tokenizer):
    model = tokenizer["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    control = {t["id"] for t in tokenizer["added_tokens"] if t["special"]}
    return [
        ("tokenizer.ggml.model", STRING, "gpt2"),
        ("tokenizer.ggml.pre", STRING, "gpt-2"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, tokens)),
        ("tokenizer.ggml.token_type", ARRAY, (INT32, [3 if i in control else 1 for i in range(len(tokens))])),
        ("tokenizer.ggml.merges", ARRAY, (STRING, [" ".join(pair) for pair in model["merges"]])),
        ("tokenizer.ggml.bos_token_id", UINT32, config["bos_token_id"]),
        ("tokenizer.ggml.eos_token_id", UINT32, config["eos_token_id"]),
        ("tokenizer.ggml.add_bos_token", BOOL, False),
    ]


# ---- files -----------------------------------------------------------------------------------------------------------


def write(path, data):
    with open(path + ".tmp", "wb") as f:
        f.write(data)
    os.replace(path + ".tmp", path)


def write_model(path, kind="f16", shards=1, version=3):
    """Write OUT.gguf, or OUT-0000K-of-0000N.gguf where shards > 1; returns the paths."""
    with open(os.path.join(HERE, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    with open(os.path.join(HERE, "tokenizer.json"), encoding="utf-8") as f:
        tokenizer = json.load(f)
    tensors = model_tensors(config, read_safetensors(os.path.join(HERE, "model.safetensors")), kind)
    keys = model_keys(config, kind) + tokenizer_keys(config, tokenizer)
    if shards == 1:
        write(path, gguf_bytes(keys, tensors, version))
        return [path]
    paths = []
    for k in range(shards):
        part = tensors[k * len(tensors) // shards : (k + 1) * len(tensors) // shards]
        split = [
            ("split.no", UINT16, k),
            ("split.count", UINT16, shards),
            ("split.tensors.count", INT32, len(tensors)),
        ]
        paths.append(f"{path.removesuffix('.gguf')}-{k + 1:05d}-of-{shards:05d}.gguf")
        write(paths[-1], gguf_bytes((keys if k == 0 else []) + split, part, version))
    return paths


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", metavar="OUT.gguf")
    parser.add_argument("--type", choices=TYPES, default="f16", help="of the matrices (default f16)")
    parser.add_argument("--shards", type=int, default=1, help="write OUT-00001-of-0000N.gguf and so on")
    parser.add_argument("--version", type=int, choices=(2, 3), default=3)
    options = parser.parse_args()
    if not 1 <= options.shards <= 99999:
        parser.error("--shards must be 1..99999")
    for path in write_model(options.out, options.type, options.shards, options.version):
        print(path)


if __name__ == "__main__":
    main()
