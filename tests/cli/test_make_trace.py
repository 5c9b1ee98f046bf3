"""kvlag make-trace: files of every form that pass their check, the attention they hold, and what is refused."""

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np
import pytest
from simcli import SANITIZED, kvlag, peak_mib, rows_of


def made(path, *args):
    done = kvlag("make-trace", "random", "-o", path, *args)
    assert done.returncode == 0, done.stderr
    return done.stderr.decode()


def rows(f, layer, head):
    """Attention in float64 from q and k."""
    q, k = (f[f"seq/0000/attn/{x}"][layer].astype(float) for x in "qk")
    T = q.shape[1]
    scores = q[head] @ k[head * len(k) // len(q)].T * f.attrs["scale"]
    weights = np.exp(np.where(np.tri(T, dtype=bool), scores, -np.inf))
    return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize("form", ["factored", "dense", "both"])
@pytest.mark.parametrize("gradients", ["none", "loss", "fisher:2"])
def test_every_form_passes_its_check(tmp_path, form, gradients):
    path = tmp_path / "a.h5"
    said = made(path, "--tokens", 300, "--layers", 2, "--heads", 4, "--head-dim", 24, "--prompt", 20, "--seed", 5,
                "--attention", form, "--gradients", gradients)  # fmt: skip
    assert said.startswith("a.h5: 300 tokens, 2 layers, 4 heads over 1,") and said.count("\n") == 1
    done = kvlag("info", path, "--check")
    assert done.returncode == 0, done.stderr
    with h5py.File(path) as f:
        seq = f["seq/0000"]
        want = {"factored": {"q", "k", "v"}, "dense": {"probs", "lse", "row_sum"}}
        want["both"] = want["factored"] | want["dense"]
        assert set(seq["attn"]) == want[form]
        assert f.attrs["name"] == "synthetic" and f.attrs["backend"] == ""
        assert f.attrs["command"] == (
            f"kvlag make-trace random --tokens 300 --layers 2 --heads 4 --head-dim 24 --gradients {gradients}"
            f" --attention {form} --prompt 20 --seed 5")  # fmt: skip
        assert ("grad" in seq) == (gradients != "none")
        if gradients == "fisher:2":
            label = seq["grad/fisher_label"][:]
            assert (label[:, :20] == -1).all() and (label[:, 20:] >= 0).all() and (label < 32000).all()
            assert (seq["grad/fisher_scale"][..., :-1] > 0).all() and (seq["grad/fisher_scale"][..., -1] == 0).all()


def test_forms_agree(tmp_path):
    made(tmp_path / "a.h5", "--tokens", 520, "--attention", "both")
    with h5py.File(tmp_path / "a.h5") as f:
        for head in range(8):
            a = rows(f, 0, head)
            assert np.abs(a - f["seq/0000/attn/probs"][0, head]).max() < 3e-4
            assert np.abs(np.log(np.diag(a)) - self_scores(f, head) + f["seq/0000/attn/lse"][0, head]).max() < 1e-4


def self_scores(f, head):
    q, k = (f[f"seq/0000/attn/{x}"][0].astype(float) for x in "qk")
    return (q[head] * k[head * len(k) // len(q)]).sum(-1) * f.attrs["scale"]


def test_same_bytes_for_any_number_of_threads(tmp_path):
    words = "--tokens", 700, "--layers", 2, "--gradients", "fisher:1", "--attention", "both"
    made(tmp_path / "a.h5", *words, "--threads", 1)
    made(tmp_path / "b.h5", *words, "--threads", 3)
    made(tmp_path / "c.h5", *words, "--seed", 1)
    a, b, c = ((tmp_path / f"{x}.h5").read_bytes() for x in "abc")
    assert a == b and a != c


def test_attention_looks_real(tmp_path):
    """Over the heads of 4 layers, steps 512 .. 1023. SmolLM2-135M on prose: .28, .34, 3.0, .82 and .50."""
    made(tmp_path / "a.h5", "--tokens", 1024, "--layers", 4, "--heads", 8)
    found = []
    with h5py.File(tmp_path / "a.h5") as f:
        for head in range(32):
            a = rows(f, head // 8, head % 8)[512:]
            t = np.arange(512, 1024)[:, None]
            old = np.where((np.arange(1024) >= 4) & (np.arange(1024) <= t - 64), a, 0).sum(0)
            found.append((
                a[:, :4].sum(1).mean(),  # the first 4 entries
                np.where(np.arange(1024) > t - 64, a, 0).sum(1).mean(),  # the last 64
                -(a * np.log(np.maximum(a, 1e-30))).sum(1).mean(),  # entropy in nats
                np.mean([np.sort(r)[::-1][: n // 20].sum() for r, n in zip(a, t[:, 0])]),  # the largest 5 % of a row
                np.sort(old)[::-1][:51].sum() / old.sum(),  # the most used 5 % of what is neither
            ))  # fmt: skip
    sink, near, entropy, top, hitters = np.mean(found, axis=0)
    print(f"first 4 {sink:.3f}, last 64 {near:.3f}, entropy {entropy:.3f}, top 5 % {top:.3f}, hitters {hitters:.3f}")
    assert 0.2 < sink < 0.4
    assert 0.25 < near < 0.5
    assert 2.5 < entropy < 4
    assert 0.65 < top < 0.9
    assert 0.2 < hitters < 0.6
    spread = np.ptp(found, axis=0)
    assert spread[0] > 0.3 and spread[1] > 0.3


@pytest.mark.skipif(SANITIZED, reason="a sanitizer brings memory of its own")
def test_long_traces_take_little_memory(tmp_path):
    """16 times the length, 8 MiB more: single numbers a token."""
    most = []
    for tokens in 2048, 32768:
        most.append(peak_mib("make-trace", "random", "-o", tmp_path / f"{tokens}.h5", "--tokens", tokens, "--heads", 2,
                             "--gradients", "loss", "--threads", 1, "-q")[0])  # fmt: skip
    assert most[1] < most[0] + 8, most


def test_sim_takes_it(tmp_path):
    made(tmp_path / "a.h5", "--tokens", 600, "--gradients", "fisher:1")
    done = kvlag("sim", tmp_path / "a.h5", "-o", tmp_path / "r.csv", "-p", "h2o", "-p", "streaming", "-b", 64)
    assert done.returncode == 0, done.stderr
    h2o, streaming = rows_of(tmp_path / "r.csv")
    assert 0 < float(h2o["lost_mass"]) < float(streaming["lost_mass"]) < 1
    assert float(h2o["fisher"]) > 0


@pytest.mark.parametrize("words, message", [
    ((), "make-trace begins with a KIND"),
    (("-o", "x.h5"), "make-trace begins with a KIND"),
    (("randon", "-o", "x.h5"), "unknown kind 'randon' (did you mean random?)"),
    (("random",), "needs -o FILE.h5"),
    (("random", "x.h5"), "takes options only, got 'x.h5'"),
    (("random", "-o", "x.h5", "--heads", 6, "--kv-heads", 4), "6 heads cannot be shared out among 4"),
    (("random", "-o", "x.h5", "--tokens", 1), "--tokens: 1 is out of range (2 to"),
    (("random", "-o", "x.h5", "--tokens", 40, "--prompt", 39), "--prompt 39 leaves no step to count in 40 tokens"),
    (("random", "-o", "x.h5", "--tokens", 9000, "--attention", "both"), "stored for at most 8192 tokens"),
    (("random", "-o", "x.h5", "--gradients", "fisher:0"), "is neither none, loss nor fisher:S"),
    (("random", "-o", "x.h5", "--gradients", "fisher:1x"), "is neither none, loss nor fisher:S"),
])  # fmt: skip
def test_refused(tmp_path, words, message):
    done = kvlag("make-trace", *words, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr.decode() and done.stderr.count(b"\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_kept(tmp_path):
    (tmp_path / "a.h5").write_text("mine")
    done = kvlag("make-trace", "random", "-o", tmp_path / "a.h5")
    assert done.returncode == 2 and (tmp_path / "a.h5").read_text() == "mine"


def test_help_names_the_kinds():
    done = kvlag("help", "make-trace")
    assert done.returncode == 0
    assert "random: any size" in done.stdout.decode() and "--kv-heads" in done.stdout.decode()
