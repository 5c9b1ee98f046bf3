"""kvlag advise: sim and analyze in one step, held against the two steps by hand."""

import json
import shutil

import pytest

from simcli import ROOT, kvlag, rows_of, snapshot

TRACE = ROOT / "traces/samples/tiny-recall.h5"
SCRIPTURE = ROOT / "traces/samples/tiny-scripture.h5"
pytestmark = pytest.mark.skipif(not shutil.which("gnuplot"), reason="no gnuplot")


def run(*args, code=0):
    done = kvlag(*args)
    assert done.returncode == code, done.stderr.decode()
    return done


def test_one_step_is_the_two(tmp_path):
    said = run("advise", TRACE, "-o", tmp_path / "a", "-b", "25%,50%", "-L", "0,8,32", "-p", "rmm", "-p", "h2o").stdout.decode()
    run("sim", TRACE, "-o", tmp_path / "r.csv", "-b", "25%,50%", "-L", "0,8,32", "--pending", "both", "-p", "rmm", "-p", "h2o")
    assert (tmp_path / "a/results.csv").read_bytes() == (tmp_path / "r.csv").read_bytes()
    alone = run("analyze", tmp_path / "r.csv", "-o", tmp_path / "b", "--format", "svg").stdout.decode()
    assert said.split("\n\n")[0] == alone.split("\n\n")[0] and "at a budget of" in said
    for name in "report.html", "report.md", "summary.json", "lifetimes.h5", "budget_kl_est.svg", "text.svg":
        assert (tmp_path / "a" / name).stat().st_size > 300, name


def test_the_default_set(tmp_path):
    run("advise", SCRIPTURE, "-o", tmp_path / "a", "-q")
    rows = rows_of(tmp_path / "a/results.csv")
    assert {r["budget_asked"] for r in rows} == {"", "10%", "25%", "50%"}
    assert {"window", "streaming", "h2o", "ema", "tova", "lru", "rmm", "oracle"} <= {r["policy"] for r in rows}
    assert {r["pending"] for r in rows} == {"charged", "free"}


def test_max_loss_takes_the_smallest_budget_that_keeps_it(tmp_path):
    said = run("advise", TRACE, "-o", tmp_path / "a", "--max-loss", "0.05", "-p", "h2o", "-p", "streaming", "--json").stdout
    found = json.loads(said)
    assert found == json.loads((tmp_path / "a/summary.json").read_text())
    assert len({r["budget_asked"] for r in rows_of(tmp_path / "a/results.csv")} - {""}) == 7
    keeps = [b for b in found["budgets"] if any(r["config"]["dloss_est"]["hi"] <= 0.05 for r in b["ranking"])]
    assert found["recommendation"]["budget_asked"] == keeps[0]["budget_asked"]
    assert found["recommendation"]["use"]["dloss_est"]["hi"] <= 0.05


def test_two_traces_do_without_the_text(tmp_path):
    run("advise", TRACE, SCRIPTURE, "-o", tmp_path / "a", "-p", "h2o", "-p", "ema", "-b", "25%")
    assert len({r["trace"] for r in rows_of(tmp_path / "a/results.csv")}) == 2
    assert not (tmp_path / "a/lifetimes.h5").exists() and (tmp_path / "a/report.html").exists()


def test_refusals_come_before_the_work(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "summary.json").write_text("mine")
    before = snapshot(folder)
    p = run("advise", TRACE, "-o", folder, code=2)
    assert "summary.json: already there (use --force" in p.stderr.decode() and snapshot(folder) == before
    for args, words in (((), "no TRACE"), ((TRACE,), "-o DIR"), ((TRACE, "-o", folder, "--max-los", "1"), "max-loss")):
        assert words in run("advise", *args, code=2).stderr.decode()
    assert "did you mean" in run("advise", TRACE, "-o", tmp_path / "b", "-p", "h3o", code=2).stderr.decode()
