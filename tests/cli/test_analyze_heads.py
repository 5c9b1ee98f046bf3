"""kvlag analyze: what stands on FILE.blocks.h5: heat maps by layer and head, the best lag of each head, loss along the
text. Data files are held against the blocks as h5py reads them."""

import csv
import os
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

h5py = pytest.importorskip("h5py")
pytest.importorskip("hdf5plugin")
numpy = pytest.importorskip("numpy")

KVLAG = os.path.abspath(os.environ.get("KVLAG", "./kvlag"))
SAMPLES = Path(__file__).resolve().parents[2] / "traces" / "samples"
needs_gnuplot = pytest.mark.skipif(not shutil.which("gnuplot"), reason="no gnuplot")
POLICIES = ["-p", "rmm", "-p", "ema", "-p", "h2o", "-p", "oracle(mass,hold=lag)"]
SWEEP = [*POLICIES, "-b", "16,25%,50%", "-L", "0:8:x2"]


def run(*args, code=0):
    if args[0] == "analyze":
        args = *args, "--report", "no"
    p = subprocess.run([KVLAG, *map(str, args)], capture_output=True, text=True, timeout=120)
    assert p.returncode == code, p.stderr
    return p


def simulate(folder, name, *args):
    run("sim", SAMPLES / f"{name}.h5", *args, "-o", folder / f"{name}.csv")
    return folder / f"{name}.csv"


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two texts of unlike lengths, with all metrics of loss."""
    folder = tmp_path_factory.mktemp("swept")
    return [simulate(folder, name, *SWEEP) for name in ("tiny-scripture", "tiny-recall")]


def rows_of(path):
    """The rows, each with its blocks."""
    with open(path, newline="") as f, h5py.File(str(path)[:-4] + ".blocks.h5") as h5:
        rows = list(csv.DictReader(line for line in f if not line.startswith("#")))
        for i, row in enumerate(rows):
            row["blocks"] = {name: h5[name][i].astype("f8") for name in h5}
    return rows


def pick(paths, metric, budget, passes):
    """The configuration of least mean: its rows, one a text."""
    found = {}
    for path in paths:
        for row in rows_of(path):
            if row["budget_asked"] == budget and row["policy"] != "full" and passes(row):
                found.setdefault((row["spec"], row["lag"]), []).append(row)
    return min(found.values(), key=lambda rows: sum(float(r[metric]) for r in rows))


def scale_of(row):
    return float(row["kl_est"]) / float(row["fisher"])


def by_head(rows, metric):
    def one(row):
        b = row["blocks"]
        if metric == "lost_mass":
            return b["head_lost_mass"]
        return scale_of(row) * b["head_fisher"] + (b["head_first"] if metric == "dloss_est" else 0)

    return numpy.mean([one(r) for r in rows], axis=0)


def along(rows, metric):
    def one(row):
        b = row["blocks"]
        if metric == "lost_mass":
            return b["lost_mass"] / b["steps"]
        return (scale_of(row) * b["fisher"].mean(0) + (b["first"] if metric == "dloss_est" else 0)) / b["steps"]

    return numpy.mean([one(r) for r in rows], axis=0)


def data_of(path):
    """The blocks of a data file: {comment: (columns, numbers)}."""
    out = {}
    for block in Path(path).read_text().split("\n\n\n"):
        comment, columns, *lines = block.strip().split("\n")
        out[comment[2:]] = columns.split(), numpy.array([[float(x) for x in line.split()] for line in lines])
    return out


def check_map(table, column, want):
    columns, numbers = table
    n_layer, n_head = want.shape
    assert columns == ["layer", "head", column]
    assert numbers[:, 0].tolist() == [x for x in range(n_layer) for _ in range(n_head)]
    assert numbers[:, 1].tolist() == list(range(n_head)) * n_layer
    numpy.testing.assert_allclose(numbers[:, 2], want.ravel(), rtol=2e-6, atol=1e-12)


def waits(row):
    return row["policy"] == "rmm"


def is_filter(row):
    return row["policy"] in ("ema", "h2o")


def name_of(rows):
    return rows[0]["spec"] + (f", lag {rows[0]['lag']}" if rows[0]["lag"] else "")


@pytest.mark.parametrize("texts", [1, 2])
def test_loss_by_head(tmp_path, swept, texts):
    run("analyze", *swept[:texts], "-o", tmp_path, "--figures", "heads", "--format", "term")
    for metric in "dloss_est", "kl_est":
        data = data_of(tmp_path / f"heads_{metric}.dat")
        best = [pick(swept[:texts], metric, "25%", passes) for passes in (waits, is_filter)]
        assert list(data) == [name_of(rows) for rows in best]
        for rows in best:
            assert len(rows) == texts
            check_map(data[name_of(rows)], metric, by_head(rows, metric))


def test_lost_mass_by_head(tmp_path):
    """Lost mass alone: the heads' mean is the policy's."""
    results = simulate(tmp_path, "tiny-recall", *SWEEP, "--metrics", "lost_mass")
    run("analyze", results, "-o", tmp_path, "--figures", "heads,along", "--format", "term")
    assert {p.stem for p in tmp_path.glob("*.dat")} == {"heads_lost_mass", "heads_lag", "along_lost_mass"}
    rows = pick([results], "lost_mass", "25%", is_filter)
    table = data_of(tmp_path / "heads_lost_mass.dat")[name_of(rows)]
    check_map(table, "lost_mass", by_head(rows, "lost_mass"))
    assert table[1][:, 2].mean() == pytest.approx(float(rows[0]["lost_mass"]), rel=1e-5)
    assert list(data_of(tmp_path / "heads_lag.dat")) == ["by its lost mass"]
    columns, numbers = data_of(tmp_path / "along_lost_mass.dat")[name_of(rows)[:21]]
    numpy.testing.assert_allclose(numbers[:, 2], along(rows, "lost_mass"), rtol=1e-5, atol=1e-9)


def test_best_lag_of_each_head(tmp_path, swept):
    run("analyze", *swept, "-o", tmp_path, "--figures", "heads", "--format", "term")
    data = data_of(tmp_path / "heads_lag.dat")
    assert list(data) == ["by its own KL", "by its lost mass"]
    lags, seen = [0, 1, 2, 4, 8], set()
    for title, metric in ("by its own KL", "kl_est"), ("by its lost mass", "lost_mass"):
        maps = [by_head(pick(swept, metric, "25%", lambda r: waits(r) and float(r["lag"]) == lag), metric)
                for lag in lags]  # fmt: skip
        least, most = numpy.min(maps, axis=0), numpy.max(maps, axis=0)
        want = numpy.where(most - least >= .05 * most, numpy.take(lags, numpy.argmin(maps, axis=0)), numpy.nan)
        check_map(data[title], "lag", want)
        seen |= set(data[title][1][:, 2])
    assert len(seen) > 2  # the sample tells heads apart


@pytest.mark.parametrize("metric", ["dloss_est", "kl_est"])
def test_along(tmp_path, swept, metric):
    run("analyze", swept[1], "-o", tmp_path, "--figures", "along", "--format", "term")
    data = data_of(tmp_path / f"along_{metric}.dat")
    best = [pick(swept[1:], metric, "25%", p) for p in (waits, is_filter, lambda r: r["policy"] == "oracle")]
    assert list(data) == [r[0]["spec"] for r in best]
    for rows in best:
        columns, numbers = data[rows[0]["spec"]]
        assert columns == ["from", "to", metric, "smoothed", "so_far"]
        bound = [k * 383 // 64 for k in range(65)]  # 384 tokens: the last predicts nothing
        assert numbers[:, 0].tolist() == bound[:-1] and numbers[:, 1].tolist() == bound[1:]
        value = along(rows, metric)
        numpy.testing.assert_allclose(numbers[:, 2], value, rtol=1e-6, atol=1e-10)
        smooth = [value[max(k - 2, 0):k + 2].mean() for k in range(64)]
        numpy.testing.assert_allclose(numbers[:, 3], smooth, rtol=1e-6, atol=1e-10)
        assert numbers[-1, 4] == pytest.approx(float(rows[0][metric]), rel=1e-5)


def test_texts_of_unlike_lengths(tmp_path, swept):
    run("analyze", *swept, "-o", tmp_path, "--figures", "along", "--format", "term")
    rows = pick(swept, "kl_est", "25%", waits)
    columns, numbers = data_of(tmp_path / "along_kl_est.dat")["rmm"]
    assert columns[:2] == ["from_percent", "to_percent"]
    assert numbers[:, 0].tolist() == [100 * k / 64 for k in range(64)] and numbers[-1, 1] == 100
    numpy.testing.assert_allclose(numbers[:, 2], along(rows, "kl_est"), rtol=1e-6, atol=1e-10)
    assert "share of the text after the prompt" in (tmp_path / "along_kl_est.gp").read_text()


@needs_gnuplot
def test_pictures(tmp_path, swept):
    run("analyze", swept[0], "-o", tmp_path, "--figures", "heads,along", "--format", "png,svg,pdf")
    words = {
        "heads_dloss_est": ["Loss change by head, budget 25% on tiny-scripture", "layer", "query head", "nats/token",
                            "each head alone: first-order + Fisher term of its own disturbance;", "values do not add up"],
        "heads_kl_est": ["KL by head", "rmm, lag 8", "Fisher term of its own disturbance"],
        "heads_lag": ["Best lag by head, budget 25%", "by its own KL", "by its lost mass", "lag (tokens)",
                      "as if no other head lost anything"],
        "along_dloss_est": ["Loss along the text, budget 25%", "each step (mean over 1/16 of the text)", "step",
                            "adding up to the mean over all steps", "by the step that is disturbed: the loss itself"],
        "along_kl_est": ["KL along the text", "oracle(mass,hold=lag)", "rmm", "lag 8", "h2o"],
    }  # fmt: skip
    assert {p.stem for p in tmp_path.iterdir()} == set(words)
    for name, said in words.items():
        svg = " ".join(ElementTree.parse(tmp_path / f"{name}.svg").getroot().itertext())
        for word in said:
            assert word in svg, (name, word)
        png = (tmp_path / f"{name}.png").read_bytes()
        assert png[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(png[16:20], "big") == 1600
        assert (tmp_path / f"{name}.pdf").stat().st_size > 3000
    # A cell is a polygon: 2 panels of 3 layers of 6 heads, and the steps of the colour box.
    assert (tmp_path / "heads_kl_est.svg").read_text().count("<polygon") >= 36


@needs_gnuplot
def test_text_terminal(tmp_path, swept):
    p = run("analyze", swept[0], "-o", tmp_path, "--figures", "heads,along", "--format", "term")
    assert "heads_kl_est: cannot be drawn on a text terminal, skipped" in p.stderr
    assert "KL along the text, budget 25%" in p.stdout and "A rmm, lag 8" in p.stdout


def test_one_lag_has_no_best_one(tmp_path):
    results = simulate(tmp_path, "tiny-scripture", "-p", "rmm", "-p", "h2o", "-b", "16", "-L", "0,4")
    p = run("analyze", results, "-o", tmp_path / "o", "--figures", "heads", "--format", "term")
    assert "heads: no policy with 3 lags at one budget, best lags skipped" in p.stderr
    assert {f.stem for f in (tmp_path / "o").iterdir()} == {"heads_dloss_est", "heads_kl_est"}


def test_oracles_alone(tmp_path):
    results = simulate(tmp_path, "tiny-scripture", "-p", "oracle(mass)", "-b", "16")
    p = run("analyze", results, "-o", tmp_path / "o", "--figures", "heads,along", "--format", "term")
    for line in "heads: no policy has kl_est, figure skipped", "along: no policy has kl_est, figure skipped":
        assert line in p.stderr
    assert not list((tmp_path / "o").iterdir())


def test_missing_blocks(tmp_path, swept):
    shutil.copy(swept[0], tmp_path / "r.csv")
    p = run("analyze", tmp_path / "r.csv", "-o", tmp_path / "o", "--figures", "heads,along", "--format", "term")
    assert p.stderr.count("there is no r.blocks.h5 beside it") == 1
    for kind in "heads", "along":
        assert f"{kind}: needs the blocks beside the results, figure skipped" in p.stderr
    assert not list((tmp_path / "o").iterdir())


def test_foreign_blocks(tmp_path, swept):
    shutil.copy(swept[0], tmp_path / "r.csv")
    shutil.copy(str(swept[1])[:-4] + ".blocks.h5", tmp_path / "r.blocks.h5")
    p = run("analyze", tmp_path / "r.csv", "-o", tmp_path / "o", code=1)
    assert f"{tmp_path}/r.blocks.h5 does not belong to {tmp_path}/r.csv: line " in p.stderr
    assert not (tmp_path / "o").exists()
    (tmp_path / "r.blocks.h5").write_text("not HDF5")
    assert f"{tmp_path}/r.blocks.h5" in run("analyze", tmp_path / "r.csv", "-o", tmp_path / "o", code=1).stderr
