"""kvlag sim --resume: whatever stopped a run, taking it up gives the bytes of a run that nothing stopped."""

import fcntl
import os
import re
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from simcli import KVLAG, blocks_of, closing, killed_after, kvlag, refused, sim, snapshot

TSAN = b"__tsan_" in Path(KVLAG).read_bytes()
# 41 lags and a few more, in two sequences: several passes each.
ASK = ["-p", "rmm", "-p", "h2o", "-p", "random", "-p", "full", "-b", "50", "-L", "0:40:1"]


@pytest.fixture(scope="module")
def folder(sim_traces, tmp_path_factory):
    """t.h5 with two sequences; r.csv and l.h5 of an undisturbed run; journal: all that a run with --resume kept."""
    here = tmp_path_factory.mktemp("resume")
    shutil.copy(sim_traces / "two.h5", here / "t.h5")
    sim(here / "r.csv", here / "t.h5", *ASK, "--lifetimes", here / "l.h5")
    for name, more in ("journal", []), ("journal_l", ["--lifetimes", here / "x.h5"]):
        (here / "x.csv.partial").touch()
        os.link(here / "x.csv.partial", here / name)  # the name goes when the run is done, the file stays
        sim(here / "x.csv", here / "t.h5", *ASK, "--resume", *more)
        assert not (here / "x.csv.partial").exists()
        equal(here / "r.csv", here / "x.csv")
        (here / "x.csv").unlink(), blocks_of(here / "x.csv").unlink()
    assert (here / "x.h5").read_bytes() == (here / "l.h5").read_bytes()
    return here


@pytest.fixture
def here(folder, tmp_path):
    shutil.copy(folder / "t.h5", tmp_path)
    return tmp_path


def equal(a, b):
    assert Path(a).read_bytes() == Path(b).read_bytes()
    assert blocks_of(a).read_bytes() == blocks_of(b).read_bytes()


def resume(here, *more, **options):
    return kvlag("sim", "t.h5", *ASK, "-o", "x.csv", "--resume", *more, cwd=here, **options)


def taken_up(done):
    assert done.returncode == 0, done.stderr.decode()
    found = re.search(r"(\d+) of (\d+) configurations are there already", done.stderr.decode())
    return int(found[1]) if found else 0


def header_end(journal):
    at = 0
    for _ in range(3):
        at = journal.index(b"\n", at) + 1
    return at


# ---- the same bytes --------------------------------------------------------------------------------------------------


def test_a_journal_cut_anywhere(folder, here):
    whole = (folder / "journal").read_bytes()
    start = header_end(whole)
    record = 24 + int.from_bytes(whole[start + 8:start + 16], "little")
    units = (len(whole) - start) // record
    assert units > 70 and (len(whole) - start) % record == 0  # the sequences have the same heads
    for cut, there in [(0, 0), (1, 0), (start - 1, 0), (start, 0), (start + 1, 0), (start + record - 1, 0),
                       (start + record, 1), (start + 40 * record, 40), (start + 40 * record + 23, 40),
                       (start + 40 * record + 24, 40), (len(whole) - 1, units - 1), (len(whole), units)]:  # fmt: skip
        (here / "x.csv.partial").write_bytes(whole[:cut])
        done = resume(here)
        assert taken_up(done) == there, cut
        torn = cut > start and (cut - start) % record != 0
        assert (b"torn or damaged" in done.stderr) == torn, (cut, done.stderr)
        equal(folder / "r.csv", here / "x.csv")
        assert not (here / "x.csv.partial").exists()
        (here / "x.csv").unlink(), (here / "x.blocks.h5").unlink()


def test_a_damaged_byte_anywhere_in_a_record(folder, here):
    whole = bytearray((folder / "journal").read_bytes())
    start = header_end(whole)
    record = 24 + int.from_bytes(whole[start + 8:start + 16], "little")
    for at in 0, 8, 16, 24, 100, record - 1:
        broken = bytearray(whole)
        broken[start + 50 * record + at] ^= 1
        (here / "x.csv.partial").write_bytes(broken)
        done = resume(here, "--force")
        assert taken_up(done) == 50 and b"record 50 is torn or damaged" in done.stderr
        equal(folder / "r.csv", here / "x.csv")


def test_records_that_are_in_the_wrong_place(folder, here):
    whole = (folder / "journal").read_bytes()
    start = header_end(whole)
    record = 24 + int.from_bytes(whole[start + 8:start + 16], "little")
    (here / "x.csv.partial").write_bytes(whole[:start] + whole[start + record:])
    assert taken_up(resume(here)) == 0
    equal(folder / "r.csv", here / "x.csv")


def test_lifetimes_are_taken_up_too(folder, here):
    whole = (folder / "journal_l").read_bytes()
    (here / "x.csv.partial").write_bytes(whole[:len(whole) * 2 // 3])
    assert taken_up(resume(here, "--lifetimes", "l.h5")) > 40
    equal(folder / "r.csv", here / "x.csv")
    assert (here / "l.h5").read_bytes() == (folder / "l.h5").read_bytes()


def test_lifetimes_that_were_given(folder, here):
    shutil.copy(folder / "l.h5", here)
    args = ["sim", "t.h5", "--from-lifetimes", "l.h5", "-o", "x.csv", "--memory", "2M"]
    assert kvlag(*args, cwd=here).returncode == 0
    (here / "x.csv").rename(here / "r.csv"), (here / "x.blocks.h5").rename(here / "r.blocks.h5")
    killed = killed_after(here, "x.csv.partial", 3000, *args, "--resume")
    done = kvlag(*args, "--resume", cwd=here)
    assert (taken_up(done) > 0) >= killed
    equal(here / "r.csv", here / "x.csv")


def test_other_memory_and_threads(folder, here):
    whole = (folder / "journal").read_bytes()
    (here / "x.csv.partial").write_bytes(whole[:len(whole) // 2])
    done = resume(here, "--memory", "2M", "--threads", "3", env={**os.environ, "KVLAG_KERNELS": "portable"})
    assert taken_up(done) > 30
    equal(folder / "r.csv", here / "x.csv")


# ---- killed ----------------------------------------------------------------------------------------------------------


def test_killed_again_and_again(folder, here):
    args = ["sim", "t.h5", *ASK, "-o", "x.csv", "--resume", "--threads", "1"]
    killed, size = 0, 0
    for _ in range(20):
        if not killed_after(here, "x.csv.partial", size, *args):
            break
        killed += 1
        now = (here / "x.csv.partial").stat().st_size
        assert now >= size  # nothing that was finished is lost
        size = now
    else:
        assert kvlag(*args, cwd=here).returncode == 0
    assert killed > 1
    equal(folder / "r.csv", here / "x.csv")
    assert sorted(p.name for p in here.iterdir()) == ["t.h5", "x.blocks.h5", "x.csv"]


@pytest.mark.skipif(TSAN, reason="this sanitizer writes files of its own")
def test_a_full_disk(folder, here):
    """Under a limit on file size the journal fills up; what is in it stays and is taken up."""
    whole = (folder / "journal").stat().st_size
    before = snapshot(here)
    for share in 0, 0.3, 0.6, 0.9:
        limit = int(whole * share)
        done = resume(here, "-q", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        said = done.stderr.decode()
        assert done.returncode == 1 and said.startswith("kvlag: ") and said.count("\n") == 1, said
        assert "File too large" in said
        left = snapshot(here)
        journal = left.pop(here / "x.csv.partial", b"")
        assert left == before and len(journal) <= limit and (share < 0.3 or len(journal) > whole * (share - 0.1))
        if share >= 0.3:
            assert "--resume" in said
    assert taken_up(resume(here)) > 60
    equal(folder / "r.csv", here / "x.csv")


# ---- two at once, and what is refused --------------------------------------------------------------------------------


def test_a_journal_that_is_in_use(here):
    with open(here / "x.csv.partial", "w") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        refused(here, 2, "x.csv.partial: another process is at work on it", "sim", "t.h5", *ASK,
                "-o", "x.csv", "--resume")  # fmt: skip
    assert taken_up(resume(here)) == 0


def test_two_processes_at_once(folder, here):
    """One does the work; the other says that somebody is at it, or that it is done."""
    both = [subprocess.Popen([KVLAG, "sim", "t.h5", *ASK, "-o", "x.csv", "--resume", "-q"], cwd=here,
                             stderr=subprocess.PIPE) for _ in range(2)]  # fmt: skip
    said = [child.communicate(timeout=60)[1] for child in both]
    assert min(c.returncode for c in both) == 0, said
    for child, words in zip(both, said):
        assert child.returncode == 0 or b"at work on it" in words or b"already there" in words
        assert words.count(b"\n") <= 1
    equal(folder / "r.csv", here / "x.csv")
    assert sorted(p.name for p in here.iterdir()) == ["t.h5", "x.blocks.h5", "x.csv"]


def test_two_processes_without_a_journal(sim_traces, here):
    """Whoever is second leaves the first one's file alone."""
    args = [KVLAG, "sim", sim_traces / "real.h5", "-p", "rmm", "-L", "0:190:1", "-b", "200", "-o", "x.csv"]
    slow = subprocess.Popen([*args, "--threads", "1", "--metrics", "out_err=exact"], cwd=here, stderr=subprocess.PIPE)
    while not list(here.glob("*.tmp")):
        assert slow.poll() is None
    slow.send_signal(signal.SIGSTOP)
    try:
        sim(here / "x.csv", "t.h5", "-p", "h2o", "-b", "9", cwd=here)
        before = snapshot(here)
    finally:
        slow.send_signal(signal.SIGCONT)
    _, said = slow.communicate(timeout=60)
    # It had begun its outputs when it was stopped, or not quite.
    assert slow.returncode in (1, 2) and said.count(b"\n") == 1, said
    assert b"another process wrote it meanwhile" in said or b"already there" in said, said
    assert snapshot(here) == {p: x for p, x in before.items() if p.suffix != ".tmp"}


def test_journals_of_other_work(folder, here):
    whole = (folder / "journal").read_bytes()
    (here / "x.csv.partial").write_bytes(whole)
    go = ["sim", "t.h5", "-o", "x.csv", "--resume"]
    refused(here, 2, ["x.csv.partial", "another command", "rmm"], *go, "-p", "h2o", "-b", "50")
    refused(here, 2, ["x.csv.partial", "same command", "remove"], *go, *ASK, "--shard", "1/2")
    refused(here, 2, ["x.csv.partial", "same command", "lifetimes"], *go, *ASK, "--lifetimes", "l.h5")
    at = header_end(whole)
    (here / "x.csv.partial").write_bytes(whole[:at].replace(b"kvlag 0.1.0", b"kvlag 0.0.9") + whole[at:])
    refused(here, 2, ["x.csv.partial", "version"], *go, *ASK)
    for content in b"x", b"# kvlag results v1\n", b"kvlag journal v2\n", os.urandom(5000):
        (here / "x.csv.partial").write_bytes(content)
        refused(here, 2, "x.csv.partial: is no journal", *go, *ASK)
    (here / "x.csv.partial").unlink()
    (here / "x.csv.partial").mkdir()
    refused(here, 1, "x.csv.partial", *go, *ASK)


def test_a_journal_of_a_trace_that_changed(sim_traces, folder, here):
    from make_traces import write_trace

    shutil.copy(folder / "journal", here / "x.csv.partial")
    write_trace(here / "t.h5", 77, seqs=[dict(T=90, forms=("factored",), n_prompt=20, fisher=1),
                                         dict(T=70, forms=("factored",), n_prompt=11, fisher=1)])  # fmt: skip
    refused(here, 2, ["x.csv.partial", "same command", "traces"], "sim", "t.h5", *ASK, "-o", "x.csv", "--resume")


def test_without_the_option_a_journal_is_mentioned_and_kept(folder, here):
    shutil.copy(folder / "journal", here / "x.csv.partial")
    done = kvlag("sim", "t.h5", *ASK, "-o", "x.csv", cwd=here)
    assert done.returncode == 0 and b"x.csv.partial: unfinished work" in done.stderr and b"--resume" in done.stderr
    assert (here / "x.csv.partial").read_bytes() == (folder / "journal").read_bytes()
    equal(folder / "r.csv", here / "x.csv")
    refused(here, 2, "already there", "sim", "t.h5", *ASK, "-o", "x.csv", "--resume")
    assert taken_up(resume(here, "--force")) > 70
    equal(folder / "r.csv", here / "x.csv")


def test_a_run_that_fails_at_once_leaves_no_journal(sim_traces, here):
    refused(here, 2, "--memory", "sim", sim_traces / "real.h5", *ASK, "-o", "x.csv", "--resume", "--memory", "1M",
            "--metrics", "out_err=exact")  # fmt: skip


def test_passes_are_bounded_only_with_a_journal(sim_traces, here):
    seeds = "|".join(map(str, range(40)))
    args = ["sim", sim_traces / "short.h5", "-p", f"random(seed={seeds})", "-b", "10"]
    passes = lambda *more: closing(kvlag(*args, *more, cwd=here).stderr.decode())["passes"]  # noqa: E731
    assert passes("-o", "x.csv", "--resume") == 2 and passes("-o", "y.csv") == 1
    equal(here / "y.csv", here / "x.csv")
