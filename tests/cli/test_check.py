"""kvlag info --check: a file made with numpy passes, and each fault put into it is named by dataset and place."""

import json
import shutil

import h5py
import numpy as np
import pytest
from simcli import kvlag

L, H, KV, D, T, V, K, S, PROMPT, WINDOW = 2, 4, 2, 8, 30, 50, 5, 2, 6, 9
SCALE, CAP = 0.4, 3.0


def scores(q, k, window):
    """[heads, T, T] capped, -inf out of reach."""
    n = q.shape[1]
    s = SCALE * np.einsum("htd,hid->hti", q.astype("f8"), k.astype("f8").repeat(len(q) // len(k), axis=0))
    age = np.subtract.outer(np.arange(n), np.arange(n))
    return np.where((age >= 0) & (age < (window or n)), CAP * np.tanh(s / CAP), -np.inf)


def log_softmax(x):
    top = x.max(-1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))


def write_attention(f, rng, n, heads, kv, dense=True):
    windows = f.attrs["window"]
    q, k, v = (rng.normal(size=(len(windows), h, n, D)).astype("f2") for h in (heads, kv, kv))
    s = np.stack([scores(a, b, w) for a, b, w in zip(q, k, windows)])
    attn = f.create_group("seq/0000/attn")
    attn["q"], attn["k"], attn["v"] = q, k, v
    attn["lse"] = np.subtract(*(x.diagonal(axis1=-2, axis2=-1) for x in (s, log_softmax(s)))).astype("f4")
    if dense:
        attn["probs"] = np.exp(log_softmax(s)).astype("f2")
        attn["row_sum"] = attn["probs"][:].astype("f8").sum(-1).astype("f4")


def write_predictions(seq, rng, tokens):
    full = (2 * rng.normal(size=(T, V))).astype("f2")
    logp = log_softmax(full.astype("f8"))
    top = np.argsort(-logp, axis=1, kind="stable")[:, :K]
    out = seq.create_group("logits")
    out["full"], out["topk_id"], out["topk_logprob"] = full, top.astype("i4"), np.take_along_axis(logp, top, 1)
    out["target_logprob"] = logp[np.arange(T - 1), tokens[1:]]
    out["correct"] = (top[:-1, 0] == tokens[1:]).astype("u1")
    out["entropy"] = -(np.exp(logp) * logp).sum(1)[:-1]


def write_gradients(seq, rng, counted):
    grad, last = seq.create_group("grad"), np.flatnonzero(counted)[-1]
    before = (np.arange(T) <= last)[:, None]
    grad["loss"] = (before * rng.uniform(-1, 1, (L, H, T, D))).astype("f2")
    grad["fisher"] = (before * rng.uniform(-1, 1, (S, L, H, T, D))).astype("f2")
    grad["loss_scale"], grad["fisher_scale"] = np.ones((L, H, T), "f4"), np.ones((S, L, H, T), "f4")
    grad["fisher_label"] = np.where(counted, rng.integers(0, V, (S, T - 1)), -1).astype("i4")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("check") / "whole.h5", np.random.default_rng(4)
    with h5py.File(path, "w") as f:
        f.attrs.update(format="kvlag-trace", version=1, n_layer=L, n_head=H, n_kv_head=KV, head_dim=D, n_vocab=V,
                       scale=SCALE, softcap=CAP, window=np.array([0, WINDOW], "i4"))  # fmt: skip
        write_attention(f, rng, T, H, KV)
        seq = f["seq/0000"]
        seq.attrs["n_prompt"] = PROMPT
        tokens = rng.integers(0, V, T)
        counted = rng.random(T - 1) < 0.8
        counted[-2:] = True, False
        seq["tokens"], seq["counted"], seq["probes"] = tokens.astype("i4"), counted, np.array([[3, 8], [5, 29]], "i4")
        seq["pieces"], seq["piece_offset"] = np.full(2 * T, ord("x"), "u1"), 2 * np.arange(T + 1)
        write_predictions(seq, rng, tokens)
        write_gradients(seq, rng, counted & (np.arange(T - 1) >= PROMPT))
        f.attrs["complete"] = 1
    return path


def check(path, *more):
    return kvlag("info", path, "--check", *more)


def test_a_file_from_numpy_passes(whole):
    done = check(whole)
    assert done.returncode == 0, done.stderr
    said = done.stdout.decode()
    counted = sum(h5py.File(whole)["seq/0000/counted"][PROMPT:])
    assert (f"verified text, {T} stored rows a head, {T} of {T} rows of q and k, {T - 1} predictions, top {K}, "
            f"full logits, gradients of {counted} counted steps, labels of {S} samples\n") in said  # fmt: skip
    assert said.endswith("readable and finite\n  check      passed\n")
    (seq,) = json.loads(check(whole, "--json").stdout)["sequences"]
    assert 0 < seq["check"]["difference"] < 1e-3 and 0 < seq["check"]["sum_error"] < 1e-3
    assert 0 <= seq["check"]["lse_error"] < 1e-5  # q and k were f16 before


def attribute(name, value):
    def change(f):
        (f if name in f.attrs else f["seq/0000"]).attrs[name] = value

    return change


def put(name, at, value):
    """Set one value, or change it by a function of the old one."""

    def change(f):
        old = f["seq/0000"][name][at]
        f["seq/0000"][name][at] = value(old) if callable(value) else value

    return change


def drop(*names):
    def change(f):
        for name in names:
            del f["seq/0000"][name]

    return change


def replace(name, make):
    def change(f):
        values = make(f["seq/0000"][name][:])
        del f["seq/0000"][name]
        f["seq/0000"][name] = values

    return change


def both(*changes):
    return lambda f: [change(f) for change in changes]


def step_where(f, there):
    """One whose next token stands in the top K, or does not."""
    seq = f["seq/0000"]
    return int(np.flatnonzero((seq["logits/topk_id"][:-1] == seq["tokens"][1:][:, None]).any(1) == there)[0])


def shift_targets(f):
    """The fault of a loop that is off by one: predictions of step t at t+1."""
    for name in "target_logprob", "correct":
        f[f"seq/0000/logits/{name}"][:] = np.roll(f[f"seq/0000/logits/{name}"][:], 1)


def certain(f):
    """At a step whose next token is not the first, a probability of more than a half."""
    step = int(np.flatnonzero(f["seq/0000/logits/correct"][:] == 0)[0])
    f["seq/0000/logits/target_logprob"][step] = -0.1


def unlikely(f):
    f["seq/0000/logits/correct"][0], f["seq/0000/logits/target_logprob"][0] = 1, -20


def raise_outside_top(f):
    f["seq/0000/logits/target_logprob"][step_where(f, False)] = -0.01


def lower_inside_top(f):
    f["seq/0000/logits/target_logprob"][step_where(f, True)] -= 0.5


def count_one_more(f):
    f["seq/0000/counted"][T - 2] = True


NO_TOP = drop("logits/topk_id", "logits/topk_logprob", "logits/full")
FAULTS = {
    # tokens and text
    "token": (put("tokens", 7, V), "tokens: token 7 is 50, outside the vocabulary of 50"),
    "negative token": (put("tokens", 7, -1), "tokens: token 7 is -1"),
    "pieces fall": (put("piece_offset", 6, 3), "piece_offset: entry 6 is 3 after 10"),
    "pieces end late": (put("piece_offset", T, 61), "piece_offset: entry 30 is 61 after 58; offsets ascend within 0 .. 60"),
    "pieces end early": (put("piece_offset", T, 59), "piece_offset: the last piece ends at byte 59, pieces at 60"),
    "pieces begin late": (put("piece_offset", 0, 1), "piece_offset: the first piece begins at byte 1, not 0"),
    "pieces alone": (drop("piece_offset"), "pieces and piece_offset: one is there without the other"),
    "counted": (replace("counted", lambda x: x.astype("u1") * 3), "counted: step 0 is 3, not 0 or 1"),
    "probe": (put("probes", (1, 1), 30), "probes: probe 1 is (entry 5, step 30)"),
    # shapes
    "heads": (replace("attn/q", lambda x: x[:, :3]), "attn/q: shape is [2, 3, 30, 8], expected [2, 4, 30, 8]"),
    "lse": (replace("attn/lse", lambda x: x[..., :-1]), "attn/lse: shape is [2, 4, 29], expected [2, 4, 30]"),
    "targets": (replace("logits/target_logprob", lambda x: x[1:]), "target_logprob: shape is [28], expected [29]"),
    "full": (replace("logits/full", lambda x: x[:, 1:]), "logits/full: shape is [30, 49], expected [30, 50]"),
    # finite
    "inf in v": (put("attn/v", (1, 0, 4, 2), np.inf), "attn/v: holds a value that is not finite at layer 1, head 0, step 4, dimension 2"),
    "nan in row_sum": (put("attn/row_sum", (1, 3, 4), np.nan), "attn/row_sum: holds a value that is not finite at layer 1, head 3, step 4"),
    "nan in top": (put("logits/topk_logprob", (4, 2), np.nan), "topk_logprob: holds a value that is not finite at step 4, column 2"),
    "big-endian nan": (both(replace("grad/loss_scale", lambda x: x.astype(">f4")), put("grad/loss_scale", (1, 2, 3), np.nan)),
                       "grad/loss_scale: holds a value that is not finite at layer 1, head 2, step 3"),
    "unknown": (lambda f: f.create_dataset("seq/0000/mine", data=[1, np.nan]), "seq/0000/mine: holds a value that is not finite at index 1"),
    # dense rows
    "future": (put("attn/probs", (0, 2, 7, 8), 0.1), "attn/probs: an entry above the diagonal, 0.0999756 at layer 0, head 2, step 7"),
    "window": (put("attn/probs", (1, 2, 20, 11), 0.1), "attn/probs: an entry outside the window, 0.0999756 at layer 1, head 2, step 20"),
    "negative": (put("attn/probs", (1, 3, 20, 18), -0.1), "attn/probs: a probability of -0.0999756 at layer 1, head 3, step 20"),
    "sum": (put("attn/probs", (1, 3, 20), lambda x: x * 1.05), "attn/probs: a row that sums to 1.04996 at layer 1, head 3, step 20"),
    "row_sum": (put("attn/row_sum", (1, 3, 20), 0.99), "attn/row_sum does not match a row that sums to"),
    "narrow window": (attribute("window", np.array([0, WINDOW - 1], "i4")), "attn/probs: an entry outside the window"),
    # the two forms, and lse
    "scale": (both(drop("attn/lse"), attribute("scale", SCALE * 1.2)), "attn/probs: 0."),
    "softcap": (both(drop("attn/lse"), attribute("softcap", 0.0)), "off what q and k give at layer 0, head"),
    "another key": (both(drop("attn/lse"), put("attn/k", (1, 1, 12), lambda x: -x)), "off what q and k give at layer 1, head 2, step 12"),
    "other rows": (both(drop("attn/lse"), put("attn/probs", (1, 0, 9, slice(1, 10)), lambda x: x[::-1])), "off what q and k give at layer 1, head 0, step 9"),
    "lse value": (put("attn/lse", (1, 2, 7), lambda x: x + 0.1), "attn/lse: 0.1 off what q and k give at layer 1, head 2, step 7"),
    # predictions
    "certain": (put("logits/target_logprob", 5, 0.5), "logits/target_logprob: step 5 is 0.5"),
    "entropy": (both(NO_TOP, put("logits/entropy", 5, 4.0)), "logits/entropy: step 5 is 4, above the logarithm of the vocabulary, 3.91202"),
    "negative entropy": (put("logits/entropy", 5, -0.5), "logits/entropy: step 5 is -0.5"),
    "low entropy": (put("logits/entropy", 5, 0.05), "logits/entropy: step 5 is 0.05, but its top 5 alone have"),
    "high entropy": (put("logits/entropy", 5, 3.9), "logits/entropy: step 5 is 3.9, but its top 5 leave room for"),
    "order": (put("logits/topk_logprob", 9, lambda x: x[::-1]), "logits/topk_logprob: step 9 rises from"),
    "mass": (put("logits/topk_logprob", 9, -1.0), "logits/topk_logprob: step 9 adds up to a probability of 1.8394"),
    "twice": (put("logits/topk_id", 9, 4), "logits/topk_id: step 9 has id 4 twice"),
    "top outside": (put("logits/topk_id", (T - 1, 3), V), "logits/topk_id: step 29 has id 50, outside the vocabulary of 50"),
    "hit": (put("logits/correct", 2, lambda x: 1 - x), "logits/correct: step 2 is"),
    "shifted": (shift_targets, "logits/"),
    "inside": (lower_inside_top, "in its top 5"),
    "outside": (raise_outside_top, "above the last of its top 5"),
    "more than half": (both(NO_TOP, certain), "is 0, but the next token has a probability of 0.904837"),
    "less than likely": (both(NO_TOP, unlikely), "logits/correct: step 0 is 1, but at an entropy of"),
    "full logits": (put("logits/full", (9,), lambda x: x[::-1]), "logits/full: step 9 gives"),
    # gradients
    "label": (put("grad/fisher_label", (1, 8), V), "grad/fisher_label: sample 1, step 8 is 50"),
    "prompt's label": (put("grad/fisher_label", (1, 2), 3), "grad/fisher_label: sample 1, step 2 is 3, but that step does not count"),
    "no label": (put("grad/fisher_label", (0, T - 3), -1), f"grad/fisher_label: sample 0, step {T - 3} is -1, but that step counts"),
    "counts": (count_one_more, f"grad/fisher_label: sample 0, step {T - 2} is -1, but that step counts"),
    "late gradient": (put("grad/loss", (1, 2, T - 1, 3), 0.5), f"grad/loss: 0.5 at layer 1, head 2, step {T - 1}, after the last step that counts, {T - 3}"),
    "late sample": (put("grad/fisher", (1, 0, 3, T - 2, 3), 0.5), f"grad/fisher: 0.5 at layer 0, head 3, step {T - 2}, after the last"),
    "overflow": (both(replace("grad/fisher_scale", lambda x: x.astype("f8")), put("grad/fisher_scale", (1, 1, 2, 8), 1e300)),
                 "grad/fisher: not a finite number at layer 1, head 2, row 8"),
    "samples alone": (drop("grad/loss", "grad/loss_scale"), "grad/fisher is there without grad/loss"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(whole, tmp_path, fault):
    change, words = FAULTS[fault]
    shutil.copy(whole, tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "r+") as f:
        change(f)
    done = check(tmp_path / "x.h5")
    said = done.stderr.decode()
    assert done.returncode == 1 and words in said and said.count("\n") == 1, said
    assert said.startswith(f"kvlag: {tmp_path / 'x.h5'}: "), said


@pytest.mark.parametrize("lacks", [("attn/probs", "attn/row_sum"), ("attn/q", "attn/k"), ("attn/lse", "attn/v"), ("logits",),
                                   ("logits/topk_id", "logits/topk_logprob"), ("logits/topk_logprob",), ("tokens",),
                                   ("grad/fisher", "grad/fisher_scale", "grad/fisher_label"), ("grad",), ("attn", "grad")],
                         ids=str)  # fmt: skip
def test_less_is_no_fault(whole, tmp_path, lacks):
    shutil.copy(whole, tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "r+") as f:
        f["seq/0000"].attrs["n_tokens"] = T
        drop(*lacks)(f)
    done = check(tmp_path / "x.h5")
    assert done.returncode == 0, done.stderr


def test_ties_may_fall_either_way(whole, tmp_path):
    """Two tokens are equally likely: the model's own choice may differ from the first of its top-k."""
    shutil.copy(whole, tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "r+") as f:
        out, tokens = f["seq/0000/logits"], f["seq/0000/tokens"]
        del out["full"]
        out["topk_logprob"][4] = np.log([0.2, 0.2, 0.1, 0.1, 0.1])
        out["target_logprob"][4], out["entropy"][4], out["correct"][4] = np.log(0.2), 2.3, 1
        tokens[5] = out["topk_id"][4, 1]
        out["target_logprob"][5] = -9
        out["correct"][5] = 0
    done = check(tmp_path / "x.h5")
    assert done.returncode == 0, done.stderr


def test_what_bf16_rounds_away_is_no_fault(whole, tmp_path):
    """A model that computed in bf16 has rows a little off those of its stored q and k."""
    shutil.copy(whole, tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5", "r+") as f:
        f["seq/0000/attn/lse"][1, 2, 20] += 0.03
    assert "attn/lse: 0.03 off" in check(tmp_path / "x.h5").stderr.decode()
    with h5py.File(tmp_path / "x.h5", "r+") as f:
        f.attrs["compute"] = "bf16"
    assert check(tmp_path / "x.h5").returncode == 0


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    path = tmp_path_factory.mktemp("check") / "long.h5"
    with h5py.File(path, "w") as f:
        f.attrs.update(format="kvlag-trace", version=1, n_layer=1, n_head=1, n_kv_head=1, head_dim=D, scale=SCALE,
                       softcap=CAP, window=np.array([0], "i4"))  # fmt: skip
        write_attention(f, np.random.default_rng(5), 2500, 1, 1, dense=False)
        f.attrs["complete"] = 1
    return path


def test_of_a_long_trace_some_rows_are_computed(long, tmp_path):
    """32 of its 40 bands of 64 rows, the first and the last among them; --all computes the others too."""
    last = 2500 - 39 * 64
    assert f"verified {31 * 64 + last} of 2500 rows of q and k\n" in check(long).stdout.decode()
    assert "verified 2500 of 2500 rows of q and k\n" in check(long, "--all").stdout.decode()
    bands = {b * 39 // 31 for b in range(32)}
    for band, seen in ((0, True), (min(set(range(40)) - bands), False), (39, True)):
        shutil.copy(long, tmp_path / "x.h5")
        with h5py.File(tmp_path / "x.h5", "r+") as f:
            f["seq/0000/attn/lse"][0, 0, band * 64 + 3] += 1
        words = f"attn/lse: 1 off what q and k give at layer 0, head 0, step {band * 64 + 3}"
        assert (words in check(tmp_path / "x.h5").stderr.decode()) == seen
        assert words in check(tmp_path / "x.h5", "--all").stderr.decode()


def test_all_goes_with_check(whole):
    done = kvlag("info", whole, "--all")
    assert done.returncode == 2 and b"--all" in done.stderr
