"""The CUDA backend from the command line, its kernels run on the CPU (kvlag-fibers.so): traces against the CPU backend's."""
import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

KVLAG = os.path.abspath(os.environ.get("KVLAG", "./kvlag"))
PLUGIN = Path(KVLAG).parent / "kvlag-fibers.so"
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not PLUGIN.exists(), reason="kvlag-fibers.so is not built (make unit)")
TEXT = "And God saw the light, that it was good. Tirzah gold. Seth honey. Tirzah gold.\n" * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda")
    subprocess.run([sys.executable, ROOT / "tests/tiny/make_gguf.py", path / "tiny.gguf"], check=True, capture_output=True)
    (path / "text.txt").write_text(TEXT)
    trace(path, "cpu.h5", "--backend", "cpu")
    return path


def kvlag(*args):
    env = {**os.environ, "KVLAG_CUDA_PLUGIN": str(PLUGIN)}
    done = subprocess.run([KVLAG, *map(str, args)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done


def trace(folder, out, *options, tokens=300):
    return kvlag("trace", folder / "tiny.gguf", folder / "text.txt", "-o", folder / out, "--tokens", tokens,
                 *options).stderr  # fmt: skip


def compare(folder, a, b):
    found = json.loads(kvlag("info", "--compare", "--json", folder / a, folder / b).stdout)
    return found, {d["path"]: d for d in found["sequences"][0]["datasets"]}


def test_a_trace_is_the_cpu_backends_but_for_rounding(folder):
    said = trace(folder, "cuda.h5", "--backend", "cuda").splitlines()
    assert "predictions XXH3" in said[-2] and said[-1].startswith("time: compute ")
    found, sets = compare(folder, "cpu.h5", "cuda.h5")
    assert [x["fact"] for x in found["differs"]] == ["backend", "device", "command"]
    assert found["differs"][0]["b"] == "cuda" and found["sequences"][0]["only"] == [[], []]
    assert sets["logits/target_logprob"]["max"] < 2e-3 and sets["logits/entropy"]["max"] < 2e-3
    assert sets["logits/correct"]["agree"] > 0.99 and sets["logits/topk_id"]["agree"] > 0.99
    assert sets["attention rows"]["max"] < 6e-4 and sets["attn/lse"]["max"] < 1e-3  # f16 as stored
    for name in "attn/q", "attn/k", "attn/v":
        assert sets[name]["relative"] < 1e-3
    assert sets["grad/loss"]["norm_ratio"] == pytest.approx(1, abs=0.01) and sets["grad/loss"]["cosine"] > 0.9999
    assert sets["grad/fisher_label"]["agree"] > 0.98
    kvlag("info", "--check", folder / "cuda.h5")


@pytest.mark.parametrize("tokens", [2, 31, 33, 257])
def test_any_length(folder, tokens):
    for backend in "cpu", "cuda":
        trace(folder, f"{backend}{tokens}.h5", "--backend", backend, "--gradients", "fisher:2", "--logits", "topk:5",
              tokens=tokens)  # fmt: skip
    _, sets = compare(folder, f"cpu{tokens}.h5", f"cuda{tokens}.h5")
    assert len(sets) == 13
    assert sets["logits/target_logprob"]["max"] < 2e-3 and sets["attention rows"]["max"] < 6e-4
    assert sets["grad/loss"]["norm_ratio"] == pytest.approx(1, abs=0.01)
    kvlag("info", "--check", folder / f"cuda{tokens}.h5")


def test_two_runs_give_the_same_bytes(folder):
    for name, threads in ("one.h5", 1), ("two.h5", 3):
        trace(folder, name, "--backend", "cuda", "--threads", threads)
    assert (folder / "one.h5").read_bytes() == (folder / "two.h5").read_bytes()


def test_auto_takes_it(folder):
    assert "CUDA" not in trace(folder, "auto.h5", "--gradients", "none")
    with h5py.File(folder / "auto.h5") as f:
        assert f.attrs["backend"] == "cuda" and "--backend" not in f.attrs["command"]


def test_bf16_is_near(folder):
    trace(folder, "bf16.h5", "--precision", "bf16", "--logits", "full")
    found, sets = compare(folder, "cpu.h5", "bf16.h5")
    assert {x["fact"]: x["b"] for x in found["differs"]}["compute"] == "bf16"
    assert 1e-5 < sets["logits/target_logprob"]["mean"] < 0.05 and sets["grad/loss"]["cosine"] > 0.9


def test_weights_as_blocks_and_layers_from_host_memory_change_nothing(folder):
    trace(folder, "plain.h5", "--backend", "cuda")
    for name, options in ("blocks.h5", ("--weights", "blocks")), ("offload.h5", ("--offload",)):
        trace(folder, name, "--backend", "cuda", *options)
        assert (folder / name).read_bytes() == (folder / "plain.h5").read_bytes()


def test_verify(folder):
    trace(folder, "t.h5", "--backend", "cuda", tokens=120)
    rows = {}
    for backend in "cpu", "cuda":
        for mode in "open", "closed":
            out = folder / f"{backend}-{mode}.csv"
            kvlag("verify", folder / "tiny.gguf", folder / "t.h5", "-o", out, "-p", "h2o", "-b", "32", "--mode", mode,
                  "--backend", backend)  # fmt: skip
            lines = [x.split(",") for x in out.read_text().splitlines() if not x.startswith("#")]
            rows[backend, mode] = dict(zip(*lines))
    for mode in "open", "closed":
        a, b = (float(rows[backend, mode]["true_kl"]) for backend in ("cpu", "cuda"))
        assert a > 0 and b == pytest.approx(a, rel=0.02)
