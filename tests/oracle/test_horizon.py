"""oracle(mass|loss, horizon=H) against the numpy oracle, by hand, and against itself."""
import subprocess

import h5py
import numpy as np
import pytest

from make_traces import write_trace
from test_sim import KVLAG, check_all, metrics_for, pytestmark, simulate  # noqa: F401 (pytestmark skips without a program)

HORIZONS = ["0", "1", "5", "16", "40", "64", "100", "inf"]
ROWS = [[1], [.5, .5], [.2, .5, .3], [.6, .1, .2, .1], [.15, .5, .05, .2, .1], [.1, .2, .1, .2, .2, .2]]


def by_hand(tmp_path, counted=None):
    """One layer, one head, six steps with the rows above."""
    path = str(tmp_path / "hand.h5")
    write_trace(path, 1, n_layer=1, n_head=1, n_kv_head=1, wo=False,
                seqs=[dict(T=6, forms=("dense",), type=np.float32)])
    with h5py.File(path, "r+") as f:
        f["seq/0000/attn/probs"][0, 0] = [r + [0] * (6 - len(r)) for r in ROWS]
        if counted:
            f["seq/0000/counted"] = np.array(counted, np.uint8)
    return path


@pytest.mark.parametrize("horizon, counted, expected", [
    # After step 2 nothing is known: the oldest leaves, and so on.
    ("0", None, [3, 4, 5, 6, 7, 7]),
    # Step 2 knows row 3, .6 .1 .2: entry 1 leaves. Step 3 knows row 4 of entries 0 2 3, .15 .05 .2: entry 2 leaves.
    # Row 5 predicts nothing and does not count.
    ("1", None, [5, 3, 4, 6, 7, 7]),
    # Step 2 knows rows 3 + 4, .75 .6 .25: entry 2 leaves. Step 3: row 4 of entries 0 1 3, .15 .5 .2: entry 0.
    ("2", None, [4, 5, 3, 6, 7, 7]),
    ("budget", None, [4, 5, 3, 6, 7, 7]),
    ("inf", None, [4, 5, 3, 6, 7, 7]),
    # Row 3 does not count: step 2 knows nothing one step ahead, entry 0 leaves; step 3: .5 .05 .2, entry 2.
    ("1", [1, 1, 1, 0, 1], [3, 5, 4, 6, 7, 7]),
    ("2", [1, 1, 1, 0, 1], [4, 5, 3, 6, 7, 7]),
])
def test_six_steps_by_hand(tmp_path, horizon, counted, expected):
    path = by_hand(tmp_path, counted)
    results = simulate(tmp_path, path, [f"oracle(mass,horizon={horizon})"], "-b", "2")
    assert results.evict_at(results.rows[0])[0, 0].tolist() == expected


def specs_for(trace, horizons=HORIZONS):
    kinds = ["mass", "loss"] if trace.seqs[0].grad_fisher is not None else ["mass"]
    return [f"oracle({k},horizon={h})" for k in kinds for h in horizons]


@pytest.mark.parametrize("name, unit", [("dense16", "head"), ("factored", "head"), ("factored", "layer"),
                                        ("both", "head"), ("both", "layer"), ("long", "head")])
def test_horizons_against_numpy(traces, tmp_path, name, unit):
    path, trace = traces[name]
    specs = specs_for(trace, ["3", "70"] if name == "long" else HORIZONS[:5])
    results = simulate(tmp_path, path, specs, "-b", "25%", "--unit", unit, "--metrics", metrics_for(path, trace))
    assert check_all(results, trace) == len(specs) * len(trace.seqs) == len(results.rows)


def by_spec(results):
    return {r["spec"]: results.evict_at(r) for r in results.rows}


def test_the_ends_of_the_axis(traces, tmp_path):
    """Nothing known is first in, first out; all that follows known is the oracle without a horizon, to the bit."""
    path, trace = traces["long"]
    for kind in "mass", "loss":
        ends = [f"oracle({kind},horizon=0)", f"oracle({kind},horizon={trace.seqs[0].T})", f"oracle({kind})"]
        results = simulate(tmp_path, path, ends + ["window"], "-b", "30")
        made = by_spec(results)
        assert np.array_equal(made[ends[0]], made["window"])
        assert np.array_equal(made[ends[1]], made[ends[2]])
        # A horizon that reaches the last counted row sums the same numbers in another order.
        nearly = simulate(tmp_path, path, [f"oracle({kind},horizon={trace.seqs[0].T - 1})"], "-b", "30")
        lost = [float(r["lost_mass"]) for r in (nearly.rows[0], results.rows[2])]
        assert lost[0] == pytest.approx(lost[1], rel=1e-5)


def test_horizons_do_not_disturb_each_other(traces, tmp_path):
    path, trace = traces["long"]
    specs = specs_for(trace)
    together = by_spec(simulate(tmp_path, path, specs, "-b", "30"))
    assert len({x.tobytes() for x in together.values()}) > len(HORIZONS)
    for spec in specs:
        alone = simulate(tmp_path, path, [spec], "-b", "30")
        row = alone.rows[0]
        assert np.array_equal(alone.evict_at(row), together[row["spec"]]), spec


def test_threads_and_passes_do_not_change_a_byte(traces, tmp_path):
    path, trace = traces["long"]
    written = []
    for options in (["--threads", "1"], ["--threads", "3"]):
        simulate(tmp_path, path, specs_for(trace), "-b", "20,50", *options)
        written.append([(tmp_path / "run" / n).read_bytes() for n in ("r.csv", "r.blocks.h5", "l.h5")])
    assert written[0] == written[1]


def test_a_horizon_may_be_tied(traces, tmp_path):
    path, trace = traces["factored"]
    results = simulate(tmp_path, path, ["oracle(mass,horizon=lag)", "oracle(mass,horizon=budget/4)"], "-b", "20",
                       "-L", "3,5")
    named = simulate(tmp_path, path, ["oracle(mass,horizon=3|5)"], "-b", "20")
    lost = [r["lost_mass"] for r in results.rows]
    assert [r["lag"] for r in results.rows] == ["3", "5", ""]
    assert lost == [r["lost_mass"] for r in named.rows] + [named.rows[1]["lost_mass"]]


@pytest.mark.parametrize("spec, complaint", [
    ("oracle(mass,horizon=-1)", "horizon=-1 is out of range (0 to 1e+09)"),
    ("oracle(mass,horizon=1.5)", "horizon=1.5 is not a whole number"),
    ("oracle(mass,horizon=-inf)", "horizon=-inf is not a whole number"),
    ("oracle(mass,horizon=Inf)", "horizon=Inf"),
    ("oracle(mass,hold=inf)", "hold=inf is out of range"),
    ("rmm(lag=inf)", "lag=inf is out of range"),
])
def test_refusals(traces, tmp_path, spec, complaint):
    path, _ = traces["dense16"]
    done = subprocess.run([KVLAG, "sim", path, "-o", tmp_path / "r.csv", "-p", spec, "-b", "9"], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 2 and complaint in done.stderr, done.stderr
