"""`kvlag sim --sample steps:R`: a quick look that is unbiased and says how far it scatters."""

import numpy as np
import pytest
from simcli import ROOT, refused, sim

TRACE = ROOT / "traces/samples/tiny-scripture.h5"
DECIDED = ["retained", "footprint", "peak", "evictions", "evict_batches", "n_counted"]
ASK = ["-p", "h2o", "-p", "streaming", "-b", "16,32", "--metrics", "lost_mass,loss"]


def run(tmp_path, name, *more):
    return sim(tmp_path / f"{name}.csv", TRACE, *ASK, *more)


def column(rows, name):
    return np.array([float(r[name]) for r in rows])


@pytest.mark.parametrize("text", ["steps", "steps:", "steps:3", "steps:-8", "rows:8", "steps:8x", "steps:9999999999"])
def test_other_texts_are_refused(tmp_path, text):
    refused(tmp_path, 2, f"--sample: '{text}' is not steps:R", "sim", TRACE, "-o", "x.csv", "--sample", text)


def test_as_many_as_there_are_is_all(tmp_path):
    assert run(tmp_path, "all") == run(tmp_path, "sampled", "--sample", "steps:100000")


def test_what_the_policies_do_is_the_same(tmp_path):
    for a, b in zip(run(tmp_path, "all"), run(tmp_path, "few", "--sample", "steps:20")):
        assert all(a[k] == b[k] for k in DECIDED)
        assert a["lost_mass"] != b["lost_mass"]


def test_one_draw_whatever_the_threads(tmp_path):
    few = ["--sample", "steps:20", "--seed", "3"]
    assert run(tmp_path, "one", *few, "--threads", "1") == run(tmp_path, "two", *few, "--threads", "2")
    assert run(tmp_path, "other", "--sample", "steps:20", "--seed", "4") != run(tmp_path, "again", *few)


def test_no_bias_and_an_honest_error(tmp_path):
    exact, seeds = run(tmp_path, "all"), 60
    drawn = [run(tmp_path, f"s{seed}", "--sample", "steps:40", "--seed", str(seed)) for seed in range(seeds)]
    for name in ("lost_mass", "dloss_first", "fisher"):
        values = np.array([column(rows, name) for rows in drawn])
        error = values.std(axis=0, ddof=1) / np.sqrt(seeds)
        assert (abs(values.mean(axis=0) - column(exact, name)) < 4 * error).all(), name
    # The interval grows by the sampling error, on log scale and in quadrature: its variance agrees with the scatter.
    plain = np.log(column(exact, "kl_hi") / column(exact, "kl_est"))
    wide = np.array([np.log(column(rows, "kl_hi") / column(rows, "kl_est")) for rows in drawn])
    assert (wide > plain).all()
    fisher = np.array([column(rows, "fisher") for rows in drawn])
    stated = (np.sqrt(wide**2 - plain**2) / 1.6448536 * fisher) ** 2
    assert (abs(np.log(stated.mean(axis=0) / fisher.var(axis=0, ddof=1))) < 0.5).all()
