"""kvlag make-trace reuse: the file says what reuse.h says, the experiment's claims hold, its ablation is an identity."""

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np
import pytest
from simcli import kvlag, refused, rows_of

T, K, BUDGET = 400, 16, 40


def made(path, *args):
    done = kvlag("make-trace", "reuse", "-o", path, "--force", *args)
    assert done.returncode == 0, done.stderr
    return path


def retained(folder, trace, *policies, more=()):
    """(spec, lag) -> (mean, lower, upper) over the sequences, 95 % by Student's t; budget 40."""
    out = folder / "r.csv"
    done = kvlag("sim", trace, "-o", out, "--force", "-q", "-b", BUDGET, *more, *(x for p in policies for x in ("-p", p)))
    assert done.returncode == 0, done.stderr
    found = {}
    for row in rows_of(out):
        found.setdefault((row["spec"], row["lag"]), []).append(float(row["retained"]))
    return {k: interval(v) for k, v in found.items()}


def interval(v):
    assert len(v) == 20  # 2.0930 is the 97.5 % point of t with 19 degrees of freedom
    half = 2.0930 * np.std(v, ddof=1) / np.sqrt(len(v))
    return np.mean(v), np.mean(v) - half, np.mean(v) + half


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reuse")
    made(folder / "task.h5")
    made(folder / "always.h5", "--correct", "always")
    return folder


# ---- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_passes_its_check(traces):
    assert kvlag("info", traces / "task.h5", "--check").returncode == 0
    with h5py.File(traces / "task.h5") as f:
        assert f.attrs["command"] == "kvlag make-trace reuse" and len(f["seq"]) == 20
        assert (f.attrs["n_layer"], f.attrs["n_head"], f.attrs["n_kv_head"], f.attrs["n_vocab"]) == (1, 4, 2, 2 + K)
        assert f["seq/0019"].attrs["source"] == "reuse 19"


def rows_from_roles(seq, fact, distractor):
    """Every row without noise, from the roles that the file states."""
    token, correct, probes = (seq[x][:] for x in ("tokens", "logits/correct", "probes"))
    used = {step: entry for entry, later in probes for step in (later, entry + 6)}
    rows, newest = np.zeros((T - 1, T)), None
    for t in range(T - 1):
        d = t - np.arange(t + 1)
        target = used.get(t, None if correct[t] else newest)
        share = 0 if target is None else fact if token[target] >= 2 else distractor
        rows[t, : t + 1] = (1 - share) * (0.5 / (t + 1) + 0.5 * 0.5**d / (0.5**d).sum())
        if target is not None:
            rows[t, target] += share
        if token[t] == 1:
            newest = t
    return rows


def test_attention_is_what_the_roles_say(tmp_path):
    made(tmp_path / "a.h5", "--noise", 0, "--sequences", 3, "--fact-attention", 0.3, "--distractor-attention", 0.7)
    with h5py.File(tmp_path / "a.h5") as f:
        for seq in f["seq"].values():
            probs, probes = seq["attn/probs"][0].astype(float), seq["probes"][:]
            want = rows_from_roles(seq, 0.3, 0.7)
            assert np.abs(probs[:, :-1] - want).max() < 3e-4
            assert (probes[:, 1] - probes[:, 0]).min() >= 100 and len(np.unique(probes[:, 0])) == K
            assert (np.flatnonzero(seq["counted"]) == np.sort(probes[:, 1])).all()
            assert seq["logits/correct"][:][probes[:, 1]].all() and seq["logits/correct"][:][probes[:, 0] + 6].all()
            p = np.exp(seq["logits/target_logprob"][:].astype(float))
            assert ((p > 0.5) == seq["logits/correct"][:]).all()
            assert np.abs(-p * np.log(p) - (1 - p) * np.log(1 - p) - seq["logits/entropy"]).max() < 1e-5


def test_fewer_sequences_are_the_first_ones(traces, tmp_path):
    made(tmp_path / "a.h5", "--sequences", 2)
    with h5py.File(traces / "task.h5") as all20, h5py.File(tmp_path / "a.h5") as two:
        assert len(two["seq"]) == 2
        for name in "attn/probs", "probes", "logits/correct", "tokens":
            assert (two["seq/0001"][name][:] == all20["seq/0001"][name][:]).all()


def test_long_rows_go_over_tiles(tmp_path):
    """More than 256 tokens are several chunks in both directions; heads do not leak into one another."""
    made(tmp_path / "a.h5", "--tokens", 600, "--sequences", 1, "--heads", 3, "--kv-heads", 1)
    with h5py.File(tmp_path / "a.h5") as f:
        probs = f["seq/0000/attn/probs"][0].astype(float)
        assert probs.shape == (3, 600, 600) and not np.triu(probs, 1).any()
        assert np.abs(probs.sum(-1) - 1).max() < 1e-3
        assert (probs[0] != probs[1]).mean() > 0.4


def test_every_option_changes_the_file(tmp_path):
    base = "--sequences", 1, "--tokens", 300, "--facts", 8
    seen = {made(tmp_path / "a.h5", *base).read_bytes()}
    assert made(tmp_path / "a.h5", *base).read_bytes() in seen
    options = [("--facts", 9), ("--lag-of-proof", 7), ("--distance", 90), ("--distractors", 0.3), ("--failing", 0.4),
               ("--fact-attention", 0.5), ("--distractor-attention", 0.5), ("--noise", 0.4), ("--correct", "always"),
               ("--flip", 0.1), ("--heads", 2), ("--kv-heads", 4), ("--seed", 1), ("--tokens", 299)]  # fmt: skip
    for option in options:
        given = {base[i]: base[i + 1] for i in (0, 2, 4)} | dict([option])
        seen.add(made(tmp_path / "a.h5", *(x for pair in given.items() for x in pair)).read_bytes())
    assert len(seen) == 1 + len(options)


# ---- the experiment ----------------------------------------------------------------------------------------------------


def test_lag_keeps_what_proved_useful(traces, tmp_path):
    got = retained(tmp_path, traces / "task.h5", "rmm", "h2o", "streaming", "window", "oracle(mass)", more=("-L", "0:32:x2"))
    print(got)
    mean, low, _ = got["rmm", "8"]
    assert mean >= 0.95 and low > 0.9
    assert got["h2o", ""][2] < 0.3
    assert got["streaming", ""][2] < 0.1  # facts among the first four entries
    assert got["window", ""][2] == 0  # distance 100, budget 40
    assert got["oracle(mass)", ""][1] == 1
    # Where pending entries leave no room for 16 facts it falls again.
    assert got["rmm", "16"][1] > got["rmm", "32"][2] and got["rmm", "32"][2] < 0.6


@pytest.mark.parametrize("proof", [3, 6, 12])
def test_the_knee_lies_where_the_proof_arrives(tmp_path, proof):
    made(tmp_path / "a.h5", "--lag-of-proof", proof, "-q")
    got = retained(tmp_path, tmp_path / "a.h5", "rmm", more=("-L", f"{proof - 1},{proof}"))
    print(got)
    assert got["rmm", str(proof - 1)][2] < 0.25 and got["rmm", str(proof)][1] > 0.9


def test_nothing_is_gained_where_everything_is_right(traces, tmp_path):
    got = retained(tmp_path, traces / "always.h5", "rmm(lag=8)", "h2o")
    assert got["rmm", "8"][2] < 0.3 and got["h2o", ""][2] < 0.3


def test_where_nothing_distracts_it_is_enough_to_stop_adding_up(tmp_path):
    made(tmp_path / "a.h5", "--failing", 0)
    got = retained(tmp_path, tmp_path / "a.h5", "rmm(signal=uniform,lag=8)", "h2o")
    assert got["rmm(signal=uniform)", "8"][1] > 0.95 and got["h2o", ""][2] < 0.3


# ---- the identity ------------------------------------------------------------------------------------------------------


def lifetimes(folder, trace, policy):
    done = kvlag("sim", trace, "-o", folder / "l.csv", "--lifetimes", folder / "l.h5", "--force", "-q", "-b", BUDGET, "-p", policy)
    assert done.returncode == 0, done.stderr
    with h5py.File(folder / "l.h5") as f:
        return np.array([f[f"config/0000/seq/{n:04d}/evict_at"][0] for n in range(20)])


def truncated_h2o(probs, lag):
    """H2O whose sums leave out an entry's own row and end `lag` rows after its arrival; entries younger than that stay.
    probs [query heads of a kv head, T, T]."""
    evict_at, residents = np.full(T, T + 1), []
    total = np.zeros(T)
    for t in range(T):
        residents.append(t)
        rows = probs[:, t, residents]
        row = (rows / rows.sum(1, keepdims=True)).mean(0)
        for i, a in zip(residents, row):
            if i < t <= i + lag:
                total[i] += a
        if len(residents) > BUDGET:
            victim = min((i for i in residents if i <= t - lag), key=lambda i: (total[i], i))
            residents.remove(victim)
            evict_at[victim] = t + 1
    return evict_at


@pytest.mark.parametrize("lag", [1, 8, 32])
def test_uniform_correctness_makes_rmm_a_truncated_h2o(traces, tmp_path, lag):
    """Exactly equal lifetimes, all sequences and units. The last step makes no prediction and so counts as wrong: who
    leaves after it, seen by no query, is not compared."""
    always = lifetimes(tmp_path, traces / "always.h5", f"rmm(lag={lag})")
    mix = lifetimes(tmp_path, traces / "always.h5", f"mix(evidence=attn,memory=first:{lag},hold={lag})")
    uniform = lifetimes(tmp_path, traces / "task.h5", f"rmm(signal=uniform,lag={lag})")
    assert (uniform == mix).all()
    assert (np.minimum(always, T) == np.minimum(mix, T)).all()
    with h5py.File(traces / "always.h5") as f:
        for n in range(20):
            probs = f[f"seq/{n:04d}/attn/probs"][0].astype(float)
            for unit in range(2):
                assert (truncated_h2o(probs[2 * unit : 2 * unit + 2], lag) == mix[n, unit]).all()
    assert (mix != lifetimes(tmp_path, traces / "task.h5", f"rmm(lag={lag})")).any()
    assert (mix != lifetimes(tmp_path, traces / "task.h5", f"h2o(hold={lag})")).any()


# ---- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words, message", [
    ((), "needs -o FILE.h5"),
    (("x.h5", "-o", "y.h5"), "takes options only, got 'x.h5'"),
    (("-o", "x.h5", "--heads", 6, "--kv-heads", 4), "6 heads cannot be shared out among 4"),
    (("-o", "x.h5", "--lag-of-proof", 100), "--lag-of-proof 100 must come before --distance 100"),
    (("-o", "x.h5", "--noise", "loud"), "--noise: 'loud' is not a number in 0..4"),
    (("-o", "x.h5", "--failing", "1.1"), "--failing: '1.1' is not a number in 0..1"),
    (("-o", "x.h5", "--flip", "nan"), "--flip: 'nan' is not a number in 0..1"),
    (("-o", "x.h5", "--flip", "0.1", "--correct", "always"), "--flip and --correct always do not go together"),
    (("-o", "x.h5", "--facts", 300), "sequence 0: 300 facts do not fit: 400 tokens have 299 places"),
    (("-o", "x.h5", "--facts", 299), "sequence 0: 299 facts find no answers"),
    (("-o", "x.h5", "--tokens", 9000), "--tokens: 9000 is out of range (4 to 8192)"),
])  # fmt: skip
def test_refused(tmp_path, words, message):
    refused(tmp_path, 2, message, "make-trace", "reuse", *words)


def test_an_existing_file_is_kept(tmp_path):
    (tmp_path / "a.h5").write_text("mine")
    assert kvlag("make-trace", "reuse", "-o", tmp_path / "a.h5").returncode == 2
    assert (tmp_path / "a.h5").read_text() == "mine"


def test_help_lists_the_kind():
    said = kvlag("help", "make-trace").stdout.decode()
    assert "reuse: facts that prove useful" in said and "--lag-of-proof" in said
