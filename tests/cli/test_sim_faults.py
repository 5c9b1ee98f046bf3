"""Whatever is wrong with a call of `kvlag`, there is one line that says so, and no file is harmed."""

import json
import os
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np
import pytest

from simcli import KVLAG, ROOT, blocks_of, kvlag, lines_of, refused, rows_of, sim, snapshot


@pytest.fixture
def here(sim_traces, tmp_path):
    """A folder of one's own with t.h5 (40 tokens, factored) and earlier results r.csv, r.blocks.h5, l.h5."""
    shutil.copy(sim_traces / "short.h5", tmp_path / "t.h5")
    sim(tmp_path / "r.csv", tmp_path / "t.h5", "-p", "h2o", "-b", 12, "--lifetimes", tmp_path / "l.h5")
    return tmp_path


# ---- what is not a trace ---------------------------------------------------------------------------------------------


def test_files_that_are_no_traces(here):
    (here / "empty").write_bytes(b"")
    (here / "text").write_text("In the beginning")
    (here / "lfs").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    (here / "hdf5").write_bytes(b"\x89HDF\r\n\x1a\n")
    with h5py.File(here / "bare.h5", "w") as f:
        f["x"] = 1
    os.mkfifo(here / "pipe")
    for name in "nowhere", "empty", "text", "lfs", "hdf5", "bare.h5", ".", "r.csv", "r.blocks.h5", "l.h5", "/dev/null":
        refused(here, 1, name, "sim", name, "-o", "new.csv")
    for name in "t.h5", "r.blocks.h5", "nowhere", "text":
        refused(here, 1, name, "sim", "t.h5", "-o", "new.csv", "--from-lifetimes", name)
    (here / "pipe").unlink()


def test_a_trace_cut_anywhere(here):
    whole = (here / "t.h5").read_bytes()
    cuts = {1, 7, 8, 100, 511, 2048, *np.linspace(2049, len(whole) - 1, 12, dtype=int)}
    for cut in sorted(map(int, cuts)):
        (here / "cut.h5").write_bytes(whole[:cut])
        refused(here, 1, "cut.h5", "sim", "cut.h5", "-o", "new.csv", "-p", "h2o", "-b", 12)


@pytest.mark.parametrize("form", ["dense", "factored"])
def test_one_flipped_byte_in_a_chunk(sim_traces, here, form):
    """In a file of ours, whose frames carry a checksum."""
    whole = (sim_traces / "real.h5").read_bytes()
    names = ["seq/0000/attn/probs"] if form == "dense" else ["seq/0000/attn/q", "seq/0000/attn/k"]
    for name in [*names, "seq/0000/attn/v", "model/wo", "seq/0000/grad/loss", "seq/0000/grad/fisher"]:
        with h5py.File(sim_traces / "real.h5") as f:
            chunk = f[name].id.get_chunk_info(f[name].id.get_num_chunks() - 1)
        damaged = bytearray(whole)
        damaged[chunk.byte_offset + chunk.size // 2] ^= 1
        (here / "bad.h5").write_bytes(damaged)
        for out in "new.csv", "r.csv":
            args = ["-o", out, "--force", "-p", "h2o", "-b", "12", "--metrics", "lost_mass,loss,out_err"]
            refused(here, 1, ["bad.h5", name, "corrupt"], "sim", "bad.h5", *args, "--attention", form)


def test_an_incomplete_trace(here):
    with h5py.File(here / "t.h5", "a") as f:
        del f.attrs["complete"]
    refused(here, 1, ["t.h5", "complete"], "sim", "t.h5", "-o", "new.csv")


def foreign(path, form, change, T=40):
    """A trace in f32 with nothing but attention; `change` gets the probabilities or queries of head 1, by step."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as f:
        f.attrs.update(format="kvlag-trace", version=1, n_layer=1, n_head=2, n_kv_head=1, head_dim=4)
        s = f.create_group("seq/0000")
        s.attrs.update(n_tokens=T, n_prompt=0)
        if form == "dense":
            p = np.tril(rng.random((1, 2, T, T)) + 0.01)
            p /= p.sum(-1, keepdims=True)
            change(p[0, 1])
            s["attn/probs"] = p.astype("f4")
        else:
            q, k = rng.normal(size=(1, 2, T, 4)), rng.normal(size=(1, 1, T, 4))
            change(q[0, 1])
            s["attn/q"], s["attn/k"] = q.astype("f4"), k.astype("f4")
        s["tokens"] = np.arange(T).astype("i4")
        f.attrs["complete"] = 1


def put(where, value):
    """At step 20."""

    def change(steps):
        steps[20, where] = value

    return change


@pytest.mark.parametrize("form, change", [
    ("dense", put(3, np.nan)), ("dense", put(3, np.inf)), ("dense", put(3, -0.25)), ("dense", put(slice(None), 0)),
    ("factored", put(3, np.nan)), ("factored", put(3, -np.inf)),
], ids=["nan", "inf", "negative", "zeros", "nan in q", "inf in q"])  # fmt: skip
def test_attention_that_is_none(tmp_path, form, change):
    foreign(tmp_path / "f.h5", form, change)
    for policy in "h2o", "oracle(mass)", "window":
        refused(tmp_path, 1, ["f.h5", "layer 0", "head 1", "row 20"], "sim", "f.h5", "-o", "new.csv", "-b", 8, "-p",
                policy, "--metrics", "lost_mass")  # fmt: skip


def whole_row_tiny(p):
    p[20] *= 1e-44


def residents_tiny(p):
    """Nobody looks at entry 0, so that it leaves, until step 20 sees nothing else."""
    p[1:20, 0] = 0
    p[20, :21] = [1] + [0, 1e-42] * 10


@pytest.mark.parametrize("change", [whole_row_tiny, residents_tiny])
def test_attention_too_small_for_f32(tmp_path, change):
    """An answer or one line, but no crash."""
    foreign(tmp_path / "f.h5", "dense", change)
    done = kvlag("sim", "f.h5", "-o", "r.csv", "-b", 8, "-p", "tova", "--metrics", "lost_mass", cwd=tmp_path)
    assert done.returncode == 0 or done.stderr.startswith(b"kvlag: ") and done.returncode == 1, done


def test_what_a_trace_lacks_is_said_by_name(sim_traces, tmp_path):
    for name in "dense.h5", "t1.h5":
        shutil.copy(sim_traces / name, tmp_path)
    for words, *args in [
        (["dense.h5", "attn/v", "out_err"], "--metrics", "out_err"),
        (["dense.h5", "attn/q"], "--attention", "factored", "--metrics", "lost_mass"),
        (["dense.h5", "logits/correct", "rmm"], "-p", "rmm(lag=2)", "-b", "12"),
        (["dense.h5", "logits/target_logprob"], "-p", "rmm(lag=2,signal=confidence)", "-b", "12"),
    ]:
        refused(tmp_path, 1, words, "sim", "dense.h5", "-o", "new.csv", *args)
    refused(tmp_path, 1, ["t1.h5", "no counted step"], "sim", "t1.h5", "-o", "new.csv")
    shutil.copy(sim_traces / "two.h5", tmp_path)  # gradients know of no step before the trace's prompt ends
    refused(tmp_path, 2, "--prompt 5", "sim", "two.h5", "-o", "new.csv", "--prompt", "5", "--metrics", "loss")


def test_two_tokens_are_enough(sim_traces, tmp_path):
    rows = sim(tmp_path / "r.csv", sim_traces / "t2.h5", "-p", "window", "-p", "full", "-b", "1,50%,2")
    assert [r["n_counted"] for r in rows] == ["1"] * 4
    assert [float(r["lost_mass"]) for r in rows] == [0] * 4  # only step 0 is counted, and it sees only itself
    assert [r["evictions"] for r in rows] == ["1", "1", "0", "0"]


# ---- what is asked for -----------------------------------------------------------------------------------------------

USAGE = [
    # budgets
    (["-b", "0"], "at least 1 budget is 1"), (["-b", "0%"], "0%"), (["-b", "101%"], "101%"), (["-b", "-8"], "-8"),
    (["-b", "1.5"], "1.5"), (["-b", "8x"], "8x"), (["-b", "8 8"], "8 8"), (["-b", "0x10"], "0x10"),
    (["-b", "nan"], "nan"), (["-b", "inf"], "inf"), (["-b", "1e30"], "1e30"), (["-b", "%"], "%"),
    (["-b", ""], "empty item"), (["-b", "8,,9"], "empty item"), (["-b", "8,"], "empty item"),
    (["-b", " "], "empty item"), (["-b", "9" * 80], "too long"),
    # lags
    (["-L", "5:1:1"], "5:1:1"), (["-L", "0:4:0"], "0:4:0"), (["-L", "0:4:x1"], "0:4:x1"), (["-L", "0:4"], "0:4"),
    (["-L", "0:4:1:9"], "0:4:1:9"), (["-L", "0:4:1x"], "0:4:1x"), (["-L", "1,,2"], "empty item"),
    (["-L", ""], "empty item"), (["-L", "-1"], "-1"), (["-L", "1.5"], "1.5"), (["-L", "0:1e9:1"], "more than"),
    (["-L", "lag"], "lag"), (["-L", "99999999999"], "99999999999"),
    # specs
    (["-p", "zzz"], "unknown policy"), (["-p", "h20"], "did you mean h2o"), (["-p", ""], "no policy"),
    (["-p", "rm m"], "rm m"), (["-p", "h2o(color=3)"], "color"), (["-p", "h2o("], "missing"),
    (["-p", "h2o()"], "empty"), (["-p", "h2o(sinks=)"], "sinks"), (["-p", "h2o(sinks=1)x"], "closing"),
    (["-p", "h2o(sinks=1,sinks=2)"], "twice"), (["-p", "h2o(recent=1,hold=2)"], "twice"),
    (["-p", "h2o(sinks=1||2)"], "empty value"), (["-p", "h2o(sinks=1x)"], "1x"), (["-p", "h2o(sinks=1 6)"], "1 6"),
    (["-p", "h2o(sinks=-1)"], "out of range"), (["-p", "h2o(sinks=1e300)"], "out of range"),
    (["-p", "h2o(8)"], "KEY=VALUE"), (["-p", "window(lag=3)"], "no lag"), (["-p", "h2o(hold=lag)"], "needs a lag"),
    (["-p", "oracle"], "oracle needs of="), (["-p", "mix"], "memory"), (["-p", "mix(memory=first:1e300)"], "first"),
    (["-p", "mix(memory=first:inf)"], "first"), (["-p", "mix(memory=ema:2)"], "ema"),
    (["-p", "mix(memory=recent:0)"], "recent"), (["-p", "mix(memory=static)"], "static"),
    (["-p", "ema(alpha=nan)"], "alpha"), (["-p", "lru(tau=1/residents)"], "tau"),
    (["-p", "window(row=max)"], "row=max"), (["-p", "h2o(hold=budget/0)"], "budget/0"),
    (["-p", "h2o(unit=city)"], "unit"), (["-p", "x" * 5000], "no policy name"),
    # points that cannot run
    (["-p", "h2o(sinks=7,hold=6)"], "sinks 7 + hold 6"), (["-p", "rmm(lag=13)"], "hold 13"),
    (["--schedule", "every:13"], "every"), (["--schedule", "watermark:0.01"], "watermark"),
    (["--schedule", "block:20"], "block"), (["--schedule", "prompt"], "prompt"),
    (["-p", "full", "-p", "streaming(sinks=13)"], "sinks 13"),
    # schedules
    (["--schedule", "every"], "every"), (["--schedule", "every:0"], "every:0"),
    (["--schedule", "every:1e99"], "every:1e99"), (["--schedule", "every:8:9"], "every:8:9"),
    (["--schedule", "watermark:2"], "watermark"), (["--schedule", "now"], "now"),
    # other options
    (["--metrics", "junk"], "junk"), (["--metrics", ""], "''"), (["--metrics", "lost_mass,"], "''"),
    (["--unit", "city"], "city"), (["--pending", "no"], "no"), (["--attention", "both"], "both"),
    (["--prompt", "41"], "40 tokens"), (["--prompt", "-1"], "-1"), (["--prompt", "4x"], "4x"),
    (["--seed", "-1"], "-1"), (["--seed", "1e3"], "1e3"), (["--seed", "9" * 30], "range"),
    (["--threads", "0"], "range"), (["--threads", "99999"], "range"), (["--threads", " 2"], "' 2'"),
    (["--threads", ""], "''"), (["--memory", "1"], "range"), (["--memory", "5 "], "'5 '"), (["--memory", "1Q"], "1Q"),
    (["--memory", "9" * 25], "range"), (["--memory", "99999999999G"], "range"),
    (["--threads", "2", "--threads", "3"], "twice"), (["-b", "9", "--budget=8"], "twice"),
    (["--threads"], "needs a value"), (["-b"], "needs a value"), (["--force=1"], "no value"), (["-x"], "-x"),
    (["-vx"], "-x"), (["--shcedule", "step"], "did you mean --schedule"), (["--qwertyuiop"], "--qwertyuiop"),
    (["---"], "option"), (["--lifetimes", ""], "empty"), (["--from-lifetimes", "l.h5"], "--from-lifetimes"),
]  # fmt: skip


def test_usage(here):
    for args, words in USAGE:
        given = {"-p", "-b"} - set(args)
        rest = [
            x for option, value in (("-p", "rmm(lag=2)"), ("-b", "12")) if option in given for x in (option, value)
        ]
        if "-L" in args:
            rest = ["-b", "12", "-p", "rmm"]
        if any(a.startswith("--budget") for a in args):
            rest = ["-p", "window"]
        words = "a budget is 1" if "budget is 1" in words else words
        refused(here, 2, words, "sim", "t.h5", "-o", "new.csv", *rest, *args)


def test_usage_of_the_whole(here):
    for call, words in {
        "": "no command", "smi": "did you mean sim", "frobnicate": "frobnicate", "--bogus": "--bogus",
        "help smi": "did you mean sim", "help sim trace": "at most one",
        "policies rmmm": "did you mean rmm", "policies rmm h2o": "at most one",
        "policies --jsn": "--json", "info": "FILE", "sim": "no TRACE", "sim t.h5": "-o", "sim -o new.csv": "no TRACE",
        "sim t.h5 -o": "-o", "sim t.h5 -o a.csv -o b.csv": "twice", "sim -- -o a.csv": "-o",
        "sim t.h5 t.h5 -o a.csv --lifetimes b.h5": "one trace",
        "sim t.h5 t.h5 -o a.csv --from-lifetimes l.h5": "one trace",
    }.items():  # fmt: skip
        refused(here, 2, words, *call.split())
    refused(here, 2, "''", "")


def test_an_error_in_the_last_trace_is_found_first(here, sim_traces):
    """Nothing is swept before everything that can be checked was checked: quick, and with one line."""
    shutil.copy(sim_traces / "t1.h5", here / "z.h5")
    refused(here, 1, "z.h5", "sim", "t.h5", "z.h5", "-o", "new.csv", "-b", 8, "-p", "window")
    refused(here, 2, "hold 39", "sim", "t.h5", "-o", "new.csv", "-b", 12, "-p", "h2o", "-p", "rmm(lag=39)")


def test_help_is_not_an_error(here):
    for call in "-h", "--help", "help", "help sim", "help -h", "--version", "sim --help", "sim -h", "sim t.h5 -qh", \
                "sim t.h5 -b 12 --help", "policies rmm --help":  # fmt: skip
        args = call.split()
        done = kvlag(*args, cwd=here)
        assert (done.returncode, done.stderr) == (0, b"") and done.stdout, args


def test_nothing_left_of_a_grid(here):
    """Skipped points are named, then one line says that none is left."""
    before = snapshot(here)
    done = kvlag("sim", "t.h5", "-o", "new.csv", "-p", "rmm", "-L", "30,31", "-b", "4", cwd=here)
    said = done.stderr.decode().splitlines()
    assert done.returncode == 2 and len(said) == 3
    assert said[0].startswith("skipped rmm budget 4 lag 30: ") and said[-1] == "kvlag: no configuration is left to run"
    assert snapshot(here) == before


def test_too_many_configurations(here):
    many = "|".join(map(str, range(60)))
    refused(here, 2, "configurations", "sim", "t.h5", "-o", "new.csv", "-b", "12",
            "-p", f"random(sinks={many},hold={many},seed={many})", timeout=20)  # fmt: skip


# ---- where it goes ---------------------------------------------------------------------------------------------------


def test_outputs_that_harm_nothing(here):
    os.symlink("t.h5", here / "sym.csv")
    os.link(here / "t.h5", here / "hard.csv")
    os.symlink(here, here / "again")
    (here / "folder.csv").mkdir()
    shutil.copy(here / "t.h5", here / "in.blocks.h5")
    os.mkfifo(here / "pipe.csv")
    base = ["sim", "t.h5", "-p", "h2o", "-b", "12"]
    for code, words, *args in [
        (2, ["r.csv", "--force"], "-o", "r.csv"),
        (2, "t.h5", "-o", "t.h5", "--force"),
        (2, "input", "-o", "again/./t.h5", "--force"),
        (2, "input", "-o", "sym.csv", "--force"),
        (2, "input", "-o", "hard.csv", "--force"),
        (2, "input", "-o", "new.csv", "--lifetimes", "t.h5", "--force"),
        (2, "input", "-o", "new.csv", "--lifetimes", "sym.csv", "--force"),
        (2, "twice", "-o", "new.csv", "--lifetimes", "new.csv"),
        (2, "twice", "-o", "new.csv", "--lifetimes", "again/new.csv"),
        (2, "twice", "-o", "new.csv", "--lifetimes", "new.blocks.h5"),
        (2, "twice", "-o", "r.csv", "--lifetimes", "./r.csv", "--force"),
        (2, "l.h5", "-o", "new.csv", "--lifetimes", "l.h5"),
        (2, "folder", "-o", "folder.csv", "--force"),
        (2, "regular", "-o", "pipe.csv", "--force"),
        (2, "regular", "-o", "/dev/null", "--force"),
        (2, "empty", "-o", ""),
        (1, "nowhere/new.csv", "-o", "nowhere/new.csv"),
        (1, "t.h5/new.csv", "-o", "t.h5/new.csv"),
        (1, "/proc/new.csv", "-o", "/proc/new.csv"),
        (1, "name", "-o", "x" * 300 + ".csv"),
        (1, "nowhere/l.h5", "-o", "new.csv", "--lifetimes", "nowhere/l.h5"),
    ]:  # fmt: skip
        refused(here, code, words, *base, *args)
    # The blocks beside the CSV: there already, or the trace itself.
    (here / "r.csv").rename(here / "old.csv")
    refused(here, 2, "r.blocks.h5", *base, "-o", "r.csv")
    refused(here, 2, "input", "sim", "in.blocks.h5", "-p", "h2o", "-b", "12", "-o", "in.csv", "--force")
    given = ["sim", "t.h5", "--from-lifetimes", "l.h5", "--force"]
    refused(here, 2, "input", *given, "-o", "l.h5")
    refused(here, 2, "input", *given, "-o", "new.csv", "--lifetimes", "l.h5")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(here):
    here.chmod(0o555)
    try:
        refused(here, 1, "new.csv", "sim", "t.h5", "-o", "new.csv")
        refused(here, 1, "r.csv", "sim", "t.h5", "-o", "r.csv", "--force")
    finally:
        here.chmod(0o755)


@pytest.mark.skipif(b"__tsan_" in Path(KVLAG).read_bytes(), reason="this sanitizer writes files of its own")
@pytest.mark.parametrize("force", [False, True])
def test_a_full_disk(here, force):
    """Under every limit on file size: all outputs whole and no others, or one line and every file as it was."""
    args = ["sim", "t.h5", "-p", "h2o", "-p", "random", "-b", "4,8,12,16", "-q"]
    args += ["-o", "r.csv", "--force"] if force else ["-o", "new.csv"]
    done = 0
    for limit in 0, 100, 1000, 2000, 6000, 12000, 30000, 1 << 20:
        before = snapshot(here)
        ran = kvlag(*args, cwd=here, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        if ran.returncode == 0:
            done += 1
            break
        assert ran.returncode == 1 and ran.stderr.startswith(b"kvlag: ") and ran.stderr.count(b"\n") == 1, ran.stderr
        assert b"File too large" in ran.stderr, ran.stderr
        assert snapshot(here) == before, limit
    assert done and not list(here.glob("*.tmp"))


@pytest.mark.skipif(b"__tsan_" in Path(KVLAG).read_bytes(), reason="this sanitizer writes files of its own")
def test_a_full_disk_while_lifetimes_are_written(here):
    args = ["sim", "t.h5", "-b", "25%,50%", "-q", "-o", "r.csv", "--lifetimes", "l.h5", "--force"]
    before = snapshot(here)
    for limit in 3000, 12000, 40000:
        ran = kvlag(*args, cwd=here, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        assert ran.returncode == 1 and ran.stderr.count(b"\n") == 1, ran.stderr
        assert snapshot(here) == before, limit


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_in_the_middle(sim_traces, here, sent):
    before = snapshot(here)
    # 191 configurations: a second and more.
    args = [
        "-o",
        "r.csv",
        "--lifetimes",
        "l.h5",
        "--force",
        "-p",
        "rmm",
        "-L",
        "0:190:1",
        "-b",
        "200",
        "--threads",
        "1",
    ]
    args += ["--metrics", "out_err=exact"]
    # A shell's background job inherits SIGINT as ignored, and kvlag respects that.
    heard = lambda: signal.signal(sent, signal.SIG_DFL)  # noqa: E731
    child = subprocess.Popen([KVLAG, "sim", sim_traces / "real.h5", *args], stderr=subprocess.PIPE, cwd=here,
                             preexec_fn=heard)
    end = time.monotonic() + 20
    while len(list(here.glob("*.tmp"))) < 2 and time.monotonic() < end:
        time.sleep(0.002)
    child.send_signal(sent)
    _, said = child.communicate(timeout=20)
    assert child.returncode == 128 + sent, (child.returncode, said)
    assert snapshot(here) == before


def test_nohup_stays_in_force(sim_traces, tmp_path):
    args = ["-o", tmp_path / "r.csv", "-q", "-p", "rmm", "-L", "0:60:1", "-b", "100", "--threads", "1"]
    child = subprocess.Popen([KVLAG, "sim", sim_traces / "real.h5", *args],
                             preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))  # fmt: skip
    while not list(tmp_path.iterdir()):
        time.sleep(0.002)
    child.send_signal(signal.SIGHUP)
    assert child.wait(timeout=30) == 0


# ---- standard streams ------------------------------------------------------------------------------------------------


def test_standard_output_that_takes_nothing():
    with open("/dev/full", "w") as full:
        for args in ["policies"], ["policies", "--json"], ["help"], ["sim", "--help"], ["--version"]:
            done = subprocess.run([KVLAG, *args], stdout=full, stderr=subprocess.PIPE)
            assert done.returncode == 1, args
            assert done.stderr == b"kvlag: standard output: No space left on device\n", args
    done = subprocess.run([KVLAG, "policies"], stderr=subprocess.PIPE, preexec_fn=lambda: os.close(1))
    assert done.returncode == 1
    assert done.stderr.startswith(b"kvlag: standard output: ") and done.stderr.count(b"\n") == 1
    piped = subprocess.run(
        ["bash", "-c", f"'{KVLAG}' policies --json | true; echo ${{PIPESTATUS[0]}}"], capture_output=True
    )
    assert piped.stdout.strip() in (b"0", b"1", b"141") and piped.stderr.count(b"\n") <= 1, piped


def test_closed_streams_do_not_reach_the_files(here):
    """A file opened as number 2 must not receive what is said on stderr."""
    args = ["sim", "t.h5", "-p", "h2o", "-b", "12,16", "--force"]
    assert kvlag(*args, "-o", "a.csv", "--lifetimes", "la.h5", cwd=here).returncode == 0

    def close_all():
        for fd in 0, 1, 2:
            os.close(fd)

    done = subprocess.run([KVLAG, *args, "-v", "-o", "b.csv", "--lifetimes", "lb.h5"], cwd=here, preexec_fn=close_all)
    assert done.returncode == 0
    for a, b in ("a.csv", "b.csv"), ("a.blocks.h5", "b.blocks.h5"), ("la.h5", "lb.h5"):
        assert (here / a).read_bytes() == (here / b).read_bytes(), b


# ---- calibrations ----------------------------------------------------------------------------------------------------


def calibration(**other):
    families = {name: {"n": 2, "log_c": 0.4} for name in ("window", "static", "attention", "oracle")}
    facts = {"format": "kvlag-calibration", "version": 1, "model": "tiny", "n_tokens": 300, "budgets": "40", "n": 9}
    return {**facts, "log_c": 0.4, "s": 0.3, "families": families, **other}


BAD_FIELDS = [
    {"format": "x"}, {"version": 2}, {"n": 1}, {"n": "9"}, {"log_c": 1e300}, {"s": -1}, {"families": {}}, {"families": 3},
    {"model": 5},
]  # fmt: skip


def test_calibrations(sim_traces, tmp_path):
    shutil.copy(sim_traces / "real.h5", tmp_path / "t.h5")
    args = ["sim", "t.h5", "-p", "h2o", "-b", "40", "-o", "new.csv", "--calibration", "c.json"]
    refused(tmp_path, 1, "c.json", *args)
    whole = json.dumps(calibration())
    bad = ["", "{", "[]", "{}", "7", whole[: len(whole) // 2], "x" * (1 << 21), whole.replace('"s"', '"t"')]
    for text in bad + [json.dumps(calibration(**x)) for x in BAD_FIELDS]:
        (tmp_path / "c.json").write_text(text)
        refused(tmp_path, 1, "c.json", *args)
    (tmp_path / "c.json").write_text(json.dumps(calibration(model='a\n,"b')))
    (row,) = sim(tmp_path / "new.csv", "t.h5", "-p", "h2o", "-b", 40, "--calibration", "c.json", cwd=tmp_path)
    assert float(row["kl_est"]) == pytest.approx(np.exp(0.4) * float(row["fisher"]), rel=1e-6)
    assert len(lines_of(tmp_path / "new.csv")[0]) >= 5
    (tmp_path / "c.csv").write_text(json.dumps(calibration()))
    refused(tmp_path, 2, "input", *args[:-4], "--calibration", "c.csv", "-o", "c.csv", "--force")
    refused(
        tmp_path, 2, "gradients", *args[:-4], "-o", "other.csv", "--calibration", "c.csv", "--metrics", "lost_mass"
    )


# ---- odd names -------------------------------------------------------------------------------------------------------


def test_odd_names(here):
    odd = 'a "b", c\nd;$(e)\'.h5'
    shutil.copy(here / "t.h5", here / odd)
    rows = sim(here / "x y.csv", odd, "-p", "h2o", "-b", "12", "-p", "rmm(lag=13|2)", cwd=here)
    assert {r["trace"] for r in rows} == {odd[:-3]} and len(rows) == 2
    comments, _ = lines_of(here / "x y.csv")
    assert len(comments) == 6 and b"?" in comments[1], comments
    assert rows_of(here / "x y.csv") and blocks_of(here / "x y.csv").exists()
    shutil.copy(here / "t.h5", here / "-b")
    assert kvlag("sim", "-o", "dash.csv", "-p", "h2o", "-b", "12", "--", "-b", cwd=here).returncode == 0
    assert [r["trace"] for r in rows_of(here / "dash.csv")] == ["-b"]


# ---- kvlag trace -----------------------------------------------------------------------------------------------------


def test_a_model_cut_anywhere(sim_traces, tmp_path):
    whole = (sim_traces / "tiny.gguf").read_bytes()
    (tmp_path / "t.txt").write_text("And God saw the light, that it was good.\n" * 4)
    for cut in sorted({0, 3, 4, 20, *map(int, np.linspace(21, len(whole) - 1, 12))}):
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        refused(tmp_path, 1, "cut.gguf", "trace", "cut.gguf", "t.txt", "-o", "new.h5")


def test_texts_too_short_to_trace(sim_traces, tmp_path):
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "one.txt").write_bytes(b"a")
    for name in "empty.txt", "one.txt", "nowhere.txt", ".":
        refused(tmp_path, 1, name, "trace", sim_traces / "tiny.gguf", name, "-o", "new.h5")
    genesis = ROOT / "demo/genesis.txt"
    refused(tmp_path, 2, "--tokens", "trace", sim_traces / "tiny.gguf", genesis, "-o", "new.h5", "--tokens", "x")


def test_a_hold_of_nothing_is_warned_of(here):
    done = kvlag("sim", here / "t.h5", "-o", here / "r.csv", "-p", "h2o(recent=0)", "-b", "20", "--force")
    assert done.returncode == 0 and b"newest entry is always the lowest" in done.stderr
    done = kvlag("sim", here / "t.h5", "-o", here / "s.csv", "-p", "h2o(recent=1)", "-p", "tova", "-b", "20")
    assert done.returncode == 0 and b"newest" not in done.stderr
