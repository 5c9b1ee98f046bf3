"""kvlag info --compare: every figure against numpy, on two traces of one text that differ in known ways."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np
import pytest

KVLAG = os.path.abspath(os.environ.get("KVLAG", "./kvlag"))
ROOT = Path(__file__).resolve().parents[2]
TEXT = "And God saw the light, that it was good. Tirzah gold. Seth honey. Tirzah gold.\n" * 20


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """a.h5; same.h5 with other facts; b.h5 with other values; short.h5 and other.h5 of other tokens."""
    folder = tmp_path_factory.mktemp("compare")
    model = folder / "tiny.gguf"
    subprocess.run([sys.executable, ROOT / "tests/tiny/make_gguf.py", model], check=True, capture_output=True)
    (folder / "text.txt").write_text(TEXT)
    (folder / "other.txt").write_text(TEXT.replace("Seth", "Enos"))
    for name, text, tokens, more in (
        ("a", "text", 300, "--gradients fisher:2"),
        ("factored", "text", 300, "--attention factored --gradients loss --logits topk:5"),
        ("short", "text", 50, "--gradients none"),
        ("other", "other", 300, "--gradients none"),
    ):
        subprocess.run([KVLAG, "trace", model, folder / f"{text}.txt", "-o", folder / f"{name}.h5", "-q", "--tokens",
                        str(tokens), *more.split()], check=True)  # fmt: skip
    shutil.copy(folder / "a.h5", folder / "same.h5")
    shutil.copy(folder / "a.h5", folder / "b.h5")
    with h5py.File(folder / "same.h5", "r+") as f:
        f.attrs["backend"], f.attrs["device"], f.attrs["compute"] = "cuda", "a GPU", "bf16"
    change(folder / "b.h5")
    return folder


def change(path):
    rng = np.random.default_rng(1)
    with h5py.File(path, "r+") as f:
        del f.attrs["content_hash"]
        s = f["seq/0000"]
        for name in "logits/target_logprob", "logits/entropy", "attn/q", "attn/v", "attn/lse", "logits/topk_logprob":
            x = s[name][:]
            s[name][...] = x + (0.01 * rng.standard_normal(x.shape)).astype(x.dtype)
        s["logits/entropy"][...] = np.abs(s["logits/entropy"][:])
        s["logits/target_logprob"][...] = -np.abs(s["logits/target_logprob"][:])
        correct = s["logits/correct"][:]
        correct[::10] ^= 1
        s["logits/correct"][...] = correct
        top = s["logits/topk_id"][:]
        top[:, 3] = (top[:, 0] + 1) % 1024
        s["logits/topk_id"][...] = top[:, ::-1]  # order does not count
        probs = s["attn/probs"][:]
        probs[1, 2, 100, 50] += np.float16(0.125)
        s["attn/probs"][...] = probs
        s["grad/loss_scale"][1] = s["grad/loss_scale"][1] * 1.25
        g = s["grad/fisher"][:]
        g[1, 2] = g[1, 2] * rng.choice([1, 1, 1, -1], g[1, 2].shape)
        s["grad/fisher"][...] = g
        label = s["grad/fisher_label"][:]
        label[1, :30] = (label[1, :30] + 1) % 1024
        s["grad/fisher_label"][...] = label


def run(*args):
    return subprocess.run([KVLAG, "info", *map(str, args)], capture_output=True, text=True)


def compared(a, b):
    done = run("--compare", "--json", a, b)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found, {d["path"]: d for d in found["sequences"][0]["datasets"]}


def test_a_trace_against_itself(traces):
    found, sets = compared(traces / "a.h5", traces / "a.h5")
    assert found["differs"] == [] and found["sequences"][0]["only"] == [[], []]
    assert found["sequences"][0]["tokens"] == 300 and len(found["sequences"]) == 1
    assert set(sets) == {"logits/target_logprob", "logits/correct", "logits/entropy", "logits/topk_id",
                         "logits/topk_logprob", "attn/q", "attn/k", "attn/v", "attn/lse", "attention rows", "grad/loss",
                         "grad/fisher", "grad/fisher_label"}  # fmt: skip
    for d in sets.values():
        assert d.get("mean", 0) == d.get("max", 0) == d.get("relative", 0) == 0
        assert d.get("agree", 1) == d.get("norm_ratio", 1) == 1 and d.get("cosine", 1) == pytest.approx(1)
    assert sets["attention rows"]["forms"] == ["dense", "dense"]


def test_facts_that_differ(traces):
    found, _ = compared(traces / "a.h5", traces / "same.h5")
    with h5py.File(traces / "a.h5") as f:
        device = f.attrs["device"]
    assert found["differs"] == [{"fact": "backend", "a": "cpu", "b": "cuda"},
                                {"fact": "device", "a": device, "b": "a GPU"},
                                {"fact": "compute", "a": "f32", "b": "bf16"}]  # fmt: skip
    said = run("--compare", traces / "a.h5", traces / "same.h5").stdout
    assert "  backend    cpu\n             cuda\n" in said


def test_values_that_differ(traces):
    _, sets = compared(traces / "a.h5", traces / "b.h5")
    with h5py.File(traces / "a.h5") as fa, h5py.File(traces / "b.h5") as fb:
        a, b = fa["seq/0000"], fb["seq/0000"]
        for name in "logits/target_logprob", "logits/entropy", "logits/topk_logprob", "attn/q", "attn/k", "attn/v", \
                "attn/lse":  # fmt: skip
            x, y = a[name][:].astype(float), b[name][:].astype(float)
            assert sets[name]["mean"] == pytest.approx(np.abs(x - y).mean(), rel=1e-6, abs=1e-12)
            assert sets[name]["max"] == pytest.approx(np.abs(x - y).max(), rel=1e-6)
            if name[:-1] == "attn/":
                assert sets[name]["relative"] == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-6)
        assert sets["attn/k"]["max"] == 0 < sets["attn/v"]["relative"]
        assert sets["logits/correct"]["agree"] == pytest.approx(1 - 30 / 299)
        ids = [set(map(int, row)) for row in a["logits/topk_id"][:]], [list(row) for row in b["logits/topk_id"][:]]
        common = [len(x & set(map(int, y))) / 32 for x, y in zip(*ids)]
        assert sets["logits/topk_id"]["agree"] == pytest.approx(np.mean(common))
        p, q = (f["attn/probs"][:].astype(float) for f in (a, b))
        p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
        assert sets["attention rows"]["max"] == pytest.approx(np.abs(p - q).max(), rel=1e-3) and np.abs(p - q).max() > 0.09
        assert sets["attention rows"]["mean"] == pytest.approx(np.abs(p - q).sum() / (18 * 300 * 301 / 2), rel=1e-3)
        x, y = (f["grad/fisher"][:].astype(float) * f["grad/fisher_scale"][:][..., None] for f in (a, b))
        cosine = (x * y).sum((2, 3, 4)) / np.sqrt((x * x).sum((2, 3, 4)) * (y * y).sum((2, 3, 4)))
        label = a["grad/fisher_label"][:]
        assert sets["grad/fisher_label"]["agree"] == pytest.approx(1 - 30 / label.size)
    loss, fisher = sets["grad/loss"], sets["grad/fisher"]
    assert (loss["norm_ratio"], loss["norm_ratio_layer"]) == (pytest.approx(1.25, rel=1e-6), 1)
    assert [x["norm_ratio"] for x in loss["layers"]] == pytest.approx([1, 1.25, 1], rel=1e-6)
    assert loss["cosine"] == pytest.approx(1, abs=1e-9)
    assert (fisher["cosine"], fisher["cosine_layer"]) == (pytest.approx(cosine.min(), rel=1e-5), 2)
    assert cosine.argmin() == 5 and cosine.min() < 0.7
    assert [x["cosine"] for x in fisher["layers"]] == pytest.approx(cosine.min(0), rel=1e-5)


def test_forms_and_parts_that_only_one_has(traces):
    found, sets = compared(traces / "a.h5", traces / "factored.h5")
    assert found["sequences"][0]["only"] == [["attn/probs", "attn/row_sum", "grad/fisher", "grad/fisher_label",
                                              "grad/fisher_scale"], []]  # fmt: skip
    assert sets["attention rows"]["forms"] == ["factored", "factored"] and sets["attention rows"]["max"] == 0
    assert "logits/topk_logprob" not in sets and sets["logits/topk_id"]["agree"] == 1
    assert "grad/fisher" not in sets and sets["grad/loss"]["cosine"] == pytest.approx(1)
    said = run("--compare", traces / "a.h5", traces / "factored.h5").stdout
    assert f"only in {traces}/a.h5: attn/probs, attn/row_sum, grad/fisher" in said


def test_the_text_form(traces):
    lines = run("--compare", traces / "a.h5", traces / "b.h5").stdout.splitlines()
    assert lines[:3] == [f"{traces}/a.h5", f"{traces}/b.h5", "  seq/0000   300 tokens"]
    assert any(x.split()[:1] == ["logits/target_logprob"] and " at most " in x for x in lines)
    assert any("norm ratio 1.25 (worst: layer 1)" in x for x in lines)


def test_what_cannot_be_compared(traces, tmp_path):
    a = traces / "a.h5"
    for other, message in ("short.h5", "has 300 and 50 tokens"), ("other.h5", "token "):
        done = run("--compare", a, traces / other)
        assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
        assert "cannot be compared" in done.stderr and message in done.stderr
    done = run("--compare", a, ROOT / "traces/samples/tiny-recall.h5")
    assert done.returncode == 1 and "cannot be compared" in done.stderr
    assert run("--compare", a).returncode == 2
    assert run("--compare", "--check", a, a).returncode == 2
    assert run(a, a).returncode == 2
    done = run("--compare", a, traces / "text.txt")
    assert done.returncode == 1 and "text.txt" in done.stderr
