"""kvlag analyze: the figures that decide between lags, policies and memories, from real results, against numpy."""

import csv
import os
import re
import shlex
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree

import numpy
import pytest

KVLAG = os.path.abspath(os.environ.get("KVLAG", "./kvlag"))
SAMPLES = os.path.join(os.path.dirname(__file__), "../../traces/samples")
LAGS = [0, 1, 2, 4, 8]
BUDGETS = ["10%", "25%", "50%"]
formats = "svg" if shutil.which("gnuplot") else None


def kvlag(*args, code=0):
    p = subprocess.run([KVLAG, *map(str, args)], capture_output=True, text=True, timeout=300)
    assert p.returncode == code, p.stderr
    return p


def sim(out, options, traces=("tiny-recall", "tiny-scripture")):
    kvlag("sim", *(f"{SAMPLES}/{t}.h5" for t in traces), "-o", out, *shlex.split(options))
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return sim(tmp_path_factory.mktemp("sim") / "r.csv",
               "-p rmm -p 'h2o(hold=lag)' -p h2o -p ema -p streaming -p 'oracle(mass)' -p 'oracle(mass,hold=lag)' "
               "-b 10%,25%,50% -L 0:8:x2 --pending both --device hbm=3.35TB/s,weights=1MB")


def analyze(files, out, figures, code=0):
    files = files if isinstance(files, list) else [files]
    more = ["--format", formats] if formats else []
    p = subprocess.run([KVLAG, "analyze", *map(str, files), "-o", str(out), "--figures", figures, *more],
                       capture_output=True, text=True, timeout=300)
    assert formats is None or p.returncode == code, p.stderr
    return p


def means(path, column):
    """(spec, budget, lag or None, pending, kv_bits): the mean over sequences; for pairs of columns see `cell`."""
    cells = {}
    with open(path) as f:
        for r in csv.DictReader(line for line in f if not line.startswith("#")):
            key = (r["spec"], r["budget_asked"], int(r["lag"]) if r["lag"] else None, r["pending"], r["kv_bits"])
            cells.setdefault(key, []).append(float(r[column]) if r[column] else numpy.nan)
    return {k: numpy.mean(v) for k, v in cells.items()}


def blocks(path):
    """{comment: rows}, each a dict by column; quoted words are words."""
    found = {}
    for block in open(path).read().split("\n\n\n"):
        lines = block.strip().split("\n")
        columns = lines[1].split()
        found[lines[0][2:]] = [dict(zip(columns, shlex.split(line))) for line in lines[2:]]
    return found


def words(folder, name):
    """The text of a picture, from its SVG."""
    if formats is None:
        pytest.skip("no gnuplot")
    root = ElementTree.parse(folder / f"{name}.svg").getroot()
    return ["".join(e.itertext()).strip() for e in root.iter("{http://www.w3.org/2000/svg}text")]


def close(got, want):
    assert float(got) == pytest.approx(want, rel=1e-6, abs=1e-9)


# ---- gain -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["dloss_est", "kl_est"])
def test_gain(results, tmp_path, metric):
    analyze(results, tmp_path, "gain")
    loss = means(results, metric)
    data = blocks(tmp_path / f"gain_rmm_{metric}.dat")
    assert len(data) == 6
    for budget in BUDGETS:
        for pending in "charged", "free":
            rows = data[f"rmm, budget {budget}, pending {pending}"]
            assert [int(r["lag"]) for r in rows] == LAGS
            of = lambda spec, lag: loss[spec, budget, lag, pending, "16"]  # noqa: E731
            best = min(loss[spec, budget, None, "charged", "16"] for spec in ("h2o", "ema", "streaming"))
            for r in rows:
                lag = int(r["lag"])
                gain = of("rmm", 0) - of("rmm", lag)
                close(r["gain"], gain)
                close(r["over_filter"], best - of("rmm", lag))
                assert float(r["gain_lo"]) <= gain + 1e-12 and float(r["gain_hi"]) >= gain - 1e-12
                if r["not_closed_because"]:
                    assert r["closed"] == "nan"
                else:
                    close(r["closed"], gain / (of("rmm", 0) - of("oracle(mass,hold=lag)", lag)))
    text = words(tmp_path, f"gain_rmm_{metric}")
    assert {"gain (nats/token)", "closed share", "pending free", "shaded: 90 %, resampled", "lag (tokens)", *BUDGETS} <= set(text)


def test_gain_without_an_oracle_says_so(tmp_path):
    path = sim(tmp_path / "r.csv", "-p rmm -b 25% -L 0:4:x2")
    analyze(path, tmp_path / "o", "gain")
    assert "no closed share: no oracle(...,hold=lag) with these sinks at this lag" in words(tmp_path / "o", "gain_rmm_kl_est")
    assert "closed share" not in words(tmp_path / "o", "gain_rmm_kl_est")
    p = analyze(sim(tmp_path / "late.csv", "-p rmm -b 25% -L 2:4:x2"), tmp_path / "late", "gain")
    assert "gain: rmm, budget 25%, pending charged: no lag 0, curve skipped" in p.stderr
    assert not [f for f in os.listdir(tmp_path / "late") if f.startswith("gain")]
    p = analyze(sim(tmp_path / "none.csv", "-p h2o -b 25%"), tmp_path / "none", "gain")
    assert "gain: no policy with two lags, figure skipped" in p.stderr


# ---- measuring --------------------------------------------------------------------------------------------------------


def test_measuring_against_accumulating(results, tmp_path):
    analyze(results, tmp_path, "measuring")
    loss = means(results, "kl_est")
    for budget in BUDGETS:
        name = f"measuring_{budget[:-1]}_kl_est"
        data = blocks(tmp_path / f"{name}.dat")
        assert set(data) == {"rmm, measuring", "h2o(hold=lag), accumulating", "h2o, no lag", "ema, no lag", "streaming, no lag"}
        for title, rows in data.items():
            spec, kind = title.split(", ")
            if kind == "no lag":
                assert [int(r["lag"]) for r in rows] == [0, 8]
            else:
                assert [int(r["lag"]) for r in rows] == LAGS
            for r in rows:
                lag = int(r["lag"])
                value = loss[spec, budget, None if kind == "no lag" else lag, "charged", "16"]
                close(r["kl_est"], value)
                close(r["behind"], value - loss["rmm", budget, lag, "charged", "16"])
                inside = float(r["behind_lo"]) <= 0 <= float(r["behind_hi"])
                assert r["open"] == str(int(inside and kind != "measuring"))
        text = words(tmp_path, name)
        assert f"KL, budget {budget}, mean of 2 sequences" in text and {"measuring", "accumulating", "no lag"} <= set(text)
        assert text.count("h2o") == 2 and "rmm" in text


def test_measuring_says_what_to_add(tmp_path):
    p = analyze(sim(tmp_path / "rmm.csv", "-p rmm -p 'h2o(hold=4)' -b 25% -L 0:4:x2"), tmp_path / "a", "measuring")
    assert ("measuring: no accumulating policy held for the lag beside a measuring one (add -p 'h2o(hold=lag)' -p "
            "'ema(hold=lag)'), figure skipped") in p.stderr
    p = analyze(sim(tmp_path / "h2o.csv", "-p 'h2o(hold=lag)' -b 25% -L 0:4:x2"), tmp_path / "b", "measuring")
    assert "measuring: no measuring policy beside accumulating ones (add -p rmm), figure skipped" in p.stderr
    p = analyze(sim(tmp_path / "no.csv", "-p h2o -b 25%"), tmp_path / "c", "measuring")
    assert "measuring: no policy held for a lag (add -p rmm -p 'h2o(hold=lag)'" in p.stderr


def test_long_names_keep_their_ends(tmp_path):
    """A memory that measures, another that does not, under equal evidence: names differ at their ends."""
    path = sim(tmp_path / "r.csv", "-p 'mix(evidence=attn*correct,memory=first:4,hold=lag)' "
               "-p 'mix(evidence=attn*correct,memory=sum,hold=lag)' -b 25% -L 0:4:x2")
    analyze(path, tmp_path / "o", "measuring")
    titles = list(blocks(tmp_path / "o" / "measuring_25_kl_est.dat"))
    assert [t.rsplit(", ", 1)[1] for t in titles] == ["measuring", "accumulating"]
    text = words(tmp_path / "o", "measuring_25_kl_est")
    assert "mix(evid…ct,memory=sum)" in text and "mix(evid…emory=first:4)" in text


# ---- pending ----------------------------------------------------------------------------------------------------------


def test_what_information_is_worth_and_memory_costs(results, tmp_path):
    analyze(results, tmp_path, "pending")
    loss = means(results, "dloss_est")
    data = blocks(tmp_path / "pending_rmm_dloss_est.dat")
    assert list(data) == [f"rmm, budget {b}" for b in BUDGETS]
    for budget in BUDGETS:
        rows = data[f"rmm, budget {budget}"]
        assert [int(r["lag"]) for r in rows] == LAGS
        for r in rows:
            zero, charged, free = (loss["rmm", budget, lag, pending, "16"] for lag, pending in (
                (0, "charged"), (int(r["lag"]), "charged"), (int(r["lag"]), "free")))
            close(r["worth"], zero - free)
            close(r["price"], charged - free)
            close(r["net"], zero - charged)
            for part in "worth", "price", "net":
                assert float(r[f"{part}_lo"]) <= float(r[part]) <= float(r[f"{part}_hi"])
        assert all(rows[0][k] == "0" for k in rows[0] if k.startswith(("worth", "price", "net")))
    text = words(tmp_path, "pending_rmm_dloss_est")
    assert [text.count(w) for w in ("information", "memory", "net")] == [3, 3, 3]
    assert {f"budget {b}" for b in BUDGETS} <= set(text)
    assert "information: lag 0 less free; memory: charged less free; shaded: 90 %" in text
    assert (tmp_path / "pending_h2o_hold_lag_dloss_est.dat").exists()


def test_pending_needs_both_kinds(tmp_path):
    p = analyze(sim(tmp_path / "r.csv", "-p rmm -b 25% -L 0:4:x2"), tmp_path / "o", "pending")
    assert ("pending: no policy has lag 0 and more with pending entries both charged and free (kvlag sim --pending both), "
            "figure skipped") in p.stderr


# ---- pareto -----------------------------------------------------------------------------------------------------------


def front_of(points):
    """The slow way: those that no other point has at most the cost and at most the loss of."""
    beats = lambda a, b: a[0] <= b[0] and a[1] <= b[1] and a != b  # noqa: E731
    return sorted({p for p in points if not any(beats(q, p) for q in points)})


@pytest.fixture(scope="module")
def precisions(tmp_path_factory):
    return sim(tmp_path_factory.mktemp("bits") / "r.csv",
               "-p full -p rmm -p h2o -p 'oracle(mass)' -b 10%,25%,50% -L 4:8:x2 --kv-bits 16,8,4 --pending both "
               "--device hbm=3.35TB/s,weights=1MB")


@pytest.mark.parametrize("what,column", [("memory", "kv_bytes"), ("decode_us", "decode_us")])
def test_pareto(precisions, tmp_path, what, column):
    analyze(precisions, tmp_path, "pareto")
    loss, cost = means(precisions, "kl_est"), means(precisions, column)
    real = [k for k in loss if not k[0].startswith("oracle") and k[3] != "free" and (k[0], k[4]) != ("full", "16")]
    points = [(cost[k], loss[k]) for k in real]
    data = blocks(tmp_path / f"pareto_{what}_kl_est.dat")
    assert set(data) == {"16 bits", "8 bits", "4 bits", "front"}
    for bits in "16", "8", "4":
        got = sorted((float(r["cost"]), float(r["kl_est"])) for r in data[f"{bits} bits"])
        assert got == pytest.approx(numpy.array(sorted(p for k, p in zip(real, points) if k[4] == bits)), rel=1e-8)
    got = [(float(r["cost"]), float(r["kl_est"])) for r in data["front"]]
    assert got == pytest.approx(numpy.array(front_of(points)), rel=1e-8)
    assert [r["number"] for r in data["front"]] == [str(i + 1) for i in range(len(got))]
    name = {points[i]: k for i, k in enumerate(real)}
    text = words(tmp_path, f"pareto_{what}_kl_est")
    for r, p in zip(data["front"], front_of(points)):
        spec, budget, lag, _, bits = name[p]
        assert r["name"] == (f"{budget}: " if budget else "") + spec + (f", kv_bits {bits}" if bits != "16" else "") + (
            f", lag {lag}" if lag is not None else "")
        assert r["name"] in text
    assert {"16 bits", "8 bits", "4 bits", "bars: 90 %, resampled"} <= set(text)


def test_a_full_cache_of_few_bits_has_no_budget(precisions, tmp_path):
    """It takes part in memory, and in nothing that compares evictions."""
    p = analyze(precisions, tmp_path, "budget,lag,gain,pareto")
    assert not [b for b in blocks(tmp_path / "budget_kl_est.dat") if b.startswith("full")]
    assert (tmp_path / "budget_kl_est.dat").read_text().splitlines()[1].startswith("percent ")
    assert "full" not in p.stderr
    assert re.search(r"^ +\d  full, kv_bits 8 +charged +-?\d", p.stdout, re.M)
    assert [r["name"] for r in blocks(tmp_path / "pareto_memory_kl_est.dat")["front"]][-1].startswith(("full", "50%"))


def test_pareto_needs_different_memories(tmp_path):
    p = analyze(sim(tmp_path / "r.csv", "-p h2o -p ema -b 25%", ["tiny-recall"]), tmp_path / "o", "pareto")
    assert "pareto: all configurations need the same memory, figure skipped" in p.stderr


# ---- memory -----------------------------------------------------------------------------------------------------------


def falling(y):
    """Least squares under y[0] >= y[1] >= ...: the min-max formula of isotonic regression, nothing pooled."""
    n = len(y)
    return [min(max(numpy.mean(y[a:b + 1]) for b in range(i, n)) for a in range(i + 1)) for i in range(n)]


def memory_needed(curve, loss):
    """curve: (memory, loss) by ascending memory."""
    x = numpy.log([m for m, _ in curve])
    y = falling(numpy.arcsinh([v / 0.003 for _, v in curve]))
    level = numpy.arcsinh(loss / 0.003)
    if y[0] < level:
        return -numpy.inf
    if y[-1] > level:
        return numpy.inf
    fine = numpy.linspace(0, 1, 200001)
    at = numpy.interp(fine, (x - x[0]) / (x[-1] - x[0]), y)
    return numpy.exp(x[0] + fine[numpy.argmax(at <= level + 1e-12)] * (x[-1] - x[0]))


def curves_of(path, metric):
    """{series: curve}, each series at its best charged lag for each budget."""
    loss, memory = means(path, metric), means(path, "kv_bytes")
    best = {}
    for k, value in loss.items():
        spec, budget, lag, pending, bits = k
        if pending == "free" or not budget or (spec.startswith("oracle") and lag is not None):
            continue
        series = spec + (f", kv_bits {bits}" if bits != "16" else "")
        if budget not in best.setdefault(series, {}) or value < best[series][budget][1]:
            best[series][budget] = (memory[k], value)
    return {s: sorted(points.values()) for s, points in best.items()}


@pytest.mark.parametrize("which,metric", [("results", "dloss_est"), ("results", "kl_est"), ("precisions", "kl_est")])
def test_memory_at_equal_loss(which, metric, request, tmp_path):
    path = request.getfixturevalue(which)
    analyze(path, tmp_path, "memory")
    curves = curves_of(path, metric)
    text = words(tmp_path, f"memory_{metric}") if formats else []
    reference = next((t[5:] for t in text if t.startswith("% of ")), None)
    data = blocks(tmp_path / f"memory_{metric}.dat")
    assert 1 <= len(data) <= 4
    found = 0
    for title, rows in data.items():
        loss = float(title.rsplit(" ", 1)[1])
        assert f"{loss:.0e}"[0] in "125"
        assert sorted(r["name"] for r in rows) == sorted(curves)
        for r in rows:
            want = memory_needed(curves[r["name"]], loss)
            if numpy.isinf(want):
                assert float(r["memory"]) == want and r["at"] == "nan"
            else:
                found += 1
                assert float(r["memory"]) == pytest.approx(want, rel=2e-5)
                assert float(r["lo"]) <= float(r["memory"]) <= float(r["hi"])
            assert int(r["open"]) == (r["lo"] == "-inf") + 2 * (r["hi"] == "inf")
            if reference and numpy.isfinite(want) and numpy.isfinite(memory_needed(curves[reference], loss)):
                assert float(r["share"]) == pytest.approx(want / memory_needed(curves[reference], loss), rel=4e-5)
        if formats:
            assert f"{'KL' if metric == 'kl_est' else 'loss change'} at most {loss:g} nats/token" in text
    assert found >= 4
    if formats:
        without_lag = [s for s in curves if s in ("h2o", "ema", "streaming")]
        middle = numpy.sqrt(max(c[0][0] for c in map(curves.get, without_lag)) * min(c[-1][0] for c in map(curves.get, without_lag)))
        at = lambda c: numpy.interp(numpy.log(middle), numpy.log([m for m, _ in c]), numpy.arcsinh([v / .003 for _, v in c]))  # noqa: E731
        assert reference == min(without_lag, key=lambda s: at(curves[s]))


def test_memory_counts_entries_where_bytes_are_not_known(tmp_path):
    path = sim(tmp_path / "r.csv", "-p h2o -p ema -b 10%,25%,50%", ["tiny-recall"])
    lines = path.read_text().splitlines(keepends=True)
    old = tmp_path / "old.csv"
    old.write_text("".join(lines).replace(",kv_bytes,", ",unknown_column,"))
    shutil.copy(tmp_path / "r.blocks.h5", tmp_path / "old.blocks.h5")
    analyze(old, tmp_path / "o", "memory")
    assert "memory: budget (entries)" in words(tmp_path / "o", "memory_kl_est")
    p = analyze(sim(tmp_path / "one.csv", "-p h2o -b 25%"), tmp_path / "p", "memory")
    assert "memory: no policy with two budgets, figure skipped" in p.stderr


# ---- marks and bands of the figures that were there -------------------------------------------------------------------


def test_lag_and_budget_show_resampled_intervals(results, tmp_path):
    p = analyze(results, tmp_path, "lag,budget")
    for name in "lag_rmm_kl_est", "budget_kl_est":
        for title, rows in blocks(tmp_path / f"{name}.dat").items():
            assert all(float(r["lo"]) <= float(r["kl_est"]) <= float(r["hi"]) for r in rows), title
    assert "shaded: 90 %, resampled" in words(tmp_path, "lag_rmm_kl_est")
    assert "bars: 90 %, resampled; lag: the best at each budget" in words(tmp_path, "budget_kl_est")
    lo, hi = means(results, "kl_lo"), means(results, "kl_hi")
    first = blocks(tmp_path / "lag_rmm_kl_est.dat")["rmm, budget 25%, pending charged"][0]
    key = ("rmm", "25%", 0, "charged", "16")
    assert (float(first["lo"]), float(first["hi"])) != pytest.approx((lo[key], hi[key]), rel=1e-3)
    assert p.returncode == 0 or formats is None


def test_recommended_lags_are_marked(results, tmp_path):
    analyze(results, tmp_path, "lag")
    marks = 0
    for title, rows in blocks(tmp_path / "lag_rmm_kl_est.dat").items():
        recommended = [r for r in rows if r["mark"].startswith("recommended")]
        if not title.startswith("rmm"):
            assert all(r["mark"] == "-" for r in rows)
            continue
        marks += 1
        assert len(recommended) == 1 and sum("knee" in r["mark"] for r in rows) <= 1
        best = min(rows, key=lambda r: float(r["kl_est"]))
        assert int(recommended[0]["lag"]) <= int(best["lag"])
    assert marks == 6
    assert "recommended" in words(tmp_path, "lag_rmm_kl_est")


def test_without_blocks_the_calibration_is_shown(results, tmp_path):
    alone = tmp_path / "alone.csv"
    shutil.copy(results, alone)
    p = analyze(alone, tmp_path / "o", "lag,gain,measuring,pending,pareto,memory")
    assert "there is no alone.blocks.h5 beside it" in p.stderr
    assert "shaded: 90 %, calibration" in words(tmp_path / "o", "lag_rmm_kl_est")
    assert "recommended" not in words(tmp_path / "o", "lag_rmm_kl_est")
    assert "no closed share: no resamples" in " ".join(words(tmp_path / "o", "gain_rmm_kl_est"))
    for name in "measuring_25_kl_est", "pending_rmm_kl_est", "pareto_memory_kl_est", "memory_kl_est":
        assert not [t for t in words(tmp_path / "o", name) if "resampled" in t or "paired" in t or "shaded" in t]


def test_disturbances_have_no_unit(tmp_path):
    """A trace without gradients: what is shown is no loss."""
    path = sim(tmp_path / "r.csv", "-p rmm -p h2o -b 10%,25%,50% -L 0:4:x2 --pending both")
    rows = list(csv.reader(path.read_text().splitlines()))
    head = next(i for i, r in enumerate(rows) if r[0] == "trace")
    gone = [i for i, c in enumerate(rows[head]) if c.startswith(("dloss", "kl_e", "kl_l", "kl_h", "fisher"))]
    for r in rows[head + 1:]:
        for i in gone:
            r[i] = ""
    with open(path, "w", newline="") as f:
        csv.writer(f, lineterminator="\n").writerows(rows)
    (tmp_path / "r.blocks.h5").unlink()
    analyze(path, tmp_path / "o", "gain,pending,memory")
    for name in "gain_rmm_lost_mass", "pending_rmm_lost_mass", "memory_lost_mass":
        text = words(tmp_path / "o", name)
        assert not [t for t in text if "nats" in t] and [t for t in text if "lost mass" in t]
