"""kvlag trace: the file it writes, what it says, and that nothing is left behind when it cannot work."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np
import pytest
from simcli import SANITIZED, peak_mib

KVLAG = os.path.abspath(os.environ.get("KVLAG", "./kvlag"))
MAKE_GGUF = os.path.abspath("tests/tiny/make_gguf.py")
TEXT = ("And God saw the light, that it was good: and God divided the light from the darkness. Tirzah gold. Seth honey. "
        "Tirzah gold.\n" * 8)  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    subprocess.run([sys.executable, MAKE_GGUF, path], check=True, capture_output=True)
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def run(*args, **more):
    return subprocess.run([KVLAG, "trace", *map(str, args)], capture_output=True, **more)


def traced(*args, **more):
    done = run(*args, **more)
    assert done.returncode == 0, done.stderr
    return done.stderr.decode()


def refused(code, message, folder, *args, **more):
    """One line that says `message`, the exit code, and the folder as it was."""
    before = sorted(os.listdir(folder))
    done = run(*args, **more)
    assert done.returncode == code, done.stderr
    assert message in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
    assert sorted(os.listdir(folder)) == before


def test_same_bytes_for_any_threads_and_place(tiny, text, tmp_path):
    a, b, c = (tmp_path / name for name in ("a.h5", "b.h5", "c.h5"))
    traced(tiny, text, "-o", a, "--threads", 1)
    traced(tiny, text, "-o", b, "--threads", 3, "-q")
    traced(tiny.name, text, "-o", c, cwd=tiny.parent)
    assert a.read_bytes() == b.read_bytes() == c.read_bytes()
    with h5py.File(a) as f:
        assert f.attrs["command"] == "kvlag trace tiny.gguf text.txt"


def test_text_comes_back_byte_exact(tiny, tmp_path):
    raw = b"Tirzah\0gold. \xff\xfe caf\xc3\xa9\r\n  two  spaces \xe3\x80\x80\n\n" * 3
    (tmp_path / "t").write_bytes(raw)
    traced(tiny, tmp_path / "t", "-", "-o", tmp_path / "a.h5", input=raw)
    with h5py.File(tmp_path / "a.h5") as f:
        for seq, source in ("0000", "t"), ("0001", ""):
            s = f["seq"][seq]
            assert s["pieces"][:].tobytes() == raw
            assert s["piece_offset"][0] == 0 and s["piece_offset"][-1] == len(raw)
            assert len(s["piece_offset"]) == s.attrs["n_tokens"] + 1 == len(s["tokens"]) + 1
            assert s.attrs["source"] == source
        assert np.array_equal(f["seq/0000/tokens"], f["seq/0001/tokens"])
        assert np.array_equal(f["seq/0000/attn/q"], f["seq/0001/attn/q"])


def test_tokens_takes_the_first_ones(tiny, text, tmp_path):
    traced(tiny, text, "-o", tmp_path / "all.h5")
    traced(tiny, text, "-o", tmp_path / "cut.h5", "--tokens", 40, "--prompt", 7)
    with h5py.File(tmp_path / "all.h5") as a, h5py.File(tmp_path / "cut.h5") as b:
        full, cut = a["seq/0000"], b["seq/0000"]
        assert cut.attrs["n_tokens"] == 40 and cut.attrs["n_prompt"] == 7
        assert np.array_equal(cut["tokens"], full["tokens"][:40])
        end = full["piece_offset"][40]
        assert cut["pieces"][:].tobytes() == TEXT.encode()[:end]
        # Products of another shape may round differently in the last bit.
        assert np.allclose(cut["logits/target_logprob"], full["logits/target_logprob"][:39], atol=1e-4)


def test_forms(tiny, text, tmp_path):
    want = {"dense": {"probs", "lse", "row_sum"}, "factored": {"q", "k", "v", "lse"}}
    want["both"] = want["auto"] = want["dense"] | want["factored"]
    for form, names in want.items():
        said = traced(tiny, text, "-o", tmp_path / f"{form}.h5", "--attention", form)
        with h5py.File(tmp_path / f"{form}.h5") as f:
            assert set(f["seq/0000/attn"]) == names
        assert f"attention {'dense and factored' if len(names) == 6 else form};" in said
    with h5py.File(tmp_path / "both.h5") as f:
        s, scale = f["seq/0000"], f.attrs["scale"]
        q, k = (s["attn"][x][:].astype(np.float64) for x in "qk")
        probs = s["attn/probs"][:].astype(np.float64)
        k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
        mask = np.triu(np.ones(probs.shape[-2:], bool), 1)
        p = np.exp(np.where(mask, -np.inf, np.einsum("lhtd,lhid->lhti", q, k) * scale))
        assert np.abs(p / p.sum(-1, keepdims=True) - probs).max() < 5e-3
        assert (probs[..., mask] == 0).all()
        assert np.abs(s["attn/row_sum"] - probs.sum(-1)).max() < 1e-5


def test_auto_drops_the_dense_form_when_it_grows(tiny, tmp_path):
    # 18 heads of 4 texts of 2048 tokens: 18 * 4 * 2048 * 2049 / 2 * 2 bytes = 288 MiB; 8 texts are over 512 MiB.
    (tmp_path / "long").write_text(TEXT * 20)
    said = traced(tiny, *[tmp_path / "long"] * 8, "--tokens", 2048, "-o", tmp_path / "a.h5", "--gradients", "none")
    assert "attention factored;" in said


def test_logits(tiny, text, tmp_path):
    traced(tiny, text, "-o", tmp_path / "a.h5", "--logits", "full", "--tokens", 50)
    traced(tiny, text, "-o", tmp_path / "b.h5", "--logits", "topk:5", "--tokens", 50)
    traced(tiny, text, "-o", tmp_path / "c.h5", "--logits=topk:0", "--tokens", 50)
    with h5py.File(tmp_path / "a.h5") as a, h5py.File(tmp_path / "b.h5") as b, h5py.File(tmp_path / "c.h5") as c:
        full = a["seq/0000/logits/full"][:].astype(np.float64)
        top = b["seq/0000/logits/topk_id"][:]
        assert full.shape == (50, 1024) and top.shape == (50, 5)
        logprob = full - np.log(np.exp(full).sum(1, keepdims=True))
        tokens = a["seq/0000/tokens"][:]
        got = a["seq/0000/logits/target_logprob"][:]
        assert np.abs(got - logprob[np.arange(49), tokens[1:]]).max() < 0.02
        kept = b["seq/0000/logits/topk_logprob"][:]
        assert (np.diff(kept, axis=1) <= 0).all()
        assert np.abs(kept - np.sort(logprob, 1)[:, :-6:-1]).max() < 0.02
        assert np.array_equal(a["seq/0000/logits/correct"], top[:49, 0] == tokens[1:])
        assert "topk_id" not in c["seq/0000/logits"]
        assert np.array_equal(c["seq/0000/logits/correct"], b["seq/0000/logits/correct"])


def gradients(path, seq="0000"):
    with h5py.File(path) as f:
        g = f["seq"][seq].get("grad", {})
        values = {name: g[name][:].astype(np.float32) * g[name + "_scale"][:][..., None]
                  for name in ("loss", "fisher") if name in g}  # fmt: skip
        return values | ({"label": g["fisher_label"][:]} if "fisher_label" in g else {})


def test_gradients(tiny, text, tmp_path):
    kinds = {"none": set(), "loss": {"loss"}, "fisher:2": {"loss", "fisher", "label"}}
    found = {}
    for kind, want in kinds.items():
        options = ("--gradients", kind, "--tokens", 60, "--prompt", 10, "--force")
        said = traced(tiny, text, "-o", tmp_path / "a.h5", *options)
        assert f"gradients {kind}," in said
        found[kind] = gradients(tmp_path / "a.h5")
        assert set(found[kind]) == want
    both = found["fisher:2"]
    assert both["loss"].shape == (3, 6, 60, 32) and both["fisher"].shape == (2, 3, 6, 60, 32)
    # Products of another shape may round differently in the last bit.
    assert np.allclose(both["loss"], found["loss"]["loss"], rtol=0, atol=1e-3 * np.abs(both["loss"]).max())
    label = both["label"]
    assert label.shape == (2, 59) and (label[:, :10] == -1).all()
    assert (label[:, 10:] >= 0).all() and (label < 1024).all() and (label[0] != label[1]).any()
    # Nothing follows the last step, and in the last layer the prompt's outputs reach no counted loss.
    for g in (both["loss"], *both["fisher"]):
        assert (g[:, :, 59] == 0).all() and (g[2, :, :10] == 0).all() and (np.abs(g[:2, :, :59]).max(axis=-1) > 0).all()


def sparse_llama(folder, n_layer, n_embd, n_ff):
    """A folder of the tiny model's shape but for these, all weights 0 in a file without blocks on the disk."""
    for name in "tokenizer.json", "tokenizer_config.json":
        shutil.copy(f"tests/tiny/{name}", folder)
    config = json.loads(Path("tests/tiny/config.json").read_text())
    config |= {"num_hidden_layers": n_layer, "hidden_size": n_embd, "intermediate_size": n_ff,
               "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": n_embd // 8}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    square, wide, tall = [n_embd, n_embd], [n_ff, n_embd], [n_embd, n_ff]
    layer = {"input_layernorm": [n_embd], "post_attention_layernorm": [n_embd], "mlp.gate_proj": wide,
             "mlp.up_proj": wide, "mlp.down_proj": tall} | {f"self_attn.{x}_proj": square for x in "qkvo"}  # fmt: skip
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], n_embd], "model.norm.weight": [n_embd]}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(n_layer) for name, shape in layer.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    said = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as f:
        f.write(len(said).to_bytes(8, "little") + said)
        f.truncate(8 + len(said) + end)
    return end / 2**20


@pytest.mark.skipif(SANITIZED, reason="a sanitizer brings memory of its own")
def test_weights_are_not_copied(text, tmp_path):
    """The peak is the mapped file, one layer in f32 and what the text needs; the weights in f32 are twice the file."""
    (tmp_path / "model").mkdir()
    file = sparse_llama(tmp_path / "model", 24, 512, 2048)
    assert file > 190
    used, _ = peak_mib("trace", tmp_path / "model", text, "-o", tmp_path / "t.h5", "--tokens", 40, "--backend", "cpu")
    assert file / 2 < used < file + 100


@pytest.mark.skipif(SANITIZED, reason="a sanitizer takes the signal")
def test_a_model_that_is_cut_short_in_use(text, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    sparse_llama(model, 2, 512, 2048)
    child = subprocess.Popen([KVLAG, "trace", model, "-", "-o", tmp_path / "t.h5"], stdin=subprocess.PIPE,
                             stderr=subprocess.PIPE)  # fmt: skip
    maps = Path(f"/proc/{child.pid}/maps")
    while "model.safetensors" not in maps.read_text():
        assert child.poll() is None
    os.truncate(model / "model.safetensors", 4096)
    _, said = child.communicate(TEXT.encode())
    assert (child.returncode, said.count(b"\n")) == (1, 1), said
    assert b"a file was cut short while it was read" in said
    assert sorted(os.listdir(tmp_path)) == ["model", "text.txt"]


def test_labels_follow_seed_and_sequence(tiny, text, tmp_path):
    for name, more in ("a", ()), ("b", ("--seed", 1)), ("c", ("--seed", 0)):
        traced(tiny, text, text, "-o", tmp_path / f"{name}.h5", "--tokens", 60, *more)
    a, b, c = (gradients(tmp_path / f"{name}.h5") for name in "abc")
    second = gradients(tmp_path / "a.h5", "0001")
    assert set(a) == {"loss", "fisher", "label"} and a["label"].shape == (1, 59)
    assert np.array_equal(a["loss"], b["loss"]) and np.array_equal(a["loss"], second["loss"])
    assert np.array_equal(a["label"], c["label"]) and np.array_equal(a["fisher"], c["fisher"])
    assert (a["label"] != b["label"]).any() and (a["label"] != second["label"]).any()
    with h5py.File(tmp_path / "b.h5") as f:
        assert f.attrs["command"].endswith("--seed 1")


def test_special_tokens_only_on_request(tiny, tmp_path):
    (tmp_path / "t").write_text("gold<|endoftext|>honey")
    traced(tiny, tmp_path / "t", "-o", tmp_path / "plain.h5")
    traced(tiny, tmp_path / "t", "-o", tmp_path / "special.h5", "--special")
    with h5py.File(tmp_path / "plain.h5") as a, h5py.File(tmp_path / "special.h5") as b:
        assert 0 not in a["seq/0000/tokens"][:] and 0 in b["seq/0000/tokens"][:]
        assert a["seq/0000/pieces"][:].tobytes() == b["seq/0000/pieces"][:].tobytes()


def test_output_weights_are_transposed(tiny, text, tmp_path):
    traced(tiny, text, "-o", tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as f, open("tests/tiny/model.safetensors", "rb") as s:
        header = json.loads(s.read(int.from_bytes(s.read(8), "little")))
        start, stop = header["model.layers.1.self_attn.o_proj.weight"]["data_offsets"]
        s.seek(start, os.SEEK_CUR)
        w = np.frombuffer(s.read(stop - start), np.float16).reshape(192, 192)
        assert np.array_equal(f["model/wo"][1], w.T)


def test_it_says_what_it_does(tiny, text, tmp_path):
    said = traced(tiny, text, "-o", tmp_path / "a.h5")
    assert "the file will take about" in said and "tokens/s" in said and "logits XXH3" in said
    assert traced(tiny, text, "-o", tmp_path / "b.h5", "-q") == ""
    hashes = {traced(tiny, text, "-o", tmp_path / f"{n}.h5", "--threads", n).split()[-1] for n in (1, 2, 3)}
    assert len(hashes) == 1


def test_bad_input_is_one_line(tiny, text, tmp_path):
    out = tmp_path / "o.h5"
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "one").write_text("a")
    (tmp_path / "long").write_text(TEXT * 20)
    refused(1, "empty: the text is empty", tmp_path, tiny, tmp_path / "empty", "-o", out)
    refused(1, "one: 1 token; a trace needs at least 2", tmp_path, tiny, tmp_path / "one", "-o", out)
    refused(1, "exceed this model's 2048 positions", tmp_path, tiny, tmp_path / "long", "-o", out)
    refused(1, "No such file", tmp_path, tiny, tmp_path / "absent", "-o", out)
    refused(1, "is a folder, not a text", tmp_path, tiny, tmp_path, "-o", out)
    refused(1, "a model is a GGUF file, or a folder with config.json", tmp_path, tmp_path, text, "-o", out)
    refused(1, "absent.gguf", tmp_path, tmp_path / "absent.gguf", text, "-o", out)
    refused(1, "", tmp_path, text, text, "-o", out)
    refused(1, "cannot be created", tmp_path, tiny, text, "-o", tmp_path / "no" / "o.h5")


def test_bad_options_are_usage_errors(tiny, text, tmp_path):
    out = tmp_path / "o.h5"
    refused(2, "needs a model and at least one text", tmp_path, tiny, "-o", out)
    refused(2, "needs -o", tmp_path, tiny, text)
    for value in "topk", "topk:", "topk:-1", "topk:1x", "topk:1025", "all", "topk: 1", "topk:+1":
        refused(2, "--logits", tmp_path, tiny, text, "-o", out, "--logits", value)
    for value in "fisher", "fisher:", "fisher:0", "fisher:257", "fisher:1x", "fisher:+1", "loss:1", "all", "":
        refused(2, "--gradients", tmp_path, tiny, text, "-o", out, f"--gradients={value}")
    refused(2, "--attention", tmp_path, tiny, text, "-o", out, "--attention", "sparse")
    refused(2, "--seed", tmp_path, tiny, text, "-o", out, "--seed=-1")
    refused(2, "leaves no step to count", tmp_path, tiny, text, "-o", out, "--tokens", 40, "--prompt", 39)
    refused(2, "is an input", tmp_path, tiny, text, "-o", text, "--force")
    refused(2, "only one of the texts", tmp_path, tiny, "-", "-", "-o", out, input=b"some text")
    out.write_bytes(b"mine")
    refused(2, "--force", tmp_path, tiny, text, "-o", out)
    assert out.read_bytes() == b"mine"
    traced(tiny, text, "-o", out, "--force")
    assert out.read_bytes() != b"mine"


# ---- marked texts ------------------------------------------------------------------------------------------------------

MARKED = "Tirzah{{T= gold}}. Seth{{S= honey}}. Joel brass.\nTirzah{{T? gold}}. Seth{{S? honey}}.\n"


def test_answers_count_and_need_their_facts(tiny, tmp_path):
    (tmp_path / "a.txt").write_text(MARKED)
    (tmp_path / "plain.txt").write_text(PLAIN := re.sub("{{[A-Z][=?]|}}", "", MARKED))
    traced(tiny, tmp_path / "a.txt", "-o", tmp_path / "a.h5", "--marked")
    traced(tiny, tmp_path / "plain.txt", "-o", tmp_path / "plain.h5")
    with h5py.File(tmp_path / "a.h5") as f, h5py.File(tmp_path / "plain.h5") as g:
        seq, plain = f["seq/0000"], g["seq/0000"]
        assert (seq["tokens"][:] == plain["tokens"][:]).all() and bytes(seq["pieces"][:]).decode() == PLAIN
        assert (seq["attn/q"][:] == plain["attn/q"][:]).all() and "counted" not in plain and "probes" not in plain
        piece = [bytes(seq["pieces"][a:b]).decode() for a, b in zip(seq["piece_offset"][:], seq["piece_offset"][1:])]
        counted, probes = np.flatnonzero(seq["counted"][:]), seq["probes"][:]
        assert "".join(piece[t + 1] for t in counted) == " gold honey"
        first = {later: "".join(piece[i] for i, t in probes if t == later) for later in probes[:, 1]}
        assert list(first.values()) == [" gold", " honey"] and set(first) <= set(counted)
        assert (probes[:, 0] < len(piece) // 2).all()  # what was stated, not what is being answered
        # The gradient's labels are drawn where steps count.
        assert (np.flatnonzero(seq["grad/fisher_label"][0] >= 0) == counted).all()


def test_marks_that_are_refused(tiny, tmp_path):
    (tmp_path / "a.txt").write_text("Seth{{S? honey}}.")
    refused(1, "a.txt: line 1: the answer needs 'S', which is not stated before it", tmp_path,
            tiny, tmp_path / "a.txt", "-o", tmp_path / "a.h5", "--marked")  # fmt: skip
    (tmp_path / "a.txt").write_text(MARKED)
    refused(1, "a.txt: no answer is marked", tmp_path,
            tiny, tmp_path / "a.txt", "-o", tmp_path / "a.h5", "--marked", "--tokens", 12)  # fmt: skip
