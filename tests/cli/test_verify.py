"""kvlag verify: where its configurations come from, what it writes, and one line for what it cannot do."""

import csv
import json
import os
import shutil
import subprocess
import sys

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np
import pytest

KVLAG = os.path.abspath(os.environ.get("KVLAG", "./kvlag"))
MAKE_GGUF = os.path.abspath("tests/tiny/make_gguf.py")
TEXT = ("And God saw the light, that it was good: and God divided the light from the darkness. Tirzah gold. Seth "
        "honey. Tirzah gold.\n" * 8)  # fmt: skip
KEY = "trace seq policy spec budget_asked budget lag unit schedule pending n_prompt".split()
FIGURES = "mode true_dloss true_kl kl_p99 top1_flips exact_match kept_overlap".split()
GRID = ["-p", "h2o", "-p", "rmm", "-p", "tova", "-p", "window", "-b", "12,25%", "-L", "2,4"]


def kvlag(*args, **more):
    return subprocess.run([KVLAG, *map(str, args)], capture_output=True, text=True, **more)


def well(*args, **more):
    done = kvlag(*args, **more)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """tiny.gguf and t.h5, a trace of two texts with a prompt of 5 steps."""
    path = tmp_path_factory.mktemp("verify")
    subprocess.run([sys.executable, MAKE_GGUF, path / "tiny.gguf"], check=True, capture_output=True)
    (path / "a.txt").write_text(TEXT)
    (path / "b.txt").write_text(TEXT[300:] + "Asher myrrh. Seth honey.\n" * 8)
    well("trace", "tiny.gguf", "a.txt", "b.txt", "-o", "t.h5", "--tokens", 90, "--prompt", 5, cwd=path)
    return path


@pytest.fixture
def verify(folder, tmp_path):
    """Run verify on the trace; returns rows and what was said."""

    def run(*args, model="tiny.gguf", trace="t.h5"):
        said = well("verify", folder / model, folder / trace, "-o", tmp_path / "truth.csv", "--force", *args)
        return rows_of(tmp_path / "truth.csv"), said

    return run


def rows_of(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(line for line in f if not line.startswith("#")))


def key_of(row, names=KEY):
    return tuple(row[name] for name in names)


def refused(code, message, folder, *args):
    """One line that says `message`, the exit code, and no file that was not there before."""
    before = sorted(os.listdir(folder))
    done = kvlag(*args, cwd=folder)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert sorted(os.listdir(folder)) == before


# ---- what it writes --------------------------------------------------------------------------------------------------


def test_file(folder, tmp_path, verify):
    rows, said = verify("-p", "h2o", "-p", "full", "-p", "window", "-b", "12,25%", "-v")
    lines = (tmp_path / "truth.csv").read_text().splitlines()
    assert lines[0] == "# kvlag truth v1"
    assert lines[1] == "# command: kvlag verify tiny.gguf t.h5 -p h2o -p full -p window -b 12,25%"
    with h5py.File(folder / "t.h5") as f:
        assert lines[2] == f"# trace: t {f.attrs['content_hash']}"
    assert lines[3] == "# mode: open loop"
    assert lines[4] == ",".join(KEY + FIGURES)
    asked = [("h2o", "12"), ("h2o", "25%"), ("full", ""), ("window", "12"), ("window", "25%")]
    assert [(r["seq"], r["spec"], r["budget_asked"]) for r in rows] == [(seq, *c) for seq in "01" for c in asked]
    for row in rows:
        costs = [float(row[name]) for name in FIGURES[1:5]]
        assert row["mode"] == "open" and row["kept_overlap"] == ""
        if row["spec"] == "full":
            assert costs == [0] * 4
        else:
            assert costs[1] > 0 and costs[2] > costs[1] and 0 <= costs[3] <= 1
    assert "10 rows from 10 reruns, open loop" in said and "perplexity" in said and "warning" not in said


def test_same_bytes_for_any_threads_and_company(folder, tmp_path):
    for mode in ("open", "closed"):
        for threads in (1, 3):
            well("verify", folder / "tiny.gguf", folder / "t.h5", "-o", tmp_path / f"{threads}.csv", *GRID,
                 "--mode", mode, "--threads", threads, "--force")  # fmt: skip
        assert (tmp_path / "1.csv").read_bytes() == (tmp_path / "3.csv").read_bytes()
        well("verify", folder / "tiny.gguf", folder / "t.h5", "-o", tmp_path / "alone.csv", "-p", "tova", "-b", "25%",
             "--mode", mode, "--force")  # fmt: skip
        alone, among = rows_of(tmp_path / "alone.csv"), rows_of(tmp_path / "3.csv")
        assert alone == [r for r in among if key_of(r, ["spec", "budget_asked"]) == ("tova", "25%")]


def test_perplexity_is_that_of_the_trace(folder, verify):
    _, said = verify("-p", "window", "-b", "12", "-v")
    with h5py.File(folder / "t.h5") as f:
        for i, seq in enumerate(f["seq"].values()):
            mean = -np.mean(seq["logits/target_logprob"][:][5:], dtype=np.float64)
            assert f"sequence {i}: full cache perplexity {np.exp(mean):.2f}" in said


def test_closed_loop_knows_what_a_server_knows(folder, tmp_path, verify):
    """While nothing is missing the running model's signals are the trace's, and so is the first victim."""
    specs = [x for s in ("entropy", "agrees", "confidence") for x in ("-p", f"rmm(signal={s})")]
    options = [*specs, "-b", "88", "-L", "4"]  # of 90 tokens: whoever leaves after step 88 is missed at step 89 only
    closed, _ = verify(*options, "--mode", "closed")
    assert len(closed) == 6 and all(float(row["kept_overlap"]) == 1 for row in closed)
    specs += ["-p", "rmm(signal=uniform)"]
    well("sim", folder / "t.h5", "-o", tmp_path / "r.csv", *specs, "-b", "86", "-L", "4", "--metrics", "lost_mass")
    lost = [row["lost_mass"] for row in rows_of(tmp_path / "r.csv") if row["seq"] == "0"]
    assert len(set(lost)) == 4  # the signals tell these configurations apart


def test_closed_loop(folder, tmp_path, verify):
    specs = "-p window -p full -p h2o -p random -p rmm -p tova -b 12 -L 4".split()
    opened, _ = verify(*specs)
    closed, said = verify(*specs, "--mode", "closed")
    assert "closed loop" in said and "# mode: closed loop" in (tmp_path / "truth.csv").read_text()
    assert [key_of(r) for r in opened] == [key_of(r) for r in closed]
    for a, b in zip(opened, closed):
        overlap = float(b["kept_overlap"])
        if b["spec"] in ("window", "full", "random"):  # decide without looking at rows
            assert overlap == 1 and a["exact_match"] == b["exact_match"]
            assert abs(float(a["true_dloss"]) - float(b["true_dloss"])) < 1e-4
            assert abs(float(a["true_kl"]) - float(b["true_kl"])) < 1e-4
        else:
            assert 0.3 < overlap < 1
        if b["spec"] == "full":
            assert [float(b[name]) for name in FIGURES[1:5]] == [0] * 4


def test_exact_match_counts_answers(folder, tmp_path, verify):
    """An answer is a run of counted steps; the full cache has those whose every step the trace calls correct."""
    shutil.copy(folder / "t.h5", tmp_path / "t.h5")
    want = []
    with h5py.File(tmp_path / "t.h5", "r+") as f:
        for i, seq in enumerate(f["seq"].values()):
            counted = np.random.default_rng(i).random(len(seq["tokens"]) - 1) < 0.6
            seq["counted"] = counted.astype("u1")
            right, answers = seq["logits/correct"][:], []
            for t in range(5, len(counted)):  # after the prompt of 5 steps
                if counted[t]:
                    answers += [1] if t == 5 or not counted[t - 1] else []
                    answers[-1] *= int(right[t])
            want.append(np.mean(answers))
    assert all(0.1 < share < 0.9 for share in want)
    for mode in "open", "closed":
        rows, _ = verify("-p", "full", "-p", "window", "-b", 8, "--mode", mode, trace=tmp_path / "t.h5")
        got = {(r["spec"], int(r["seq"])): float(r["exact_match"]) for r in rows}
        for i, share in enumerate(want):
            assert abs(got["full", i] - share) < 1e-8 and got["window", i] < share


# ---- where configurations come from ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(folder):
    """r.csv and l.h5 of the grid, with schedules, units and pending entries of all kinds among the rows."""
    well("sim", "t.h5", "-o", "r.csv", *GRID, "-p", "h2o(recent=2,sinks=1,unit=layer,schedule=every:4)",
         "-p", "mix(evidence=attn,memory=first:3,hold=2)", "-p", "full", "--pending", "both", "--lifetimes", "l.h5",
         cwd=folder)  # fmt: skip
    return folder / "r.csv"


def test_rows_of_results(folder, results, verify):
    rows, _ = verify(results)
    of_results = rows_of(results)
    assert [key_of(r) for r in rows] == [key_of(r) for r in of_results]
    assert len(rows) > 30 and {r["pending"] for r in rows} == {"charged", "free"}
    asked, _ = verify(*GRID, "--pending", "both")
    by_key = {key_of(r): r for r in rows}
    assert asked and all(by_key[key_of(r)] == r for r in asked)


def test_quantised_rows_are_not_rerun(folder, tmp_path):
    well("sim", "t.h5", "-o", tmp_path / "q.csv", "-p", "h2o", "-p", "rmm(lag=2)", "-b", "8", "--kv-bits", "16",
         "--pending-bits", "16,4", cwd=folder)  # fmt: skip
    line = next(n for n, x in enumerate(open(tmp_path / "q.csv"), 1) if ",16,4," in x)
    p = kvlag("verify", folder / "tiny.gguf", folder / "t.h5", tmp_path / "q.csv", "-o", tmp_path / "v.csv")
    assert p.returncode == 1 and f"q.csv:{line}: pending_bits is 4" in p.stderr, p.stderr


def test_lifetimes_give_the_same_costs(folder, results, verify):
    of_rows, _ = verify(results)
    of_lifetimes, _ = verify("--from-lifetimes", folder / "l.h5")
    by_key = {key_of(r): r for r in of_rows}
    assert of_lifetimes and all(by_key[key_of(r)] == r for r in of_lifetimes)


def test_foreign_lifetimes(folder, tmp_path, verify):
    """Nothing ever leaves; everything leaves at once: only spec is needed."""
    with h5py.File(folder / "t.h5") as t, h5py.File(tmp_path / "l.h5", "w") as f:
        T = int(t["seq/0001"].attrs["n_tokens"])
        f.attrs.update(format="kvlag-lifetimes", version=1)
        for i, end in enumerate([np.full(T, T + 1), np.arange(T) + 1]):
            config = f.create_group(f"config/{i:04}")
            config.attrs["spec"] = f"mine, {i}"
            config.create_group("seq/0001")["evict_at"] = np.broadcast_to(end, (3, 2, T)).astype("i4")
    rows, _ = verify("--from-lifetimes", tmp_path / "l.h5")
    assert [(r["seq"], r["spec"], r["policy"]) for r in rows] == [("1", "mine, 0", ""), ("1", "mine, 1", "")]
    assert [float(rows[0][name]) for name in FIGURES[1:5]] == [0] * 4
    assert float(rows[1]["true_kl"]) > 0.1


def test_pick_spreads(folder, results, verify):
    rows, _ = verify(results, "--pick", 6)
    again, _ = verify(results, "--pick", 6)
    assert rows == again and len(rows) == 6
    order = [key_of(r) for r in rows_of(results)]
    assert [key_of(r) for r in rows] == sorted((key_of(r) for r in rows), key=order.index)
    families = [{"window": "window"}.get(r["policy"], "attention") for r in rows]
    assert families.count("window") == 3 and families.count("attention") == 3
    assert {r["budget_asked"] for r in rows if r["policy"] == "window"} == {"12", "25%"}
    assert len({r["spec"] for r in rows}) == 4 and "full" not in {r["spec"] for r in rows}
    everything, said = verify(results, "--pick", 1000)
    assert len(everything) == len(order) - 2 and f"has only {len(everything)} rows" in said


def test_skipped_points_are_named(tmp_path, verify):
    rows, said = verify("-p", "rmm", "-b", "8", "-L", "4,20")
    assert {r["lag"] for r in rows} == {"4"}
    assert said.count("skipped rmm budget 8 lag 20") == 2
    assert (tmp_path / "truth.csv").read_text().count("# skipped: t seq ") == 2


def test_prompt(folder, verify):
    rows, _ = verify("-p", "window", "-b", "12", "--prompt", 40)
    assert {r["n_prompt"] for r in rows} == {"40"}
    default, _ = verify("-p", "window", "-b", "12")
    assert {r["n_prompt"] for r in default} == {"5"}
    assert rows[0]["true_kl"] != default[0]["true_kl"]


# ---- calibration -----------------------------------------------------------------------------------------------------


def test_calibrate(folder, tmp_path, verify):
    file = tmp_path / "c.json"
    rows, said = verify(*GRID, "--calibrate", file)
    assert str(file) in said
    made = json.loads(file.read_text())
    assert made["n"] >= 6 and made["budgets"] == "12,25%" and made["n_tokens"] == 90
    well("sim", folder / "t.h5", "-o", tmp_path / "r.csv", *GRID, "--calibration", file)
    priced = {key_of(r): r for r in rows_of(tmp_path / "r.csv")}
    # log c is the mean of log(true KL / fisher) over the reruns that cost enough
    costly = [r for r in rows if float(r["true_kl"]) >= 0.003]
    ratios = [np.log(float(r["true_kl"]) / float(priced[key_of(r)]["fisher"])) for r in costly]
    assert made["n"] == len(ratios)
    assert abs(made["log_c"] - np.mean(ratios)) < 1e-5


def test_too_few_reruns_to_calibrate(folder, tmp_path):
    done = kvlag("verify", folder / "tiny.gguf", folder / "t.h5", "-o", tmp_path / "truth.csv", "-p", "full",
                 "-p", "window", "-b", "12", "--calibrate", tmp_path / "c.json")  # fmt: skip
    assert done.returncode == 1 and "6" in done.stderr.splitlines()[-1]
    assert len(rows_of(tmp_path / "truth.csv")) == 4 and not (tmp_path / "c.json").exists()


# ---- what it cannot do -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faults(folder, results):
    """Broken variants beside the good files."""
    header, *lines = [line for line in results.read_text().splitlines() if line[0] != "#"]
    (folder / "nocolumn.csv").write_text(header.replace("budget_asked", "b") + "\n" + "\n".join(lines) + "\n")
    (folder / "other.csv").write_text(header + "\n" + "\n".join(line.replace("t,", "u,", 1) for line in lines) + "\n")
    (folder / "unknown.csv").write_text(header + "\n" + lines[0].replace("h2o,h2o", "h3o,h3o") + "\n")
    (folder / "seq.csv").write_text(header + "\n" + lines[0].replace("t,0", "t,7", 1) + "\n")
    with h5py.File(folder / "t.h5") as good:
        def copy(name, change):
            with h5py.File(folder / name, "w") as f:
                for k in good:
                    good.copy(k, f)
                f.attrs.update({k: v for k, v in good.attrs.items() if k != "content_hash"})
                change(f)
        copy("heads.h5", lambda f: f.attrs.modify("n_vocab", 2048))
        copy("notokens.h5", lambda f: f["seq/0000"].__delitem__("tokens"))

        def other_tokens(f):
            del f.attrs["n_vocab"]
            f["seq/0001/tokens"][7] = 1024

        def other_logprob(f):
            f["seq/0000/logits/target_logprob"][9] += 0.5

        copy("tokens.h5", other_tokens)
        copy("differs.h5", other_logprob)
    return folder


H2O = ["-p", "h2o", "-b", "12"]


@pytest.mark.parametrize("code, message, args", [
    (2, "verify needs a model and a trace", ["tiny.gguf", *H2O]),
    (2, "verify needs configurations from one place", ["tiny.gguf", "t.h5"]),
    (2, "verify needs configurations from one place", ["tiny.gguf", "t.h5", "r.csv", *H2O]),
    (2, "--pick takes rows of RESULTS.csv", ["tiny.gguf", "t.h5", *H2O, "--pick", "3"]),
    (2, "RESULTS.csv brings its configurations", ["tiny.gguf", "t.h5", "r.csv", "-b", "12"]),
    (2, "--from-lifetimes brings its configurations", ["tiny.gguf", "t.h5", "--from-lifetimes", "l.h5", "-L", "3"]),
    (2, "RESULTS.csv brings its prompts", ["tiny.gguf", "t.h5", "r.csv", "--prompt", "9"]),
    (2, "--mode closed needs policies", ["tiny.gguf", "t.h5", "--from-lifetimes", "l.h5", "--mode", "closed"]),
    (2, "oracle(mass) looks at more than rows and predictions",
     ["tiny.gguf", "t.h5", "-p", "oracle(mass)", "-b", "12", "--mode", "closed"]),
    (2, "--mode", ["tiny.gguf", "t.h5", *H2O, "--mode", "ajar"]),
    (2, "unknown policy 'h3o'", ["tiny.gguf", "t.h5", "-p", "h3o", "-b", "12"]),
    (2, "--prompt 91: sequence 0 of t.h5 has 90 tokens", ["tiny.gguf", "t.h5", *H2O, "--prompt", "91"]),
    (1, "no counted step", ["tiny.gguf", "t.h5", *H2O, "--prompt", "89"]),
    (1, "absent.gguf", ["absent.gguf", "t.h5", *H2O]),
    (1, "absent.h5", ["tiny.gguf", "absent.h5", *H2O]),
    (1, "absent.csv", ["tiny.gguf", "t.h5", "absent.csv"]),
    (1, "its n_vocab is 2048, that of tiny.gguf is 1024", ["tiny.gguf", "heads.h5", *H2O]),
    (1, "sequence 0 has no tokens", ["tiny.gguf", "notokens.h5", *H2O]),
    (1, "sequence 1, token 7: id 1024 is outside the vocabulary", ["tiny.gguf", "tokens.h5", *H2O]),
    (1, "no column 'budget_asked'", ["tiny.gguf", "t.h5", "nocolumn.csv"]),
    (1, "no row of trace 't'", ["tiny.gguf", "t.h5", "other.csv"]),
    (1, "unknown.csv:2: ", ["tiny.gguf", "t.h5", "unknown.csv"]),
    (1, "seq.csv:2: seq 7 is not a whole number below 2", ["tiny.gguf", "t.h5", "seq.csv"]),
])  # fmt: skip
def test_refused(faults, code, message, args):
    refused(code, message, faults, "verify", *args, "-o", "new.csv")


def test_no_file_is_harmed(faults):
    good = {name: (faults / name).read_bytes() for name in ("t.h5", "r.csv", "tiny.gguf")}
    for name in good:
        refused(2, name, faults, "verify", "tiny.gguf", "t.h5", "r.csv", "-o", name, "--force")
        refused(2, name, faults, "verify", "tiny.gguf", "t.h5", "r.csv", "-o", "new.csv", "--calibrate", name,
                "--force")  # fmt: skip
    refused(2, "writes it twice", faults, "verify", "tiny.gguf", "t.h5", *H2O, "-o", "new.csv",
            "--calibrate", "new.csv")  # fmt: skip
    (faults / "old.csv").write_text("old")
    done = kvlag("verify", "tiny.gguf", "t.h5", *H2O, "-o", "old.csv", cwd=faults)
    assert done.returncode != 0 and "--force" in done.stderr and (faults / "old.csv").read_text() == "old"
    assert all((faults / name).read_bytes() == data for name, data in good.items())


def test_another_quantisation_is_warned_of(faults, verify):
    _, said = verify(*H2O, trace="differs.h5")
    assert "warning: this model's log probabilities differ from the trace's by up to 0.5" in said
