"""kvlag analyze: pictures, their data and scripts, the table, and what happens when something is missing."""

import csv
import math
import os
import random
import re
import shutil
import struct
import subprocess
import xml.etree.ElementTree as ElementTree

import pytest

KVLAG = os.path.abspath(os.environ.get("KVLAG", "./kvlag"))
COLUMNS = ("trace,seq,policy,spec,resolved,budget_asked,budget,lag,hold,sinks,unit,schedule,pending,n_counted,lost_mass,"
           "out_err,dloss_first,fisher,dloss_est,dloss_lo,dloss_hi,kl_est,kl_lo,kl_hi,retained,footprint,peak,evictions,"
           "evict_batches").split(",")
KEY = ["trace", "seq", "policy", "spec", "budget_asked", "budget", "lag", "unit", "schedule", "pending", "n_prompt"]
TRUTH_COLUMNS = KEY + ["mode", "true_dloss", "true_kl", "kl_p99", "top1_flips", "kept_overlap"]
needs_gnuplot = pytest.mark.skipif(not shutil.which("gnuplot"), reason="no gnuplot")


def row(policy, asked, out_err, spec=None, lag="", pending="", **more):
    r = dict.fromkeys(COLUMNS, "")
    budget = 1000 * int(asked[:-1]) // 100 if asked.endswith("%") else int(asked)
    r.update(trace="licence", seq=0, policy=policy, spec=spec or policy, budget_asked=asked, budget=budget, lag=lag,
             pending=pending, unit="head", schedule="step", out_err=out_err, lost_mass=out_err and out_err / 4)
    r.update(more)
    return r


def sweep(**more):
    """Made-up numbers of a plausible shape: a full default set of policies at three budgets."""
    base = {"window": 1.3, "streaming": .6, "random": 1.7, "lru": .5, "ema": .34, "h2o": .39, "tova": .32}
    yield row("full", "1000", 0.0, **more)
    for asked, scale in ("10%", 1), ("25%", .5), ("50%", .2):
        for policy, value in base.items():
            yield row(policy, asked, value * scale, **more)
        yield row("oracle", asked, .11 * scale ** 1.5, "oracle(mass)", **more)
        for lag in 0, 1, 2, 4, 8, 16, 32, 64:
            for pending, cost in ("charged", lag / 300), ("free", 0):
                yield row("rmm", asked, scale * (.3 + .7 * math.exp(-lag / 9) + cost), lag=lag, pending=pending, **more)
                yield row("oracle", asked, scale ** 1.5 * (.11 + cost), "oracle(mass,hold=lag)", lag, pending, **more)


def write_csv(path, rows, columns=COLUMNS):
    with open(path, "w", newline="") as f:
        f.write("# kvlag results v1\n# kvlag sim licence.h5\n")
        w = csv.DictWriter(f, columns, lineterminator="\n", extrasaction="ignore")
        w.writeheader()
        w.writerows(rows)
    return str(path)


def estimated(text, seed):
    """A sweep with estimates, and the truths beside it: log-normal around the estimate, a factor of 1.3."""
    draw = random.Random(seed)
    rows, truths = [], []
    scale = {"window": .9, "streaming": 1.2, "random": 1.2, "oracle": 1.2}
    for r in sweep(trace=text, n_prompt=0):
        fisher = r["lost_mass"] ** 1.5
        kl, factor, first = fisher * scale.get(r["policy"], 1.8), 1.55, draw.gauss(0, .1 * fisher)
        r.update(fisher=fisher, dloss_first=first, kl_est=kl, kl_lo=kl / factor, kl_hi=kl * factor,
                 dloss_est=first + kl, dloss_lo=first + kl / 1.6, dloss_hi=first + kl * 1.6)
        truth = kl * math.exp(draw.gauss(0, math.log(1.3)))
        truths.append(dict(r, mode="open", true_kl=truth, true_dloss=truth + draw.gauss(0, .002)))
        rows.append(r)
    return rows, truths


def write_truth(path, truths, columns=TRUTH_COLUMNS):
    write_csv(path, truths, columns)
    path.write_text(path.read_text().replace("# kvlag results v1", "# kvlag truth v1"))
    return str(path)


def write_estimated(folder, texts=("licence", "code")):
    rows, truths = [], []
    for n, text in enumerate(texts):
        more = estimated(text, n)
        rows += more[0]
        truths += more[1]
    columns = COLUMNS[:-1] + ["n_prompt", COLUMNS[-1]]
    return write_csv(folder / "r.csv", rows, columns), write_truth(folder / "truth.csv", truths), rows, truths


def analyze(*args, env=None, code=0, cwd=None):
    p = subprocess.run([KVLAG, "analyze", *map(str, args), "--report", "no"], capture_output=True, text=True, cwd=cwd,
                       env={**os.environ, **(env or {})}, timeout=120)
    assert p.returncode == code, p.stderr
    return p


def blocks(path):
    """The blocks of a data file: (comment, columns, rows)."""
    for block in open(path).read().split("\n\n\n"):
        lines = block.strip().split("\n")
        yield lines[0][2:], lines[1].split(), [line.split() for line in lines[2:]]


def png_size(path):
    head = open(path, "rb").read(24)
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def fake_gnuplot(folder, script):
    folder.mkdir()
    path = folder / "gnuplot"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@needs_gnuplot
def test_figures_and_list(tmp_path):
    results = write_csv(tmp_path / "r.csv", sweep())
    p = analyze(results, "-o", tmp_path / "new" / "out", "--format", "png,svg,pdf", "--figures",
                "lag,budget,retention")
    names = {f"{stem}_{metric}" for stem in ("lag_rmm", "budget") for metric in ("out_err", "lost_mass")}
    files = {f"{n}.{e}" for n in names for e in ("dat", "gp", "png", "svg", "pdf")}
    out = tmp_path / "new" / "out"
    assert set(os.listdir(out)) == files
    assert {os.path.basename(line) for line in p.stdout.split("\n\n")[-1].split()} == files
    for n in names:
        assert png_size(out / f"{n}.png")[0] == 1600
        ElementTree.parse(out / f"{n}.svg")
        assert open(out / f"{n}.pdf", "rb").read(5) == b"%PDF-"
    assert "retention: needs --lifetimes" in p.stderr


@needs_gnuplot
def test_script_draws_again(tmp_path):
    analyze(write_csv(tmp_path / "r.csv", sweep()), "-o", tmp_path, "--figures", "lag")
    before = (tmp_path / "lag_rmm_out_err.png").read_bytes()
    (tmp_path / "lag_rmm_out_err.png").unlink()
    subprocess.run(["gnuplot", "-d", "lag_rmm_out_err.gp"], cwd=tmp_path, check=True)
    assert (tmp_path / "lag_rmm_out_err.png").read_bytes() == before


def test_lag_data(tmp_path):
    rows = [row("h2o", "64", 3.0), row("tova", "64", 2.0), row("oracle", "64", .5, "oracle(mass)"),
            row("oracle", "64", .4, "oracle(loss)"), row("full", "1000", 0.0),
            row("oracle", "64", .7, "oracle(mass,hold=lag)", 4, "charged"),
            *(row("rmm", "64", v, lag=lag, pending="charged") for lag, v in ((4, 2.5), (0, 4.0), (1, 3.5)))]
    analyze(write_csv(tmp_path / "r.csv", rows), "-o", tmp_path, "--figures", "lag")
    data = {comment: (columns, lines) for comment, columns, lines in blocks(tmp_path / "lag_rmm_out_err.dat")}
    assert data["rmm, budget 64, pending charged"] == (
        ["lag", "position", "out_err", "lo", "hi", "mark", "spec"],
        [[*point, "nan", "nan", "-", '"rmm"'] for point in (("0", "0", "4"), ("1", "1", "3.5"), ("4", "3", "2.5"))])
    assert [line[:3] for line in data["fair bound, budget 64, pending charged"][1]] == [["4", "3", "0.7"]]
    assert {line[2] for line in data["best filter, budget 64, pending charged"][1]} == {"2"}
    assert {line[2] for line in data["hindsight, budget 64, pending charged"][1]} == {"0.4"}


def test_budget_data_takes_best_charged_lag(tmp_path):
    rows = [row("h2o", asked, v) for asked, v in (("10%", 3.0), ("50%", 1.0))]
    rows += [row("rmm", "10%", v, lag=lag, pending=pending)
             for lag, pending, v in ((0, "charged", 4.0), (8, "charged", 2.0), (64, "charged", 2.5), (64, "free", 1.0))]
    analyze(write_csv(tmp_path / "r.csv", rows), "-o", tmp_path, "--figures", "budget")
    data = {comment: (columns, lines) for comment, columns, lines in blocks(tmp_path / "budget_out_err.dat")}
    none = ["nan", "nan"]
    assert data["h2o"] == (["percent", "budget", "lag", "out_err", "lo", "hi"],
                           [["10", "100", "-", "3", *none], ["50", "500", "-", "1", *none]])
    assert data["rmm"][1] == [["10", "100", "8", "2", *none]]


def test_loss_columns_come_first(tmp_path):
    p = analyze(write_csv(tmp_path / "r.csv", sweep(dloss_est=.5, kl_est=.25)), "-o", tmp_path, "--figures", "budget")
    assert p.stdout.split("\n")[0].split() == ["policy", "budget", "lag", "pending", "dloss_est", "kl_est"]
    assert (tmp_path / "budget_kl_est.dat").exists() and not (tmp_path / "budget_out_err.dat").exists()


def test_table_is_sorted_and_short(tmp_path):
    p = analyze(write_csv(tmp_path / "r.csv", sweep()), "-o", tmp_path, "--figures", "budget")
    lines = p.stdout.split("\n\n")[0].split("\n")[1:]
    assert len(lines) <= 33
    for asked in "10%", "25%", "50%":
        values = [float(line.split()[-2]) for line in lines if f" {asked} " in line and "more" not in line]
        assert values == sorted(values) and len(values) > 3
    assert not any(line.startswith("full") for line in lines)
    assert sum(line.startswith("rmm ") and " 10% " in line and "charged" in line for line in lines) <= 1


def test_mean_over_sequences(tmp_path):
    rows = [row("h2o", "64", v, seq=s) for s, v in ((0, 1.0), (1, 2.0))] + [row("lru", "64", 9.0)]
    p = analyze(write_csv(tmp_path / "r.csv", rows), "-o", tmp_path, "--figures", "budget")
    assert "1 configurations are not there for all 2 sequences" in p.stderr
    assert [c for c, _, _ in blocks(tmp_path / "budget_out_err.dat")] == ["h2o"]
    assert "1.5" in p.stdout
    assert "mean of 2 sequences" in (tmp_path / "budget_out_err.gp").read_text()


def test_never_overwrites(tmp_path):
    results = write_csv(tmp_path / "r.csv", sweep())
    (tmp_path / "budget_lost_mass.gp").write_text("mine")
    p = analyze(results, "-o", tmp_path, "--figures", "lag,budget", code=2)
    assert "budget_lost_mass.gp: already there (use --force" in p.stderr
    assert sorted(os.listdir(tmp_path)) == ["budget_lost_mass.gp", "r.csv"]
    analyze(results, "-o", tmp_path, "--figures", "lag,budget", "--force")
    assert "gnuplot" in (tmp_path / "budget_lost_mass.gp").read_text()


def test_no_gnuplot(tmp_path):
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out"
    p = analyze(write_csv(tmp_path / "r.csv", sweep()), "-o", out, "--figures", "budget", code=1,
                env={"PATH": str(tmp_path / "empty")})
    assert f"gnuplot not found (data written to {out}/budget_out_err.dat)" in p.stderr
    assert sorted(os.listdir(out)) == [f"budget_{m}.{e}" for m in ("lost_mass", "out_err") for e in ("dat", "gp")]


@pytest.mark.parametrize("script, message", [
    ("exec <&-; exit 3\n", "gnuplot failed"),  # closes the pipe at once
    ("cat >/dev/null; echo 'line 1: bad thing' >&2; exit 1\n", "gnuplot failed: line 1: bad thing"),
    ("cat >/dev/null\n", "gnuplot left no picture"),
    ("kill -9 $$\n", "gnuplot was ended by signal 9"),
])
def test_gnuplot_fails(tmp_path, script, message):
    out = tmp_path / "out"
    p = analyze(write_csv(tmp_path / "r.csv", sweep()), "-o", out, "--figures", "budget", code=1,
                env=fake_gnuplot(tmp_path / "bin", script))
    assert message in p.stderr
    assert sorted(os.listdir(out)) == [f"budget_{m}.{e}" for m in ("lost_mass", "out_err") for e in ("dat", "gp")]


def test_child_has_points_as_decimals(tmp_path):
    env = fake_gnuplot(tmp_path / "bin", f'cat >/dev/null; echo "$LC_ALL $*" >{tmp_path}/seen; exit 1\n')
    analyze(write_csv(tmp_path / "r.csv", sweep()), "-o", tmp_path / "o", "--figures", "budget", code=1,
            env={**env, "LC_ALL": "de_DE.UTF-8", "LANG": "de_DE.UTF-8"})
    assert (tmp_path / "seen").read_text() == "C -d\n"
    assert re.search(r"^10 100 - 1\.3 nan nan$", (tmp_path / "o" / "budget_out_err.dat").read_text(), re.M)


@needs_gnuplot
@pytest.mark.parametrize("folder", ["with space", "it's \"quoted\" {x", "<cat", "|cat", "~", "$x`date`"])
def test_odd_folders(tmp_path, folder):
    write_csv(tmp_path / "r.csv", sweep())
    analyze("r.csv", "-o", folder, "--figures", "budget", cwd=tmp_path)
    assert png_size(tmp_path / folder / "budget_out_err.png")[0] == 1600


@needs_gnuplot
def test_odd_names(tmp_path):
    rows = [row("h2o", asked, 1.0, "h2o_recent{x^2}", trace="it's {x <b>&") for asked in ("10%", "50%")]
    analyze(write_csv(tmp_path / "r.csv", rows), "-o", tmp_path, "--figures", "budget", "--format", "svg")
    said = " ".join(ElementTree.parse(tmp_path / "budget_out_err.svg").getroot().itertext())
    assert "h2o_recent{x^2}" in said and "it's {x <b>&" in said


@needs_gnuplot
def test_term_goes_to_stdout(tmp_path):
    p = analyze(write_csv(tmp_path / "r.csv", sweep()), "-o", tmp_path, "--figures", "budget", "--format", "term",
                env={"COLUMNS": "100"})
    assert "budget (% of the sequence)" in p.stdout and "random" in p.stdout
    picture = [line for line in p.stdout.split("\n") if not line.startswith(str(tmp_path))]
    assert 79 < max(map(len, picture)) <= 100
    assert sorted(os.listdir(tmp_path)) == ["budget_lost_mass.dat", "budget_lost_mass.gp", "budget_out_err.dat",
                                            "budget_out_err.gp", "r.csv"]


def test_empty_series_is_named(tmp_path):
    rows = [row("h2o", "64", 1.0), row("lru", "64", ""), row("rmm", "64", 2.0, lag=4, pending="charged")]
    p = analyze(write_csv(tmp_path / "r.csv", rows), "-o", tmp_path, "--figures", "lag,budget")
    assert "budget_out_err: lru has no values, curve skipped" in p.stderr
    assert "lag: rmm has one lag only, figure skipped" in p.stderr


def test_zero_on_logarithmic_axis_is_said(tmp_path):
    rows = [row("h2o", "64", 1.0), row("lru", "64", 20.0), row("ema", "64", 0.0)]
    p = analyze(write_csv(tmp_path / "r.csv", rows), "-o", tmp_path, "--figures", "budget")
    assert "budget_out_err: 1 values are 0" in p.stderr


@pytest.mark.parametrize("args, message", [
    ([], "no folder"),
    (["-o", "x", "--figures", "budgets"], "(did you mean budget?)"),
    (["-o", "x", "--figures", "lag,lag"], "'lag' is given twice"),
    (["-o", "x", "--format", "gif"], "'gif' is not one of png,svg,pdf,term"),
    (["-o", "r.csv"], "is not a folder"),
])
def test_usage(tmp_path, args, message):
    write_csv(tmp_path / "r.csv", sweep())
    p = analyze("r.csv", *args, code=2, cwd=tmp_path)
    assert message in p.stderr
    assert os.listdir(tmp_path) == ["r.csv"]


def test_no_files():
    assert "no results file" in analyze("-o", "x", code=2).stderr


def test_columns_missing_or_empty(tmp_path):
    p = analyze(write_csv(tmp_path / "a.csv", sweep(), [c for c in COLUMNS if c != "pending"]), "-o", tmp_path, code=1)
    assert "a.csv:3: no column 'pending'" in p.stderr
    p = analyze(write_csv(tmp_path / "b.csv", [row("h2o", "64", "")]), "-o", tmp_path, code=1)
    assert "none of the columns dloss_est, kl_est, out_err and lost_mass holds a value" in p.stderr
    p = analyze(write_csv(tmp_path / "c.csv", [row("full", "1000", 0.0)]), "-o", tmp_path, code=1)
    assert "no configuration to compare" in p.stderr


def test_two_files(tmp_path):
    a = write_csv(tmp_path / "a.csv", [row("full", "1000", 0.0), row("h2o", "64", 1.0)])
    b = write_csv(tmp_path / "b.csv", [row("full", "1000", 0.0), row("lru", "64", 2.0)])
    analyze(a, b, "-o", tmp_path / "o", "--figures", "budget")
    assert [c for c, _, _ in blocks(tmp_path / "o" / "budget_out_err.dat")] == ["h2o", "lru"]
    p = analyze(a, a, "-o", tmp_path / "p", code=1)
    assert "a.csv:5: the same configuration as" in p.stderr


def write_lifetimes(path, configs):
    """configs: (policy, budget_asked, evict_at [n_layer, n_kv_head, T])."""
    h5py = pytest.importorskip("h5py")
    numpy = pytest.importorskip("numpy")
    with h5py.File(path, "w") as f:
        f.attrs["format"] = "kvlag-lifetimes"
        f.attrs["version"] = 1
        f.attrs["complete"] = 1
        for n, (policy, asked, evict_at) in enumerate(configs):
            c = f.create_group(f"config/{n:04d}")
            for name in "policy", "spec", "budget_asked", "lag", "unit", "schedule", "pending", "resolved":
                c.attrs[name] = {"policy": policy, "spec": policy, "budget_asked": asked}.get(name, "")
            s = c.create_group("seq/0000")
            for name in "budget", "hold", "sinks":
                s.attrs[name] = ""
            s["evict_at"] = numpy.array(evict_at, "i4")
    return str(path)


def test_retention_shares(tmp_path):
    results = write_csv(tmp_path / "r.csv", [row("h2o", "64", 1.0)])
    # Entry 1 is seen by steps 1 and 2 in the first head, by step 1 alone in the second; entry 0 and 3 stay.
    life = write_lifetimes(tmp_path / "l.h5", [("full", "", [[[5, 5, 5, 5], [5, 5, 5, 5]]]),
                                               ("h2o", "64", [[[5, 3, 3, 5], [5, 2, 5, 5]]])])
    analyze(results, "-o", tmp_path, "--figures", "retention", "--lifetimes", life)
    (comment, _, _), = blocks(tmp_path / "retention.dat")
    assert comment == "h2o"
    lines = [line.split() for line in (tmp_path / "retention.dat").read_text().strip().split("\n")[2:]]
    assert lines == [["1", "nan", "nan", "nan"], ["1", "1", "nan", "nan"], ["1", "0.5", "1", "nan"],
                     ["1", "0", "0.5", "1"]]


def test_retention_is_downsampled(tmp_path):
    results = write_csv(tmp_path / "r.csv", [row("h2o", "64", 1.0)])
    n = 1001  # cells of 3 x 3, the last one narrower
    life = write_lifetimes(tmp_path / "l.h5", [("window", "64", [[[min(i + 2, n + 1) for i in range(n)]]])])
    analyze(results, "-o", tmp_path, "--figures", "retention", "--lifetimes", life)
    lines = [line.split() for line in (tmp_path / "retention.dat").read_text().strip().split("\n")[2:]]
    assert len(lines) == len(lines[0]) == 334
    # Each entry is seen by its own step and the next: 5 of the 6 possible pairs on the diagonal, 1 of 9 below it.
    assert lines[0][0] == "0.833" and lines[1][0] == "0.111" and lines[2][0] == "0" and lines[0][1] == "nan"
    assert lines[333][333] == "1"


@needs_gnuplot
def test_fidelity_figure(tmp_path):
    results, truth, rows, _ = write_estimated(tmp_path)
    p = analyze(truth, results, "-o", tmp_path / "o", "--figures", "fidelity", "--format", "png,svg,pdf")
    assert {os.path.basename(line) for line in p.stdout.split("\n\n")[-1].split()} == {
        f"fidelity.{e}" for e in ("dat", "gp", "png", "svg", "pdf")}
    assert png_size(tmp_path / "o" / "fidelity.png")[0] == 1600
    said = " ".join(ElementTree.parse(tmp_path / "o" / "fidelity.svg").getroot().itertext())
    for words in ("true KL", "estimated loss change", "window", "static", "attention", "oracle", "2 texts",
                  f"n {len(rows) - 2}"):
        assert words in said, words
    assert "uncalibrated" not in said
    data = {comment: (columns, lines) for comment, columns, lines in blocks(tmp_path / "o" / "fidelity.dat")}
    assert set(data) == {"window", "static", "attention", "oracle"}
    assert sum(len(lines) for _, lines in data.values()) == len(rows) - 2  # one full cache a text
    first = next(r for r in rows if r["policy"] == "window")
    assert data["window"][1][0][1] == f"{first['kl_est']:.10g}"


def test_fidelity_table(tmp_path):
    """Every number of the table, computed again here."""
    scipy = pytest.importorskip("scipy.stats")
    numpy = pytest.importorskip("numpy")
    results, truth, rows, truths = write_estimated(tmp_path)
    p = analyze(results, truth, "-o", tmp_path, "--figures", "fidelity", "--format", "term")
    rows, truths = ([r for r in x if r["policy"] != "full"] for x in (rows, truths))
    column = {m: numpy.array([r[m] for r in rows]) for m in
              ("lost_mass", "out_err", "dloss_first", "fisher", "kl_est", "dloss_est", "kl_lo", "kl_hi", "dloss_lo",
               "dloss_hi")}  # fmt: skip
    kl, dloss = (numpy.array([t[m] for t in truths]) for m in ("true_kl", "true_dloss"))
    large = kl >= .003
    assert f"{len(kl)} on 2 sequences, {large.sum()} of them with a true KL of 0.003 or more" in p.stdout
    lines = {line.split("  ")[0]: line.split() for line in p.stdout.split("\n")}
    for m in "lost_mass", "out_err", "dloss_first", "fisher", "kl_est", "dloss_est":
        x = column[m]
        want = [scipy.spearmanr(x, kl)[0], None, scipy.spearmanr(x, dloss)[0], scipy.pearsonr(x, dloss)[0]]
        if (x[large] > 0).all():
            want[1] = scipy.pearsonr(numpy.log(x[large]), numpy.log(kl[large]))[0]
        assert lines[m][1:] == [*("-" if w is None else f"{w:.3f}" for w in want), str(len(kl))]
    family = numpy.array([{"window": "window", "oracle": "oracle", "streaming": "static", "random": "static"}.get(
        r["policy"], "attention") for r in rows])  # fmt: skip
    squares, groups = [0, 0], 0
    for name in "all", "window", "static", "attention", "oracle":
        take = large & ((family == name) | (name == "all"))
        want = []
        for i, m in enumerate(("kl_est", "fisher")):
            ratio = numpy.log(kl[take] / column[m][take])
            want += [f"{numpy.exp(ratio.mean()):.3f}", f"{numpy.exp(ratio.std(ddof=1)):.3f}"]
            squares[i] += 0 if name == "all" else ((ratio - ratio.mean()) ** 2).sum()
        groups += name != "all"
        assert lines[name][1:] == [*want, str(take.sum())]
    within = [f"{math.exp(math.sqrt(s / (large.sum() - groups))):.3f}" for s in squares]
    assert lines["within families"][2:] == ["-", within[0], "-", within[1], str(large.sum())]
    for what, true, m, take in (("kl, true KL >= .003", kl, "kl", large), ("dloss, all", dloss, "dloss", kl > -1)):
        held = ((column[m + "_lo"] <= true) & (true <= column[m + "_hi"]) & take).sum()
        low, high = scipy.binom.cdf(held, take.sum(), .85), scipy.binom.sf(held - 1, take.sum(), .95)
        words = " ".join(lines[what])
        assert f" {held} of {take.sum()} {100 * held / take.sum():.1f}% {low:.4g} {high:.4g} " in words
        assert words.endswith("not rejected" if low >= .005 and high >= .005 else
                              "rejected: too low" if low < high else "rejected: too high")


def test_truths_of_both_modes(tmp_path):
    results, _, _, truths = write_estimated(tmp_path)
    both = write_truth(tmp_path / "both.csv", truths[1:40] + [dict(t, mode="closed") for t in truths[1:20]])
    p = analyze(results, both, "-o", tmp_path / "o", "--figures", "fidelity", code=1,
                env=fake_gnuplot(tmp_path / "bin", "exit 1\n"))
    assert sorted(os.listdir(tmp_path / "o")) == [f"fidelity_{m}.{e}" for m in ("closed", "open")
                                               for e in ("dat", "gp")]
    assert "true reruns, mode open: 39 on" in p.stdout and "true reruns, mode closed: 19 on" in p.stdout


def test_texts_without_a_configuration_in_common(tmp_path):
    """Nothing to average, yet every pair counts."""
    results, truth, rows, truths = write_estimated(tmp_path)
    rows = [r for r in rows if (r["trace"] == "code") == (r["budget_asked"] == "50%")]
    results = write_csv(tmp_path / "apart.csv", rows, COLUMNS + ["n_prompt"])
    p = analyze(results, truth, "-o", tmp_path / "o", "--format", "term")
    assert p.stdout.startswith("\nEstimates against true reruns, mode open: ") and " on 2 sequences" in p.stdout
    assert sorted(os.listdir(tmp_path / "o")) == ["fidelity.dat", "fidelity.gp"]


def test_precision_is_part_of_a_configuration(tmp_path):
    """Rows that differ in kv_bits alone are two curves; a rerun, or an older file, is of 16 bits."""
    _, truth, rows, _ = write_estimated(tmp_path)
    both = [dict(r, kv_bits=b, pending_bits=b) for b in ("16", "4") for r in rows]
    more = write_csv(tmp_path / "bits.csv", both, COLUMNS + ["kv_bits", "pending_bits", "n_prompt"])
    p = analyze(more, truth, "-o", tmp_path / "o", "--figures", "fidelity")
    assert "oracle(mass,hold=lag), kv_bits 4 " in p.stdout and "left out" not in p.stderr
    plain = analyze(write_csv(tmp_path / "plain.csv", rows, COLUMNS + ["n_prompt"]), truth, "-o", tmp_path / "p", "--figures",
                    "fidelity")
    part = lambda text: text[text.index("Estimates against true reruns"):].split("\n/")[0]  # noqa: E731
    assert part(p.stdout) == part(plain.stdout)
    only = write_csv(tmp_path / "only.csv", both[len(rows):], COLUMNS + ["kv_bits", "pending_bits", "n_prompt"])
    p = analyze(only, truth, "-o", tmp_path / "q", code=1)
    assert "have no configuration in common" in p.stderr and "kv_bits 4, pending_bits 4; trace" in p.stderr


def test_truth_without_estimates(tmp_path):
    """A trace without gradients: what there is is held against the truth, and the figure says what it lacks."""
    _, truth, rows, _ = write_estimated(tmp_path)
    bare = [c for c in COLUMNS if not c.startswith(("kl", "dloss", "fisher"))] + ["n_prompt"]
    p = analyze(write_csv(tmp_path / "bare.csv", rows, bare), truth, "-o", tmp_path / "o", "--figures", "fidelity")
    assert "fidelity: no row with a truth has a kl_est" in p.stderr
    assert "\nlost_mass" in p.stdout and "\nout_err" in p.stdout
    assert "\nkl_est" not in p.stdout and "held" not in p.stdout and "scale" not in p.stdout


def test_truth_refusals(tmp_path):
    results, truth, rows, truths = write_estimated(tmp_path)
    other = write_truth(tmp_path / "other.csv", [dict(t, trace="else") for t in truths[:9]])
    p = analyze(results, other, "-o", tmp_path / "o", code=1)
    assert (f"{results} and {other} have no configuration in common: trace licence, seq 0, window, budget 10%, no lag, "
            "unit head, schedule step, pending , prompt 0; trace else, seq 0, window,") in p.stderr
    p = analyze(truth, "-o", tmp_path / "o", code=1)
    assert "true reruns only; give the results of kvlag sim beside them" in p.stderr
    p = analyze(results, truth, truth, "-o", tmp_path / "o", code=1)
    assert "the same true rerun as" in p.stderr
    few = write_csv(tmp_path / "few.csv", rows[:30], COLUMNS + ["n_prompt"])
    p = analyze(few, truth, "-o", tmp_path, "--figures", "fidelity", "--format", "term")
    assert f"{len(truths) - 2 - 29} of {len(truths) - 2} true reruns have no estimate and are left out" in p.stderr
    p = analyze(results, "-o", tmp_path / "o", "--figures", "fidelity")
    assert "fidelity: needs a truth file of kvlag verify, figure skipped" in p.stderr
    (tmp_path / "v2.csv").write_text("# kvlag truth v2\n")
    p = analyze(results, tmp_path / "v2.csv", "-o", tmp_path / "o", code=1)
    assert "'# kvlag truth v2' is not supported" in p.stderr


@needs_gnuplot
def test_intervals_are_shown(tmp_path):
    results, _, rows, _ = write_estimated(tmp_path, ["licence"])
    p = analyze(results, "-o", tmp_path, "--figures", "lag,budget", "--format", "png,term")
    assert "warning" not in p.stderr
    header, first = p.stdout.split("\n")[:2]
    assert header.split()[-4:] == ["dloss_est", "90%", "interval", "kl_est"]
    best = min((r for r in rows if r["budget_asked"] == "10%"), key=lambda r: r["dloss_est"])
    assert f"{best['dloss_est']:.4g}  {best['dloss_lo']:.3g}..{best['dloss_hi']:.3g} " in first
    for name in "lag_rmm_kl_est", "budget_kl_est":
        assert all(columns[columns.index("kl_est") + 1:][:2] == ["lo", "hi"]
                   for _, columns, _ in blocks(tmp_path / f"{name}.dat"))
    assert "with filledcurves" in (tmp_path / "lag_rmm_kl_est.gp").read_text()
    assert "with vectors" in (tmp_path / "budget_kl_est.gp").read_text()


@needs_gnuplot
def test_a_gain_does_not_flatten_the_rest(tmp_path):
    """One negative loss change beside a nat of damage: an axis that is linear around 0 and logarithmic away from it."""
    rows = [row("h2o", "64", "", dloss_est=1.0), row("lru", "64", "", dloss_est=.01),
            row("oracle", "64", "", dloss_est=-.001)]
    analyze(write_csv(tmp_path / "r.csv", rows), "-o", tmp_path, "--figures", "budget")
    assert "set nonlinear y via asinh(y / 0.003)" in (tmp_path / "budget_dloss_est.gp").read_text()
    assert png_size(tmp_path / "budget_dloss_est.png")[0] == 1600
