"""The trace format from outside: traces/FORMAT.md's own examples are accepted by kvlag, and kvlag's file is what
FORMAT.md says when h5py reads it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
KVLAG = os.environ.get("KVLAG", str(ROOT / "kvlag"))


def kvlag(*args, fails=False):
    done = subprocess.run([KVLAG, *map(str, args)], capture_output=True, text=True, timeout=300)
    assert (done.returncode != 0) == fails, done.stderr + done.stdout
    return done.stderr if fails else done.stdout


def facts(path, *args):
    return json.loads(kvlag("info", path, "--json", *args))


def examples():
    """The Python blocks of FORMAT.md: a trace, lifetimes for it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "traces" / "FORMAT.md").read_text(), re.S)
    assert len(blocks) == 2
    return blocks


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("format")
    for block in examples():
        subprocess.run([sys.executable, "-c", block], cwd=folder, check=True)
    return folder


def foreign(path, **attn):
    """A trace of one layer, two heads and five tokens with nothing but attn/probs."""
    with h5py.File(path, "w") as f:
        f.attrs.update(format="kvlag-trace", version=1, n_layer=1, n_head=2, n_kv_head=1, head_dim=4)
        probs = np.tril(np.random.default_rng(1).random((1, 2, 5, 5)) + 0.1)
        probs /= probs.sum(-1, keepdims=True)
        f.create_dataset("seq/0000/attn/probs", **{"data": probs.astype("f4"), **attn})
        f.attrs["complete"] = True
    return path


def test_the_documented_trace_is_accepted(mine):
    got = facts(mine / "mine.h5", "--check")
    assert got["format"] == "kvlag-trace" and got["hash_of"] == "file" and got["checked"] is True
    assert got["model"]["n_layer"] == 2 and got["model"]["scale"] == 0.25
    (seq,) = got["sequences"]
    assert (seq["tokens"], seq["prompt"], seq["source"]) == (300, 0, "noise")
    assert seq["attention"] == ["dense"] and seq["logits"] == ["target_logprob", "correct"]
    assert 0 < seq["check"]["sum_error"] < 1e-2
    probs = next(d for d in got["datasets"] if d["path"].endswith("attn/probs"))
    assert probs["shape"] == [2, 4, 300, 300] and probs["type"] == "f16" and probs["checksum"] is False


def test_frames_without_checksum_are_said(mine):
    line = next(x for x in kvlag("info", mine / "mine.h5").splitlines() if "attn/probs" in x)
    assert line.endswith("NO")


def test_the_documented_lifetimes_are_accepted(mine):
    got = facts(mine / "mine.lifetimes.h5", "--check")
    (config,) = got["configs"]
    assert got["trace"] == "mine" and config["spec"] == "sinks4-window64" and config["budget_asked"] == "68"
    assert config["sequences"][0]["shape"] == [2, 2, 300] and config["sequences"][0]["sinks"] == "4"
    assert "sinks4-window64" in kvlag("info", mine / "mine.lifetimes.h5")


@pytest.mark.parametrize(
    "attn",
    [
        {},
        {"compression": "gzip", "shuffle": True},
        {"chunks": (1, 1, 2, 3), "compression": "gzip"},
        {"chunks": (1, 1, 2, 3), "shuffle": True, **hdf5plugin.Zstd()},
        {"chunks": (1, 2, 5, 5), "shuffle": True, **hdf5plugin.Zstd()},
        {"chunks": (1, 1, 5, 5), **hdf5plugin.Zstd()},
        {"chunks": (1, 1, 2, 5), "fletcher32": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f2", ">f4"])
def test_any_chunks_filters_and_floats(tmp_path, attn, dtype):
    probs = np.zeros((1, 2, 5, 5))
    for t in range(5):
        probs[0, :, t, : t + 1] = 1 / (t + 1)
    path = foreign(tmp_path / "x.h5", **{"data": probs.astype(dtype), **attn})
    got = facts(path, "--check")
    assert got["sequences"][0]["check"]["sum_error"] < 1e-3
    assert got["sequences"][0]["tokens"] == 5  # from the shape: no n_tokens was given


def with_gradients(path, samples=2, dtype="f2", **storage):
    """The same with gradients: f16 times a scale, or plain numbers with scales of 1."""
    foreign(path)
    rng = np.random.default_rng(2)
    with h5py.File(path, "r+") as f:
        f.attrs["n_vocab"] = 7
        grad = f["seq/0000"].create_group("grad")
        before = (np.arange(5) < 4)[:, None]  # no loss follows the last step
        grad.create_dataset("loss", data=(before * rng.normal(size=(1, 2, 5, 4))).astype(dtype), **storage)
        grad["loss_scale"] = rng.random((1, 2, 5)).astype("f4")
        if "chunks" in storage:
            storage["chunks"] = (samples, *storage["chunks"])
        fisher = before * rng.normal(size=(samples, 1, 2, 5, 4))
        grad.create_dataset("fisher", data=fisher.astype(dtype), **storage)
        grad["fisher_scale"] = np.ones((samples, 1, 2, 5))
        grad["fisher_label"] = rng.integers(0, 7, (samples, 4))
    return path


@pytest.mark.parametrize(
    "storage",
    [
        {},
        {"chunks": (1, 2, 2, 3), "compression": "gzip"},
        {"chunks": (1, 1, 5, 4), "shuffle": True, **hdf5plugin.Zstd()},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", ">f4"])
def test_gradients_in_any_chunks_filters_and_floats(tmp_path, storage, dtype):
    path = with_gradients(tmp_path / "x.h5", dtype=dtype, **storage)
    (seq,) = facts(path, "--check")["sequences"]
    assert seq["gradients"] == ["loss", "fisher:2"]
    assert "gradients loss, fisher:2" in kvlag("info", path)


def put(group, name, at, value):
    group[name][at] = value


def cut(group, name):
    values = group.pop(name)[..., :-1]
    group[name] = values


@pytest.mark.parametrize(
    "change, part",
    [
        (lambda g: g.pop("loss_scale"), "grad/loss is there without grad/loss_scale"),
        (lambda g: g.pop("fisher"), "grad/fisher_scale is there without grad/fisher"),
        (lambda g: put(g, "fisher_label", (1, 2), 7), "grad/fisher_label: sample 1, step 2 is 7"),
        (lambda g: put(g, "fisher_label", (0, 3), -2), "grad/fisher_label: sample 0, step 3 is -2"),
        (lambda g: put(g, "loss_scale", (0, 1, 2), np.inf), "grad/loss_scale: holds a value that is not finite"),
        (lambda g: put(g, "fisher", (1, 0, 1, 2, 3), np.nan), "grad/fisher: holds a value that is not finite"),
        (lambda g: put(g, "fisher_scale", (1, 0, 1, 3), 1e300), "grad/fisher: not a finite number at layer 0, head 1"),
        (lambda g: cut(g, "fisher"), "grad/fisher: shape is [2, 1, 2, 5, 3], expected [2, 1, 2, 5, 4]"),
        (lambda g: cut(g, "loss_scale"), "grad/loss_scale: shape is [1, 2, 4], expected [1, 2, 5]"),
    ],
)
def test_faults_of_gradients_are_named(tmp_path, change, part):
    path = with_gradients(tmp_path / "x.h5")
    with h5py.File(path, "r+") as f:
        change(f["seq/0000/grad"])
    said = kvlag("info", path, "--check", fails=True)
    assert part in said and str(path) in said and said.count("\n") == 1


def test_a_filter_that_is_not_there_is_named(tmp_path):
    path = foreign(tmp_path / "x.h5", chunks=(1, 1, 5, 5), compression="lzf")
    assert "attn/probs: needs filter 32000 ('lzf'), which is not there" in kvlag("info", path, fails=True)


@pytest.mark.parametrize(
    "change, part",
    [
        (lambda f: f.attrs.__delitem__("complete"), "not complete"),
        (lambda f: f.attrs.__setitem__("version", 2), "newer"),
        (lambda f: f.attrs.__setitem__("format", "zip"), "not a kvlag file (format 'zip')"),
        (lambda f: f.attrs.__delitem__("head_dim"), "attribute 'head_dim' is missing"),
        (lambda f: f.attrs.__setitem__("n_layer", 2), "attn/probs: shape is [1, 2, 5, 5], expected [2, 2, 5, 5]"),
        (lambda f: f["seq/0000"].attrs.__setitem__("n_prompt", 9), "n_prompt"),
        (lambda f: f["seq/0000/attn/probs"].__setitem__((0, 1, 2, 4), 0.1), "above the diagonal"),
        (lambda f: f["seq/0000/attn/probs"].__setitem__((0, 1, 2, 1), np.nan), "not finite"),
        (lambda f: f["seq/0000/attn/probs"].__setitem__((0, 1, 2), 0), "sums to 0"),
    ],
)
def test_faults_are_named(tmp_path, change, part):
    path = foreign(tmp_path / "x.h5")
    with h5py.File(path, "r+") as f:
        change(f)
    said = kvlag("info", path, "--check", fails=True)
    assert part in said and str(path) in said and said.count("\n") == 1


def test_other_files_are_not_ours(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n")
    assert "not a kvlag file" in kvlag("info", tmp_path / "a.csv", fails=True)
    with h5py.File(tmp_path / "b.h5", "w") as f:
        f["x"] = 1
    assert "not a kvlag file" in kvlag("info", tmp_path / "b.h5", fails=True)
    assert "No such file" in kvlag("info", tmp_path / "c.h5", fails=True)
    assert "one FILE" in kvlag("info", fails=True)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A file that kvlag wrote with both forms: a committed sample, or else one traced here and now."""
    for sample in sorted((ROOT / "traces" / "samples").glob("*.h5")):
        with h5py.File(sample) as f:
            if "attn/probs" in f["seq/0000"] and "attn/q" in f["seq/0000"]:
                return sample
    if not MODEL.exists():
        pytest.skip(f"no sample holds both forms of attention, and {MODEL} is not there")
    path = tmp_path_factory.mktemp("own") / "own.h5"
    text = ROOT / "traces" / "FORMAT.md"
    kvlag("trace", MODEL, text, "-o", path, "--tokens", 300, "--attention", "both")
    return path


def test_our_own_files_read_from_python(own):
    """Everything by the names and types that FORMAT.md gives, and both forms of attention agree in numpy too."""
    got = facts(own, "--check")
    assert got["hash_of"] == "content" and all(d["checksum"] is not False for d in got["datasets"])
    with h5py.File(own) as f:
        assert f.attrs["format"] == "kvlag-trace" and f.attrs["complete"] == 1
        assert f.attrs["content_hash"] == got["content_hash"]
        H, KV, W = int(f.attrs["n_head"]), int(f.attrs["n_kv_head"]), f.attrs["window"]
        for name, seq in f["seq"].items():
            T = int(seq.attrs["n_tokens"])
            offset, pieces = seq["piece_offset"][:], seq["pieces"][:]
            assert offset.shape == (T + 1,) and offset[-1] == len(pieces)
            text = next(s for s in got["sequences"] if s["name"] == name)["text"]
            assert bytes(pieces[:16]).decode("utf-8", "replace").split()[0][:4] in text
            attn = seq["attn"]
            q, k = attn["q"][0].astype("f8"), attn["k"][0].astype("f8")
            assert attn["q"].dtype == np.float16 and attn["q"].chunks == (1, 1, min(256, T), q.shape[-1])
            scores = np.einsum("htd,hid->hti", q, k.repeat(H // KV, axis=0)) * f.attrs["scale"]
            if f.attrs["softcap"] > 0:
                scores = f.attrs["softcap"] * np.tanh(scores / f.attrs["softcap"])
            age = np.subtract.outer(np.arange(T), np.arange(T))
            scores[:, (age < 0) | ((W[0] > 0) & (age >= W[0]))] = -np.inf
            scores -= scores.max(-1, keepdims=True)
            rows = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
            probs = attn["probs"][0].astype("f8")
            assert np.triu(probs[0], 1).max() == 0
            assert np.abs(rows - probs).max() < 2e-2
            if "row_sum" in attn:
                assert np.abs(attn["row_sum"][0] - probs.sum(-1)).max() < 1e-5
