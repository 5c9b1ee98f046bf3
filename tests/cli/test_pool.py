"""`kvlag sim --pool`: one request in a pool of its budget is `sim`, threads do not matter, nonsense is refused by name."""

import numpy as np
import pytest

from simcli import ROOT, kvlag, lines_of, refused, rows_of, sim, snapshot
from tracefile import read_lifetimes

SAMPLE = ROOT / "traces/samples/tiny-scripture.h5"
IDENTITIES = [  # policy, pool, more for both
    ("h2o", 48, []), ("window", 48, []), ("tova", 40, []), ("rmm(lag=8)", 48, []), ("lru", 30, ["--unit", "layer"]),
    ("random", 33, ["--seed", 5]), ("lagkv(lag_size=8)", 60, []), ("snapkv(window=8,hold=8)", 50, ["--prompt", 50]),
    ("caote", 40, []), ("h2o", 40, ["--prompt", 30]), ("then(streaming,h2o)", 40, ["--prompt", 40]), ("lag(4,ema)", 40, []),
    ("window(hold=24)", 24, []), ("h2o", 500, []), ("full", 192, []), ("h2o", 48, ["--schedule", "every:4"]),
    ("tova(hold=4)", 48, ["--schedule", "block:4"]), ("h2o", 48, ["--schedule", "watermark:0.7"]),
]  # fmt: skip


def pair(folder, policy, pool, both, alone=(), shared=()):
    """Rows and lifetimes of `sim -b POOL` and of a pool with this one request."""
    found = []
    for name, args in ("a", ["-b", pool, *alone]), ("b", ["--pool", pool, *shared]):
        lifetimes = folder / f"{name}.h5"
        (row,) = sim(folder / f"{name}.csv", SAMPLE, "-p", policy, *both, *args, "-q", "--lifetimes", lifetimes,
                     "--metrics", "loss,out_err")  # fmt: skip
        ((_, seqs),) = read_lifetimes(lifetimes)
        found += [row, seqs[0][1]]
    return found


def assert_same(a, b, pool):
    assert {k: b[k] for k in a if k != "budget_asked"} == {k: v for k, v in a.items() if k != "budget_asked"}
    assert b["budget_asked"] == f"pool:{pool}" and b["arrival"] == b["waited"] == "0"


@pytest.mark.parametrize("policy,pool,both", IDENTITIES)
def test_one_request_in_a_pool_of_its_budget_is_sim(tmp_path, policy, pool, both):
    a, at, b, bt = pair(tmp_path, policy, pool, both)
    assert_same(a, b, pool)
    np.testing.assert_array_equal(at, bt)


@pytest.mark.parametrize("policy", ["h2o", "tova(unit=head)", "streaming"])
@pytest.mark.parametrize("rule", ["fair", "lowest"])
def test_the_pools_watermark_is_the_schedules(tmp_path, policy, rule):
    a, at, b, bt = pair(tmp_path, policy, 40, [], ["--schedule", "watermark:0.75"],
                        ["--pool-watermark", 0.75, "--pool-rule", rule])  # fmt: skip
    np.testing.assert_array_equal(at, bt)
    assert a["dloss_est"] == b["dloss_est"] and a["evict_batches"] == b["evict_batches"]


def test_a_cap_in_a_pool_with_room_is_sim(sim_traces, tmp_path):
    args = sim_traces / "two.h5", "-q", "-p", "h2o", "-b", "25%"
    alone, pooled = sim(tmp_path / "a.csv", *args), sim(tmp_path / "b.csv", *args, "--pool", 80)
    for a, b in zip(alone, pooled, strict=True):
        assert b["budget_asked"] == "pool:80" and b["budget"] == a["budget"]
        assert_same(a, b, 80)


def test_threads_and_company_change_no_byte(sim_traces, tmp_path):
    seen = []
    for threads in 1, 3:
        args = ["two.h5", "-p", "h2o(hold=4)", "-p", "window", "--pool", 44, "--arrivals", 7, "--threads", threads]
        done = kvlag("sim", *args, "-o", tmp_path / "r.csv", "--lifetimes", tmp_path / "r.h5", "--force", cwd=sim_traces)
        assert done.returncode == 0, done.stderr
        seen.append([done.stdout, *snapshot(tmp_path).values()])
    assert seen[0] == seen[1]
    assert len(seen[0]) == 4 and all(seen[0])
    table = seen[0][0].decode().splitlines()
    assert table[0] == "pool of 44 entries, rule fair" and table[1].split() == ["seq", "arrival", "waited", "held",
                                                                               "dloss_est", "spec"]  # fmt: skip
    assert len(table) == 5 and table[-1].startswith("Jain's index of entries held ")


def test_lifetimes_are_priced_alike(sim_traces, tmp_path):
    trace = sim_traces / "two.h5"
    pooled = sim(tmp_path / "a.csv", trace, "-q", "-p", "h2o(hold=4)", "--pool", 44, "--lifetimes", tmp_path / "a.h5")
    given = sim(tmp_path / "b.csv", trace, "-q", "--from-lifetimes", tmp_path / "a.h5")
    assert [r["seq"] for r in given] == ["0", "1"]
    for a, b in zip(pooled, given, strict=True):
        assert {k: a[k] for k in b if k != "score_updates"} == {k: v for k, v in b.items() if k != "score_updates"}


def test_verify_runs_a_pools_lifetimes(sim_traces, tmp_path):
    sim(tmp_path / "a.csv", sim_traces / "real.h5", "-q", "-p", "window", "--pool", 40, "--lifetimes", tmp_path / "a.h5")
    done = kvlag("verify", sim_traces / "tiny.gguf", sim_traces / "real.h5", "-o", tmp_path / "t.csv",
                 "--from-lifetimes", tmp_path / "a.h5")  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    (row,) = rows_of(tmp_path / "t.csv")
    assert row["budget_asked"] == "pool:40" and float(row["true_kl"]) > 0


def test_a_file_says_who_comes(sim_traces, tmp_path):
    (tmp_path / "q.csv").write_text('budget,policy,seq,arrival\r\n,"rmm(lag=4,hold=2)",1,9\r\n25%,h2o,0,2\r\n')
    args = sim_traces / "two.h5", "-q", "--pool", 44, "--requests", tmp_path / "q.csv"
    rows = sim(tmp_path / "r.csv", *args)
    assert [(r["seq"], r["policy"], r["budget"], r["arrival"], r["waited"]) for r in rows] == [
        ("1", "rmm", "44", "9", "0"), ("0", "h2o", "22", "2", "0")]  # fmt: skip
    comments = b"".join(lines_of(tmp_path / "r.csv")[0])
    assert b"--requests q.csv" in comments and b"# pool: 44 entries, evicted down to 44, rule fair, 2 requests" in comments
    # Sequences that are not named do not take part.
    (tmp_path / "q.csv").write_text("seq,arrival,policy\n1,0,window\n")
    (row,) = sim(tmp_path / "r.csv", *args)
    assert row["seq"] == "1"


def test_who_finds_no_room_waits(sim_traces, tmp_path):
    rows = sim(tmp_path / "r.csv", sim_traces / "two.h5", "-q", "-p", "h2o", "--pool", 60)  # each reserves 31
    assert [r["waited"] for r in rows] == ["0", str(90 - 20 + 1)]
    assert rows[1]["held"] != "" and float(rows[1]["held"]) <= 60
    done = kvlag("sim", sim_traces / "two.h5", "-o", tmp_path / "r.csv", "--force", "-p", "h2o", "--pool", 60)
    assert b"seq 1 waits 71 steps: h2o reserves 31 of 60 entries" in done.stderr


@pytest.mark.parametrize("words,args", [
    ("--pool", ["--requests", "q.csv", "-p", "h2o"]), ("--pool", ["--arrivals", 3, "-p", "h2o"]),
    ("--pool", ["--pool-rule", "fair", "-p", "h2o"]), ("--pool", ["--pool-watermark", 0.5, "-p", "h2o"]),
    (["--pool", "-p"], ["--pool", 40]), (["-b", "10,20"], ["--pool", 40, "-p", "h2o", "-b", "10,20"]),
    ("shards", ["--pool", 40, "-p", "h2o", "--shard", "1/2"]), ("--resume", ["--pool", 40, "-p", "h2o", "--resume"]),
    ("--pending", ["--pool", 40, "-p", "rmm", "--pending", "free"]),
    ("--kv-bits", ["--pool", 40, "-p", "rmm", "--kv-bits", "8"]),
    ("--from-lifetimes", ["--pool", 40, "--from-lifetimes", "x.h5"]), ("one trace", ["short.h5", "--pool", 40, "-p", "h2o"]),
    ("unit=model", ["--pool", 40, "-p", "h2o", "--unit", "model"]), ("share", ["--pool", 40, "-p", "ada(h2o)"]),
    ("taper", ["--pool", 40, "-p", "pyramid(h2o)"]), ("full run", ["--pool", 40, "-p", "oracle(mass)"]),
    (["tova", "h2o", "--unit"], ["--pool", 40, "-p", "tova", "-p", "h2o(hold=1)"]),
    (["lowest", "h2o", "window"], ["--pool", 44, "-p", "h2o(hold=1)", "-p", "window", "--pool-rule", "lowest"]),
    (["lowest", "blocks"], ["--pool", 44, "-p", "window", "--schedule", "block:4", "--pool-rule", "lowest"]),
    ("prompt of 20", ["--pool", 19, "-p", "window"]), ("more than a pool", ["--pool", 40, "-p", "h2o", "-b", 41]),
    ("never leave", ["--pool", 40, "-p", "full"]), ("stands for 2", ["--pool", 40, "-p", "rmm(lag=1|2)"]),
    ("--pool-watermark", ["--pool", 40, "-p", "h2o", "--pool-watermark", 1.5]),
    ("--pool-watermark", ["--pool", 20, "-p", "window", "--pool-watermark", 0.01]),
    (["-p", "--requests"], ["--pool", 40, "-p", "h2o", "--requests", "q.csv"]),
    (["-b", "--requests"], ["--pool", 40, "-b", 20, "--requests", "q.csv"]),
])  # fmt: skip
def test_nonsense_is_refused(sim_traces, words, args):
    refused(sim_traces, 2, words, "sim", "two.h5", "-o", "no.csv", *args)


@pytest.mark.parametrize("code,place,words,content", [
    (1, "q.csv:1", "column 'policy'", "seq,arrival\n0,0\n"),
    (1, "q.csv:1", "colour", "seq,arrival,policy,colour\n0,0,h2o,1\n"),
    (1, "q.csv:3", "seq 2", "seq,arrival,policy\n0,0,h2o\n2,0,h2o\n"),
    (1, "q.csv:3", "line 2", "seq,arrival,policy\n0,0,h2o\n0,4,h2o\n"),
    (1, "q.csv:2", "seq 'x'", "seq,arrival,policy\nx,0,h2o\n"),
    (1, "q.csv:2", "arrival '1.5'", "seq,arrival,policy\n0,1.5,h2o\n"),
    (1, "q.csv:2", "arrival -1", "seq,arrival,policy\n0,-1,h2o\n"),
    (1, "q.csv:2", "policy is empty", "seq,arrival,policy\n0,0,\n"),
    (1, "q.csv:2", "fields", "seq,arrival,policy\n0,0,rmm(lag=2,hold=1)\n"),
    (1, "q.csv", "no request", "seq,arrival,policy\n"),
    (2, "q.csv:2: policy", "h3o", "seq,arrival,policy\n0,0,h3o\n"),
    (2, "q.csv:2: policy", "share", "seq,arrival,policy\n0,0,ada(h2o)\n"),
    (2, "q.csv:2: policy", "2 configurations", 'seq,arrival,policy,budget\n0,0,h2o,"9,8"\n'),
    (2, "q.csv:2: budget", "'12x'", "seq,arrival,policy,budget\n0,0,h2o,12x\n"),
    (2, "q.csv:2: budget", "more than", "seq,arrival,policy,budget\n0,0,h2o,99\n"),
    (2, "q.csv:2: seq", "prompt of 50", "seq,arrival,policy\n0,0,h2o\n"),
])  # fmt: skip
def test_a_bad_file_is_refused_by_place(sim_traces, tmp_path, code, place, words, content):
    (tmp_path / "q.csv").write_text(content)
    refused(tmp_path, code, [place, words], "sim", sim_traces / "two.h5", "-o", "no.csv", "--pool", 44, "--requests",
            "q.csv", *(["--prompt", 50] if "prompt" in words else []))  # fmt: skip


def test_memory_is_bounded(sim_traces, tmp_path):
    done = kvlag("make-trace", "reuse", "-o", tmp_path / "t.h5", "--sequences", 6, "--tokens", 200, "--heads", 32)
    assert done.returncode == 0, done.stderr
    refused(tmp_path, 2, "--memory", "sim", "t.h5", "-o", "r.csv", "-p", "window", "--pool", 60, "--memory", "1M",
            "--metrics", "lost_mass")  # fmt: skip
    sim(tmp_path / "r.csv", tmp_path / "t.h5", "-q", "-p", "window", "--pool", 60, "--memory", "64M")


def test_help_names_the_options():
    said = kvlag("help", "sim").stdout.decode()
    for option in "--pool M", "--requests FILE.csv", "--arrivals N", "--pool-rule fair|lowest", "--pool-watermark F":
        assert option in said
