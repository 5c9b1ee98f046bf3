"""How a model tells positions, as its trace says it: learned ones, layers without any, two rotations. Small folders of
random weights."""

import json
import shutil

import h5py
import numpy as np
import pytest

from simcli import ROOT, kvlag, refused

GENESIS = ROOT / "demo/genesis.txt"
VOCABULARY, WIDTH, FF, LAYERS, HEADS, KV, DIM = 1024, 48, 80, 8, 4, 2, 12  # the tiny model's vocabulary
COMMON = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=FF, num_hidden_layers=LAYERS, head_dim=DIM,
              num_attention_heads=HEADS, num_key_value_heads=KV, max_position_embeddings=512)  # fmt: skip


def layer(*more):
    q, kv = (HEADS * DIM, WIDTH), (KV * DIM, WIDTH)
    attention = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": q[::-1]}
    forward = {"gate_proj": (FF, WIDTH), "up_proj": (FF, WIDTH), "down_proj": (WIDTH, FF)}
    norms = {name: (WIDTH,) for name in ("input_layernorm", "post_attention_layernorm", *more)}
    return norms | {"self_attn." + k: v for k, v in attention.items()} | {"mlp." + k: v for k, v in forward.items()}


def llama_like(of_layer):
    shapes = {f"model.layers.{i}.{k}.weight": v for i in range(LAYERS) for k, v in of_layer.items()}
    return shapes | {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}


def gpt2():
    config = dict(model_type="gpt2", vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=64)
    parts = {"attn.c_attn": (WIDTH, 3 * WIDTH), "attn.c_proj": (WIDTH, WIDTH), "ln_1": (WIDTH,), "ln_2": (WIDTH,),
             "mlp.c_fc": (WIDTH, 4 * WIDTH), "mlp.c_proj": (4 * WIDTH, WIDTH)}  # fmt: skip
    parts = {f"h.{i}.{k}": shape for i in range(2) for k, shape in parts.items()} | {"ln_f": (WIDTH,)}
    shapes = {k + ".weight": v for k, v in parts.items()} | {k + ".bias": v[-1:] for k, v in parts.items()}
    return config, shapes | {"wte.weight": (VOCABULARY, WIDTH), "wpe.weight": (64, WIDTH)}


def smollm3():
    return COMMON | dict(model_type="smollm3", tie_word_embeddings=True), llama_like(layer())


def gemma3():
    norms = layer("pre_feedforward_layernorm", "post_feedforward_layernorm")
    of_layer = norms | {"self_attn.q_norm": (DIM,), "self_attn.k_norm": (DIM,)}
    config = dict(model_type="gemma3_text", query_pre_attn_scalar=DIM, sliding_window=16)
    return COMMON | config | dict(hidden_activation="gelu_pytorch_tanh"), llama_like(of_layer)


@pytest.fixture(scope="module", params=[gpt2, smollm3, gemma3], ids=lambda f: f.__name__)
def model(request, tmp_path_factory):
    """(family's name, folder of a model)"""
    folder = tmp_path_factory.mktemp("model") / request.param.__name__
    folder.mkdir()
    config, shapes = request.param()
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(ROOT / "tests/tiny/tokenizer.json", folder)
    rng, header, data = np.random.default_rng(1), {}, b""
    for name, shape in shapes.items():
        raw = (rng.standard_normal(shape) * 0.2).astype("<f4").tobytes()
        header[name] = dict(dtype="F32", shape=shape, data_offsets=[len(data), len(data) + len(raw)])
        data += raw
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    return request.param.__name__, folder


ROPE = {
    "gpt2": "learned positions",
    "smollm3": "base 2000000, neox, 12 dims; none in layers 3, 7",
    "gemma3": "base 1000000, neox, 12 dims; with a window: base 10000, neox, 12 dims",
}


def test_the_trace_says_it(model, tmp_path):
    name, folder = model
    for out, more in ("a.h5", ()), ("b.h5", ("--resume",)):
        done = kvlag("trace", folder, GENESIS, "-o", tmp_path / out, "--tokens", 40, *more)
        assert done.returncode == 0, done.stderr.decode()
    with h5py.File(tmp_path / "a.h5") as f:
        assert f.attrs["rope"] == ROPE[name]
    assert ROPE[name] in kvlag("info", tmp_path / "a.h5").stdout.decode()
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


def test_what_turns_queries_back_must_know_how(model, tmp_path):
    name, folder = model
    assert kvlag("trace", folder, GENESIS, "-o", tmp_path / "t.h5", "--tokens", 40).returncode == 0
    command = "sim", tmp_path / "t.h5", "-o", "r.csv", "-p", "expected", "-b", "12"
    if name == "gemma3":
        done = kvlag(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr.decode()
    else:
        refused(tmp_path, 1, "expected needs a known rotation in the attribute rope", *command)
