"""kvlag sim --shard, kvlag merge and MPI: the bytes of one process, or one line that says why not."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import h5py
import pytest

from simcli import KVLAG, ROOT, blocks_of, closing, kvlag, lines_of, refused, rows_of, sim, sim_said

# Shared configurations (18 is 20 % of 90 tokens), points that cannot run, heads that lose nearly all of their mass.
ASK = ["-p", "rmm", "-p", "h2o(sinks=0|4)", "-p", "random", "-p", "full", "-b", "20%,18,2", "-L", "0:12:4",
       "--pending", "both"]  # fmt: skip
ODD = 'a "b", c\nd'


@pytest.fixture(scope="module")
def folder(sim_traces, tmp_path_factory):
    """Two traces of different shape with two sequences each, one with an odd name; r.csv, what one process writes."""
    from make_traces import write_trace

    here = tmp_path_factory.mktemp("shard")
    shutil.copy(sim_traces / "two.h5", here)
    write_trace(here / f"{ODD}.h5", 41, n_layer=1, n_head=6, n_kv_head=2,
                seqs=[dict(T=50, forms=("factored",), fisher=1), dict(T=24, forms=("factored",), fisher=1)])
    rows = sim(here / "r.csv", *inputs(here), *ASK)
    assert {(r["trace"], r["seq"]) for r in rows} == {(t, s) for t in ("two", ODD) for s in "01"}
    return here


def inputs(here):
    return [here / "two.h5", here / f"{ODD}.h5"]


def shard(here, k, n, *more, args=ASK, traces=None, out=None, **env):
    out = out or here / f"{k}-{n}.csv"
    done = kvlag("sim", *(traces or inputs(here)), *args, "-o", out, "--shard", f"{k}/{n}", "--force", *more,
                 env={**os.environ, **env})  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return out


def merge(out, shards, **more):
    done = kvlag("merge", *shards, "-o", out, "--force", **more)
    assert done.returncode == 0, done.stderr.decode()
    return done


def equal(a, b):
    assert Path(a).read_bytes() == Path(b).read_bytes()
    assert blocks_of(a).read_bytes() == blocks_of(b).read_bytes()


# ---- the same bytes --------------------------------------------------------------------------------------------------


def test_the_work_has_what_it_takes(folder):
    """Else the tests below would prove little."""
    comments, _ = lines_of(folder / "r.csv")
    told = closing(sim_said(folder / "again.csv", *inputs(folder), *ASK))
    assert told["rows"] > told["configurations"] > 60
    assert any(x.startswith(b"# skipped") for x in comments)
    assert any(x.startswith(b"# floored") for x in comments)
    equal(folder / "r.csv", folder / "again.csv")


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_shards_merge_to_the_bytes_of_one_process(folder, tmp_path, n):
    shards = [shard(folder, k, n, out=tmp_path / f"{k}.csv") for k in range(1, n + 1)]
    said = merge(tmp_path / "m.csv", reversed(shards)).stderr.decode()
    equal(folder / "r.csv", tmp_path / "m.csv")
    assert f"from {n} shard" in said
    sizes = [len(rows_of(s)) for s in shards]
    assert sum(sizes) == len(rows_of(folder / "r.csv")) and min(sizes) > 0


def test_shards_are_balanced_and_keep_shared_configurations_together(folder, tmp_path):
    units = []
    for k in 1, 2, 3:
        said = kvlag("sim", *inputs(folder), *ASK, "-o", tmp_path / f"{k}.csv", "--shard", f"{k}/3").stderr.decode()
        assert f"(shard {k}/3)" in said
        units.append(int(closing(said.splitlines()[-1])["configurations"]))
    assert max(units) - min(units) <= 1
    assert sum(units) == closing(sim_said(tmp_path / "r.csv", *inputs(folder), *ASK))["configurations"]


def test_more_shards_than_work(folder, tmp_path):
    """A shard without work is a file without rows."""
    args = ["-p", "h2o", "-b", "10,12"]
    one = sim(tmp_path / "r.csv", folder / "two.h5", *args)
    shards = [shard(tmp_path, k, 6, args=args, traces=[folder / "two.h5"]) for k in range(1, 7)]
    assert [len(rows_of(s)) for s in shards] == [1, 1, 1, 1, 0, 0] and len(one) == 4
    with h5py.File(blocks_of(shards[5])) as f:
        assert f["lost_mass"].shape == (0, 64) and f["head_fisher"].shape[0] == 0
    merge(tmp_path / "m.csv", shards)
    equal(tmp_path / "r.csv", tmp_path / "m.csv")


@pytest.mark.parametrize("metrics", ["lost_mass", "lost_mass,out_err", "loss"])
def test_whatever_is_measured(folder, tmp_path, metrics):
    args = [*ASK, "--metrics", metrics, "--memory", "3M", "--threads", "2"]
    sim(tmp_path / "r.csv", *inputs(folder), *args)
    merge(tmp_path / "m.csv", [shard(folder, k, 2, args=args, out=tmp_path / f"{k}.csv") for k in (1, 2)])
    equal(tmp_path / "r.csv", tmp_path / "m.csv")


def test_shards_of_a_sweep_over_precision(folder, tmp_path):
    args = ["-p", "rmm", "-p", "h2o", "-p", "full", "-b", "20%,18", "-L", "4", "--kv-bits", "16,4", "--pending-bits", "8"]
    traces = [folder / f"{ODD}.h5"]
    rows = sim(tmp_path / "r.csv", *traces, *args)
    assert {(r["kv_bits"], r["pending_bits"]) for r in rows} == {("16", "16"), ("4", "4"), ("16", "8"), ("4", "8")}
    parts = [shard(tmp_path, k, 3, args=args, traces=traces) for k in (1, 2, 3)]
    merge(tmp_path / "m.csv", parts)
    equal(tmp_path / "m.csv", tmp_path / "r.csv")


def test_shards_from_machines_of_different_kinds(folder, tmp_path):
    """Other instruction sets, threads and folders; the traces' own names count, not where they are."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for path in inputs(folder):
        shutil.copy(path, elsewhere)
    shards = [shard(folder, 1, 3, out=tmp_path / "1.csv", KVLAG_KERNELS="portable"),
              shard(folder, 2, 3, "--threads", 1, out=tmp_path / "2.csv", KVLAG_KERNELS="avx2"),
              shard(elsewhere, 3, 3, "--memory", "3M", out=tmp_path / "3.csv")]  # fmt: skip
    merge(tmp_path / "m.csv", shards)
    equal(folder / "r.csv", tmp_path / "m.csv")


def test_shards_of_given_lifetimes(folder, tmp_path):
    two = folder / "two.h5"
    sim(tmp_path / "l.csv", two, *ASK, "--lifetimes", tmp_path / "l.h5")
    args = ["--from-lifetimes", tmp_path / "l.h5"]
    sim(tmp_path / "r.csv", two, *args)
    shards = [shard(tmp_path, k, 3, args=args, traces=[two]) for k in (1, 2, 3)]
    merge(tmp_path / "m.csv", shards)
    equal(tmp_path / "r.csv", tmp_path / "m.csv")
    # Other lifetimes under the same name are other work.
    sim(tmp_path / "l.csv", two, *ASK, "--seed", 9, "--lifetimes", tmp_path / "l.h5")
    shard(tmp_path, 3, 3, args=args, traces=[two])
    refused(tmp_path, 1, ["3-3.csv does not belong to 1-3.csv", "lifetimes"], "merge", "1-3.csv", "2-3.csv", "3-3.csv",
            "-o", "x.csv")  # fmt: skip


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "0/3", "4/3", "1", "1/", "/3", "1/3/2", "-1/3", "+1/3", " 1/3", "1/3 ", "a/b",
                                  "1/99999999999999999999", "1/1000001", "1,3"])  # fmt: skip
def test_what_is_no_shard(folder, tmp_path, text):
    refused(tmp_path, 2, ["--shard", "k/n"], "sim", folder / "two.h5", "-o", "x.csv", f"--shard={text}")


def test_lifetimes_stay_in_one_piece(folder, tmp_path):
    refused(tmp_path, 2, ["--lifetimes", "shards"], "sim", folder / "two.h5", "-o", "x.csv", "--shard", "1/2",
            "--lifetimes", "l.h5")  # fmt: skip


@pytest.fixture(scope="module")
def eight(folder, tmp_path_factory):
    """All shards of 8, and of other work: other.csv is shard 2 of another command, seven.csv 2 of 7."""
    here = tmp_path_factory.mktemp("eight")
    args = ["-p", "h2o", "-b", "4,6,8,10,12"]
    for k in range(1, 9):
        shard(here, k, 8, args=args, traces=[folder / "two.h5"], out=here / f"{k}.csv")
    shard(here, 2, 7, args=args, traces=[folder / "two.h5"], out=here / "seven.csv")
    shard(here, 2, 8, args=args[:-1] + ["4,6,8,10,13"], traces=[folder / "two.h5"], out=here / "other.csv")
    sim(here / "whole.csv", folder / "two.h5", *args)
    return here


def names(*numbers):
    return [f"{k}.csv" for k in numbers]


def test_shards_that_do_not_make_a_whole(eight):
    refused(eight, 1, "shards 3, 7 of 8 are missing", "merge", *names(1, 2, 4, 5, 6, 8), "-o", "x.csv")
    refused(eight, 1, "shard 8 of 8 is missing", "merge", *names(*range(1, 8)), "-o", "x.csv")
    refused(eight, 1, "shard 2/8 is given twice: 2.csv and ./2.csv", "merge", *names(*range(1, 9)), "./2.csv",
            "-o", "x.csv")  # fmt: skip
    refused(eight, 1, ["other.csv does not belong to 1.csv", "4,6,8,10,13"], "merge", "1.csv", "other.csv",
            "-o", "x.csv")  # fmt: skip
    refused(eight, 1, ["seven.csv does not belong to 1.csv", "shards of 8 there, of 7 here"], "merge", "1.csv",
            "seven.csv", "-o", "x.csv")  # fmt: skip
    refused(eight, 1, ["whole.csv", "is no shard"], "merge", "1.csv", "whole.csv", "-o", "x.csv")
    refused(eight, 1, "nowhere.csv", "merge", "nowhere.csv", "-o", "x.csv")
    refused(eight, 2, "SHARD.csv", "merge", "-o", "x.csv")
    refused(eight, 2, "-o", "merge", "1.csv")
    everything = names(*range(1, 9))
    refused(eight, 2, "already there", "merge", *everything, "-o", "whole.csv")
    refused(eight, 2, "is an input", "merge", *everything, "-o", "3.csv", "--force")
    refused(eight, 2, "is an input", "merge", *everything, "-o", "3", "--force")  # 3.blocks.h5


def test_a_trace_of_the_same_name_and_other_content(folder, tmp_path):
    from make_traces import write_trace

    for seed in 1, 2:
        write_trace(tmp_path / "t.h5", seed, n_layer=1, n_head=2, n_kv_head=1, seqs=[dict(T=40, forms=("factored",))])
        shard(tmp_path, seed, 2, args=["-p", "h2o", "-b", "8,9"], traces=[tmp_path / "t.h5"])
    refused(tmp_path, 1, ["2-2.csv does not belong to 1-2.csv", "# trace: t "], "merge", "1-2.csv", "2-2.csv",
            "-o", "x.csv")  # fmt: skip


@pytest.mark.parametrize("find, put, words", [
    (b"# shard: 2/8", b"# shard: 9/8", "2.csv: '# shard: 9/8' is damaged"),
    (b"# shard: 2/8", b"# shard: 1/8", "shard 1/8 is given twice"),
    (b"# shard rows: 1,9", b"# shard rows: 1,8", "row 8 is in"),
    (b"# shard rows: 1,9", b"# shard rows: 9,1", "rows: 9,1' is damaged"),
    (b"# shard rows: 1,9", b"# shard rows: 1,99", "is damaged"),
    (b"# shard rows: 1,9", b"# shard rows: 1", "2.csv: holds 2 rows and says that it has 1"),
    (b"# shard work: ", b"# shard work: x", "is damaged"),
    (b"kvlag 0.1.0, X", b"kvlag 0.0.9, X", "version"),
    (b"fisher,dloss", b"fishes,dloss", "does not belong"),
])  # fmt: skip
def test_damaged_shards(eight, tmp_path, find, put, words):
    for k in range(1, 9):
        shutil.copy(eight / f"{k}.csv", tmp_path)
        shutil.copy(eight / f"{k}.blocks.h5", tmp_path)
    whole = (tmp_path / "2.csv").read_bytes()
    assert find in whole
    (tmp_path / "2.csv").write_bytes(whole.replace(find, put, 1))
    refused(tmp_path, 1, words, "merge", *names(*range(1, 9)), "-o", "x.csv")


def test_blocks_that_are_not_there_or_not_its_own(eight, tmp_path):
    for k in range(1, 9):
        shutil.copy(eight / f"{k}.csv", tmp_path)
        shutil.copy(eight / f"{k}.blocks.h5", tmp_path)
    (tmp_path / "2.blocks.h5").unlink()
    refused(tmp_path, 1, "2.blocks.h5", "merge", *names(*range(1, 9)), "-o", "x.csv")
    shutil.copy(eight / "3.blocks.h5", tmp_path / "2.blocks.h5")  # one row, not two
    refused(tmp_path, 1, ["2.blocks.h5: holds 1 rows", "2.csv 2"], "merge", *names(*range(1, 9)), "-o", "x.csv")
    (tmp_path / "2.blocks.h5").write_bytes((eight / "2.blocks.h5").read_bytes()[:3000])
    refused(tmp_path, 1, "2.blocks.h5", "merge", *names(*range(1, 9)), "-o", "x.csv")


# ---- MPI -------------------------------------------------------------------------------------------------------------

LAUNCHER = Path(KVLAG).parent / "kvlag-mpi"
needs_mpi = pytest.mark.skipif(not (shutil.which("mpirun") and LAUNCHER.exists()),
                               reason="no mpirun, or no kvlag-mpi beside kvlag (make MPI=1)")  # fmt: skip


def mpi(n, *args, **more):
    more.setdefault("timeout", 120)
    env = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(["mpirun", "-n", str(n), "--oversubscribe", LAUNCHER, *map(str, args)], capture_output=True,
                          env=env, **more)  # fmt: skip


@needs_mpi
@pytest.mark.parametrize("n", [1, 2, 3])
def test_ranks_write_the_bytes_of_one_process(folder, tmp_path, n):
    done = mpi(n, "sim", *inputs(folder), *ASK, "-o", tmp_path / "m.csv", "--threads", 1)
    assert done.returncode == 0, done.stderr.decode()
    equal(folder / "r.csv", tmp_path / "m.csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.blocks.h5", "m.csv"]


@needs_mpi
def test_ranks_that_fail_say_one_line(folder, tmp_path):
    two = folder / "two.h5"
    (tmp_path / "there.csv").write_text("x")
    for words, code, args in [
        ("already there", 2, ["sim", two, "-o", "there.csv"]),
        ("the launcher splits", 2, ["sim", two, "-o", "x.csv", "--shard", "1/2"]),
        ("nowhere.h5", 1, ["sim", "nowhere.h5", "-o", "x.csv"]),
        ("kvlag-mpi runs", 2, ["trace"]),
    ]:
        done = mpi(2, *args, cwd=tmp_path)
        ours = [x for x in done.stderr.decode().splitlines() if x.startswith("kvlag: ")]
        assert done.returncode == code and len(ours) == 1 and words in ours[0], done.stderr.decode()
        assert [p.name for p in tmp_path.iterdir()] == ["there.csv"]


@needs_mpi
def test_ranks_take_up_their_journals(folder, tmp_path):
    """Journals as a killed run leaves them: nothing is left to compute."""
    args = ["sim", *inputs(folder), *ASK, "--threads", 1, "--resume"]
    for k in 1, 2:
        part = tmp_path / f"m.csv.{k}-of-2.csv"
        journal, kept = Path(f"{part}.partial"), tmp_path / "kept"
        journal.touch()
        os.link(journal, kept)  # the name goes when the run is done, the file stays
        assert kvlag(*args, "-o", part, "--shard", f"{k}/2").returncode == 0
        kept.rename(journal)
        part.unlink(), blocks_of(part).unlink()
    done = mpi(2, *args, "-o", tmp_path / "m.csv")
    assert done.returncode == 0, done.stderr.decode()
    assert "are there already" in done.stderr.decode()
    equal(folder / "r.csv", tmp_path / "m.csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.blocks.h5", "m.csv"]


# ---- Slurm -----------------------------------------------------------------------------------------------------------


def test_the_slurm_script_as_slurm_would_run_it(folder, tmp_path):
    """Each task of the array by hand, then the merge."""
    script = ROOT / "examples/slurm.sh"
    asked = re.search(r"^#SBATCH --array=1-(\d+)", script.read_text(), re.M)
    n = int(asked[1])
    env = {**os.environ, "PATH": f"{Path(KVLAG).parent}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_COUNT": str(n),
           "SLURM_CPUS_PER_TASK": "1"}  # fmt: skip
    args = [folder / "two.h5", "-p", "h2o", "-b", "4,8,12", "-q"]
    run = lambda **more: subprocess.run(["bash", script, tmp_path / "m.csv", *map(str, args)],  # noqa: E731
                                        env={**env, **more}, capture_output=True, text=True, cwd=tmp_path)  # fmt: skip
    for k in range(1, n + 1):
        done = run(SLURM_ARRAY_TASK_ID=str(k))
        assert done.returncode == 0, done.stderr
    done = run(KVLAG_MERGE="1")
    assert done.returncode == 0, done.stderr
    sim(tmp_path / "r.csv", *args)
    equal(tmp_path / "r.csv", tmp_path / "m.csv")
