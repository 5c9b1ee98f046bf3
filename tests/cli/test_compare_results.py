"""kvlag compare: what changed between two results files."""

import csv
import json
import math
import re
import shutil

import pytest

from simcli import ROOT, blocks_of, kvlag, refused, rows_of

TRACE = ROOT / "traces/samples/tiny-scripture.h5"
WORK = "-p", "rmm", "-p", "h2o", "-p", "ema", "-p", "window", "-p", "streaming", "-b", "10%,25%", "-L", "0:16:x2"


def sim(out, *args, trace=TRACE):
    done = kvlag("sim", trace, "-o", out, *args)
    assert done.returncode == 0, done.stderr
    return out


def compare(*args):
    done = kvlag("compare", *args)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """a.csv; all.csv where every row's evidence and estimate are a tenth less; some.csv where only H2O's are more."""
    folder = tmp_path_factory.mktemp("compare")
    sim(folder / "a.csv", *WORK)
    scale(folder / "a.csv", folder / "all.csv", lambda row: 0.9)
    scale(folder / "a.csv", folder / "some.csv", lambda row: 1.3 if row["policy"] == "h2o" else 1)
    sim(folder / "other.csv", "-p", "h2o", "-b", "25%", trace=ROOT / "traces/samples/tiny-recall.h5")
    return folder


def scale(path, out, factor):
    """Copy results with all losses times factor(row), blocks too."""
    import h5py
    import hdf5plugin  # noqa: F401

    rows, head = rows_of(path), [x for x in path.read_text().splitlines(keepends=True) if x.startswith("#")]
    columns = ["lost_mass", "dloss_first", "fisher", "dloss_est", "dloss_lo", "dloss_hi", "kl_est", "kl_lo", "kl_hi"]
    factors = [factor(row) for row in rows]
    for row, f in zip(rows, factors):
        row.update({c: f"{float(row[c]) * f:.9g}" for c in columns})
    with open(out, "w", newline="") as f:
        f.writelines(head)
        w = csv.DictWriter(f, rows[0].keys(), lineterminator="\n")
        w.writeheader()
        w.writerows(rows)
    shutil.copy(blocks_of(path), blocks_of(out))
    with h5py.File(blocks_of(out), "r+") as h5:
        for name in "lost_mass", "first", "fisher":
            data = h5[name][:]
            for i, f in enumerate(factors):
                data[i] *= f
            h5[name][:] = data


def test_equal_files_say_so(folder):
    said = compare(folder / "a.csv", folder / "a.csv")
    assert said.splitlines()[-1].endswith(f"hold the same {len(rows_of(folder / 'a.csv'))} configurations with the same values.")
    told = json.loads(compare(folder / "a.csv", folder / "a.csv", "--json"))
    assert told["same"] and told["better"] == told["worse"] == 0 and not told["only_in_a"] + told["only_in_b"]
    assert {c["dloss_est"]["p"] for c in told["configurations"]} == {1}


def test_what_changed_is_found_and_nothing_else(folder):
    told = json.loads(compare(folder / "a.csv", folder / "some.csv", "--json"))
    changed = {c["name"] for c in told["configurations"] if c["significant"]}
    assert changed == {"h2o"} and (told["better"], told["worse"]) == (0, 2)
    assert not told["same"]
    for c in told["configurations"]:
        d = c["kl_est"]
        assert d["change"] == pytest.approx(d["b"] - d["a"]) and d["lo"] <= d["change"] <= d["hi"]
        assert d["change"] == pytest.approx(0.3 * d["a"] if c["name"] == "h2o" else 0, abs=1e-9)
    said = compare(folder / "a.csv", folder / "some.csv")
    assert re.search(r"^2 of 20 configurations changed significantly in dloss_est \(paired; Benjamini and Hochberg, "
                     r"10 % false\): 0 better, 2 worse; 18 did not change at all\.$", said, re.M)  # fmt: skip
    rows = [line for line in said.splitlines() if re.search(r" (10|25)% ", line)]
    assert [r.split()[0] for r in rows[:2]] == ["h2o", "h2o"] and all(r.endswith(" *") for r in rows[:2])


def test_direction(folder):
    one = json.loads(compare(folder / "a.csv", folder / "all.csv", "--json"))
    two = json.loads(compare(folder / "all.csv", folder / "a.csv", "--json"))
    assert one["better"] == two["worse"] > 0 and one["worse"] == two["better"]
    for c, d in zip(one["configurations"], two["configurations"]):
        assert c["dloss_est"]["change"] == pytest.approx(-d["dloss_est"]["change"])
        assert c["dloss_est"]["p"] == d["dloss_est"]["p"]


def test_order_of_rows_does_not_matter(folder, tmp_path):
    sim(tmp_path / "a.csv", "-p", "window", "-p", "ema", "-p", "streaming", "-p", "h2o", "-p", "rmm", "-b", "25%,10%", "-L", "0:16:x2")
    assert json.loads(compare(folder / "a.csv", tmp_path / "a.csv", "--json"))["same"]


def test_what_is_in_one_only(folder, tmp_path):
    sim(tmp_path / "b.csv", "-p", "h2o", "-p", "rmm(sinks=4)", "-b", "25%", "-L", "4")
    said = compare(folder / "a.csv", tmp_path / "b.csv")
    assert f"Only in {tmp_path}/b.csv: 1\n  rmm(sinks=4), budget 25%, lag 4\n" in said
    assert f"Only in {folder}/a.csv: 19\n" in said and "0 of 1 configurations changed" in said
    sim(tmp_path / "c.csv", "-p", "lru", "-b", "25%")
    done = kvlag("compare", folder / "a.csv", tmp_path / "c.csv")
    assert done.returncode == 1 and b"have no configuration in common" in done.stderr


def test_other_traces_are_refused_by_name(folder, tmp_path):
    refused(folder, 1, ["cannot be paired", "trace tiny-scripture, sequence 0", "tiny-recall", "--unpaired"], "compare", "a.csv", "other.csv")
    said = compare(folder / "a.csv", folder / "other.csv", "--unpaired")
    assert "(unpaired; " in said
    text = (folder / "a.csv").read_text()
    changed = re.sub(r"(# trace: tiny-scripture )[0-9a-f]{4}", r"\g<1>0000", text)
    (tmp_path / "b.csv").write_text(changed)
    shutil.copy(blocks_of(folder / "a.csv"), tmp_path / "b.blocks.h5")
    done = kvlag("compare", folder / "a.csv", tmp_path / "b.csv")
    assert done.returncode == 1 and b"trace tiny-scripture is " in done.stderr and b"0000" in done.stderr


def test_unpaired_is_less_sure(folder):
    paired = json.loads(compare(folder / "a.csv", folder / "all.csv", "--json"))
    not_paired = json.loads(compare(folder / "a.csv", folder / "all.csv", "--json", "--unpaired"))
    assert paired["better"] > not_paired["better"] == 0
    for c, d in zip(paired["configurations"], not_paired["configurations"]):
        assert d["kl_est"]["hi"] - d["kl_est"]["lo"] > 2 * (c["kl_est"]["hi"] - c["kl_est"]["lo"])


def test_without_blocks_changes_are_listed(folder, tmp_path):
    shutil.copy(folder / "some.csv", tmp_path / "b.csv")
    done = kvlag("compare", folder / "a.csv", tmp_path / "b.csv")
    assert done.returncode == 0 and b"there is no b.blocks.h5 beside it" in done.stderr
    said = done.stdout.decode()
    assert "whether dloss_est changed more than by chance is not known" in said and " *" not in said
    told = json.loads(compare(folder / "a.csv", tmp_path / "b.csv", "--json"))
    assert told["tested"] == 0 and all(c["dloss_est"]["p"] is None for c in told["configurations"])


def test_table_of_all(folder, tmp_path):
    compare(folder / "a.csv", folder / "some.csv", "-o", tmp_path / "c.csv")
    rows = rows_of(tmp_path / "c.csv")
    told = json.loads(compare(folder / "a.csv", folder / "some.csv", "--json"))
    assert len(rows) == len(told["configurations"]) == 20
    for row, c in zip(rows, told["configurations"]):
        assert row["spec"] == c["spec"] and int(row["significant"]) == c["significant"]
        assert float(row["dloss_est_change_lo"]) == pytest.approx(c["dloss_est"]["lo"])
    refused(tmp_path, 2, ["c.csv", "--force"], "compare", folder / "a.csv", folder / "some.csv", "-o", "c.csv")
    done = kvlag("compare", folder / "a.csv", folder / "some.csv", "-o", folder / "a.csv", "--force")
    assert done.returncode == 2 and rows_of(folder / "a.csv")


def test_wrong_calls(folder):
    for args in (), ("a.csv",), ("a.csv", "all.csv", "some.csv"):
        refused(folder, 2, "two results files", "compare", *args)
    refused(folder, 1, "none.csv", "compare", "a.csv", "none.csv")


def calibrated(folder, out, scale):
    families = {name: {"n": 2, "log_c": math.log(scale)} for name in ("window", "static", "attention", "oracle")}
    told = {"format": "kvlag-calibration", "version": 1, "model": "tiny", "n_tokens": 300, "budgets": "40", "n": 9,
            "log_c": math.log(scale), "s": 0.3, "families": families}  # fmt: skip
    (folder / "c.json").write_text(json.dumps(told))
    return sim(folder / out, *WORK, "--calibration", folder / "c.json")


def test_two_calibrations(tmp_path):
    """Every KL grows by a fifth, in every resample: all are worse, and what is free of calibration did not move."""
    calibrated(tmp_path, "a.csv", 1.0)
    calibrated(tmp_path, "b.csv", 1.2)
    told = json.loads(compare(tmp_path / "a.csv", tmp_path / "b.csv", "--json"))
    assert (told["better"], told["worse"], told["unchanged"], told["in_both"]) == (0, 20, 0, 20)
    for c in told["configurations"]:
        assert c["kl_est"]["b"] / c["kl_est"]["a"] == pytest.approx(1.2, rel=1e-6) and c["kl_est"]["lo"] > 0
        assert (c["lost_mass"]["change"], c["lost_mass"]["p"]) == (0, 1)


def test_one_side_is_uncalibrated(folder, tmp_path):
    said = compare(calibrated(tmp_path, "a.csv", 1.0), folder / "a.csv")
    assert said.splitlines()[-1].startswith("One of them is uncalibrated")
    assert "One of them" not in compare(tmp_path / "a.csv", tmp_path / "a.csv")


def test_seeds_are_configurations_of_their_own(tmp_path):
    for seed in 1, 2:
        sim(tmp_path / f"{seed}.csv", "-p", "random", "-p", "h2o", "-b", "25%", "--seed", seed)
    told = json.loads(compare(tmp_path / "1.csv", tmp_path / "2.csv", "--json"))
    assert [c["spec"] for c in told["configurations"]] == ["h2o"] and (told["in_both"], told["unchanged"]) == (1, 1)
    assert [[c["spec"] for c in told[side]] for side in ("only_in_a", "only_in_b")] == [["random(seed=1)"], ["random(seed=2)"]]
    assert not told["same"]


def test_metrics_in_common(folder, tmp_path):
    """Also: what is equal in the tested metric is not tested, though the files differ in another."""
    for metric in "lost_mass", "out_err":
        sim(tmp_path / f"{metric}.csv", "-p", "h2o", "-b", "25%", "--metrics", metric)
    text = (tmp_path / "out_err.csv").read_text()
    (tmp_path / "none.csv").write_text(re.sub(r"\blost_mass,out_err\b", "x,y", text))
    done = kvlag("compare", tmp_path / "lost_mass.csv", tmp_path / "none.csv", "-q")
    assert done.returncode == 1 and b"none.csv have none of dloss_est" in done.stderr and not done.stdout
    said = compare(tmp_path / "lost_mass.csv", tmp_path / "out_err.csv")
    assert "0 of 1 configurations changed significantly in lost_mass" in said
    assert "One of them" not in compare(folder / "a.csv", tmp_path / "lost_mass.csv")
    told = json.loads(compare(tmp_path / "lost_mass.csv", tmp_path / "out_err.csv", "--json"))
    assert (told["tested"], told["unchanged"], told["same"]) == (0, 0, False)
    told = json.loads(compare(folder / "a.csv", tmp_path / "lost_mass.csv", "--json"))
    assert told["metric"] == "lost_mass" and [c["lost_mass"]["change"] for c in told["configurations"]] == [0]
    assert "kl_est" not in told["configurations"][0]


def test_table_says_what_json_says(folder):
    told = json.loads(compare(folder / "a.csv", folder / "some.csv", "--json"))
    lines = compare(folder / "a.csv", folder / "some.csv").splitlines()
    shown = {tuple(w[:2]): w for w in map(str.split, lines) if len(w) > 5 and w[1] in ("10%", "25%")}
    plain = [c for c in told["configurations"] if c["lag"] is None]
    assert len(plain) == 8
    for c in plain:
        _, _, _, a, b, change, interval, p, *star = shown[c["name"], c["budget_asked"]]
        d = c["dloss_est"]
        assert [float(x) for x in (a, b)] == pytest.approx([d["a"], d["b"]], rel=1e-3)
        assert float(change) == pytest.approx(d["change"], rel=1e-2) and float(p) == pytest.approx(d["p"], rel=0.1)
        assert [float(x) for x in interval.split("..")] == pytest.approx([d["lo"], d["hi"]], rel=1e-2)
        assert bool(star) == c["significant"]
