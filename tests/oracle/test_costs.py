"""The columns of cost: resident, kv_bytes, score_updates, decode_us (docs/costs.md)."""
import subprocess

import pytest

from test_sim import KVLAG, Results, pytestmark, run  # noqa: F401 (pytestmark skips without a program)

DEVICE = ["--device", "hbm=3TB/s,weights=270MB"]


def rows_by_spec(path, out, specs, *options):
    policies = [x for s in specs for x in ("-p", s)]
    run("sim", path, "-o", out, "--force", *policies, *options)
    return {r["spec"]: r for r in Results(out).rows}


def number(row, column):
    return float(row[column])


def test_a_window_by_hand(traces, tmp_path):
    """dense16: 40 steps, 2 layers of 2 kv heads of 16. A window of 9 shows 1, 2, ... 9, 10, 10 ... entries to a step: under
    `step` the query sees what is left and itself."""
    path, trace = traces["dense16"]
    rows = rows_by_spec(path, tmp_path / "r.csv", ["window", "full"], "-b", "9", *DEVICE)
    resident = (sum(range(1, 10)) + 31 * 10) / 40
    for spec, mean in ("window", resident), ("full", 20.5):
        row = rows[spec]
        assert number(row, "resident") == pytest.approx(mean)
        assert number(row, "kv_bytes") == pytest.approx(mean * 2 * 2 * 2 * 16 * 2)
        assert number(row, "decode_us") == pytest.approx((mean * 256 + 270e6) / 3e12 * 1e6)
        assert number(row, "score_updates") == 0


@pytest.mark.parametrize("unit", ["head", "layer"])
def test_the_prompt_is_left_out(traces, tmp_path, unit):
    """The prompt's steps are no decoding: with a window from step 21 on, the steps see 22, 11, 11, ... entries."""
    path, trace = traces["dense16"]
    options = ["-b", "10", "--prompt", "21"]
    row = rows_by_spec(path, tmp_path / "r.csv", [f"window(unit={unit})"], *options).popitem()[1]
    assert number(row, "resident") == pytest.approx(11)  # step 20 evicts to 10, step 21 sees them and itself
    assert number(row, "kv_bytes") == pytest.approx(11 * 256)
    assert number(row, "footprint") * 820 == pytest.approx(sum(range(1, 22)) + 19 * 11)
    row = rows_by_spec(path, tmp_path / "r.csv", ["full"], *options)["full"]
    assert number(row, "resident") == pytest.approx(sum(range(22, 41)) / 19)


def test_who_touches_what(traces, tmp_path):
    """Policies that take in the whole row touch every resident; first:L only entries whose lookahead is open; static
    ones and oracles none."""
    path, trace = traces["dense16"]
    specs = ["h2o", "ema", "tova", "lru", "mix(evidence=attn,memory=mean,hold=2)", "rmm(lag=3)", "rmm(lag=0)",
             "mix(evidence=attn,memory=first:5,hold=6)", "streaming", "random", "oracle(mass)"]
    specs += ["h2o(unit=model)", "h2o(share=model)", "ada(h2o)"]
    run("sim", path, "-o", tmp_path / "r.csv", *(x for s in specs for x in ("-p", s)), "-b", "9")
    for row in Results(tmp_path / "r.csv").rows:
        updates, policy = number(row, "score_updates"), row["policy"]
        if policy in ("streaming", "random", "oracle"):
            assert updates == 0, row
        elif policy == "rmm" or "first" in row["spec"]:
            lag = int(row["lag"])
            assert updates == pytest.approx(sum(min(t, lag) + 1 for t in range(40)) / 40), row
        else:
            assert updates == number(row, "resident") > 8, row


@pytest.mark.parametrize("unit", ["head", "model"])
def test_a_cutoff_ends_the_updates(traces, tmp_path, unit):
    """Behind the cut-off an entry's score is frozen. With hold=8 the last six entries are always there."""
    path, _ = traces["dense16"]
    run("sim", path, "-o", tmp_path / "r.csv", "-p", f"lag(5,h2o(hold=8,unit={unit}))", "-b", "9")
    row, = Results(tmp_path / "r.csv").rows
    assert number(row, "score_updates") == pytest.approx(sum(min(t, 5) + 1 for t in range(40)) / 40)


def test_the_prompt_has_no_updates_either(traces, tmp_path):
    path, trace = traces["dense16"]
    options = ["-b", "10", "--prompt", "21"]
    rows = rows_by_spec(path, tmp_path / "r.csv", ["h2o(hold=2)", "tova", "rmm(lag=3)"], *options)
    assert number(rows["h2o(hold=2)"], "score_updates") == number(rows["tova"], "score_updates") == 11
    assert number(rows["rmm"], "score_updates") == 4


def test_the_model_needs_a_device(traces, tmp_path):
    path, _ = traces["dense16"]
    assert rows_by_spec(path, tmp_path / "r.csv", ["h2o"], "-b", "9")["h2o"]["decode_us"] == ""
    done = subprocess.run([KVLAG, "help", "sim"], capture_output=True, text=True)
    assert "--device" in done.stdout and "model" in done.stdout
    for text, complaint in (("hbm=3.35", "hbm=3.35 is no bandwidth above 0"), ("weights=1GB", "hbm is missing"),
                            ("hbm=1TB/s,weights=1", "weights=1 is no size")):
        done = subprocess.run([KVLAG, "sim", path, "-o", tmp_path / "x.csv", "-b", "9", "--device", text],
                              capture_output=True, text=True)
        assert done.returncode == 2 and complaint in done.stderr, done.stderr


def test_shards_and_journals_carry_the_costs(traces, tmp_path):
    path, _ = traces["dense16"]
    ask = ["-p", "h2o", "-p", "rmm(lag=4)", "-p", "window", "-b", "8,12", *DEVICE]
    run("sim", path, "-o", tmp_path / "one.csv", *ask)
    for k in (1, 2):
        run("sim", path, "-o", tmp_path / f"{k}.csv", "--shard", f"{k}/2", "--resume", *ask)
    run("merge", "-o", tmp_path / "all.csv", tmp_path / "1.csv", tmp_path / "2.csv")
    assert Results(tmp_path / "all.csv").rows == Results(tmp_path / "one.csv").rows
    run("analyze", tmp_path / "all.csv", "-o", tmp_path / "report")
