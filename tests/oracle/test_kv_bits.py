"""kvlag sim --kv-bits and --pending-bits against kv_bits.py."""
import itertools
import math

import h5py
import numpy as np
import pytest

from kv_bits import stored
from make_traces import write_trace
from metrics import evictions_of, measure
from replay import replay
from specs import parse, resolve
from test_sim import Results, check_numbers, metrics_for, run, simulate
from tracefile import read_trace, write_lifetimes

SPECS = ["full", "h2o", "window", "rmm(lag=4)", "tova", "h2o(hold=lag,lag=20)"]


def bits_of(row):
    return int(row["kv_bits"]), int(row["pending_bits"]), int(row["hold"] or 0)


def check_rows(results, trace, exact=False):
    for r, row in enumerate(results.rows):
        evict_at = results.evict_at(row)
        check_numbers(results, r, trace, evict_at, [evictions_of(trace, evict_at, row["unit"])], "auto", exact,
                      trace.seqs[int(row["seq"])].n_prompt, bits_of(row))


def widths_of(results, spec):
    return [(row["kv_bits"], row["pending_bits"]) for row in results.rows if row["spec"] == spec and row["seq"] == "0"]


@pytest.mark.parametrize("name, metrics", [("factored", "loss"), ("factored", "exact"), ("both", "loss"),
                                           ("long", "loss"), ("factored", "out_err")])
def test_every_width(traces, tmp_path, name, metrics):
    path, trace = traces[name]
    asked = {"exact": metrics_for(path, trace, exact=True), "loss": metrics_for(path, trace)}.get(metrics, metrics)
    results = simulate(tmp_path, path, SPECS, "-b", "28", "--kv-bits", "16,8,4", "--pending-bits", "16,8,4", "--metrics", asked)
    for spec in SPECS:
        waits = "lag" in spec
        spec = {"rmm(lag=4)": "rmm", "h2o(hold=lag,lag=20)": "h2o(hold=lag)"}.get(spec, spec)
        wanted = itertools.product(("16", "8", "4"), repeat=2) if waits else [(x, x) for x in ("16", "8", "4")]
        assert widths_of(results, spec) == list(wanted), spec
    check_rows(results, trace, metrics == "exact")


def test_head_dims_that_are_no_whole_blocks(tmp_path):
    """40 values are a block of 32 and one of 8."""
    path = write_trace(str(tmp_path / "t.h5"), 21, n_layer=1, n_head=4, n_kv_head=2, head_dim=40, window=[11], softcap=9.0,
                       seqs=[dict(T=50, forms=("factored",), fisher=1)])
    results = simulate(tmp_path, path, SPECS, "-b", "25", "--kv-bits", "8,4", "--pending-bits", "16,4", "--metrics",
                       "loss,out_err")
    check_rows(results, read_trace(path))


def with_a_large_channel(path):
    """Channel 3 of k is large, as a bias makes it, and takes the grid of 4 bits with it: channel 4 reads 0, and what it
    added to every score, about 98, is gone."""
    with h5py.File(path, "r+") as f:
        for seq in f["seq"].values():
            for name, channel, value in ("k", 3, -300), ("q", 3, 0), ("k", 4, 18.6), ("q", 4, 30):
                x = seq["attn/" + name][:]
                x[..., channel] = value - (np.arange(x.shape[2]) % 7 * 0.1 if value == 18.6 else 0)
                seq["attn/" + name][:] = x
    return path


def test_scores_that_move_far(tmp_path):
    path = write_trace(str(tmp_path / "t.h5"), 22, n_layer=1, head_dim=32, seqs=[dict(T=60, forms=("factored",), fisher=1)])
    trace = read_trace(with_a_large_channel(path))
    k = trace.seqs[0].k[0, 0]
    assert np.abs(trace.scale * 30 * (stored(k, 4) - k)[:, 4]).min() > 90  # exp of it is beyond f32
    results = simulate(tmp_path, path, SPECS, "-b", "25", "--kv-bits", "8,4", "--pending-bits", "16,8", "--metrics",
                       "loss,out_err")
    for r, row in enumerate(results.rows):  # scores of 100 are good to 1e-5 in f32
        ours = measure(trace, 0, results.evict_at(row), 0, row["unit"], bits=bits_of(row))
        for name in "out_err", "fisher":
            assert abs(float(row[name]) - ours[name]) <= 1e-3 * ours[name], (name, row, ours[name])


def test_sixteen_bits_change_no_byte(traces, tmp_path):
    path, _ = traces["factored"]
    files = []
    for n, options in enumerate(([], ["--kv-bits", "16"], ["--kv-bits", "16", "--pending-bits", "16"])):
        run("sim", path, "-o", tmp_path / f"{n}.csv", "-p", "h2o", "-p", "rmm(lag=4)", "-b", "10,20", *options)
        files.append((tmp_path / f"{n}.csv").read_bytes() + (tmp_path / f"{n}.blocks.h5").read_bytes())
    assert files[0] == files[1] == files[2]


def test_sixteen_bits_among_others_are_the_same_rows(traces, tmp_path):
    path, _ = traces["both"]
    alone = simulate(tmp_path, path, SPECS, "-b", "9,28").rows
    among = simulate(tmp_path, path, SPECS, "-b", "9,28", "--kv-bits", "8,16,4", "--pending-bits", "16,4").rows
    assert alone == [r for r in among if r["kv_bits"] == r["pending_bits"] == "16"]
    assert len({(r["kv_bits"], r["pending_bits"]) for r in among}) == 9 - 2  # of full: 8/8 beside 8/16, 8/4


def test_pending_as_the_others_is_no_pending(traces, tmp_path):
    path, _ = traces["factored"]
    plain = simulate(tmp_path, path, SPECS, "-b", "28", "--kv-bits", "4").rows
    assert plain == simulate(tmp_path, path, SPECS, "-b", "28", "--kv-bits", "4", "--pending-bits", "4").rows
    none = [r for r in simulate(tmp_path, path, ["rmm(lag=0)"], "-b", "28", "--kv-bits", "4", "--pending-bits", "16,4").rows]
    differ = [k for k in none[0] if none[0][k] != none[1][k]]
    assert differ == ["pending_bits"]  # nothing pends where the hold is 0


def test_eight_bits_are_much_finer_than_four(traces, tmp_path):
    path, trace = traces["long"]
    rows = simulate(tmp_path, path, ["full"], "--kv-bits", "16,8,4", "--metrics", "loss,out_err").rows
    error = {r["kv_bits"]: float(r["out_err"]) for r in rows}
    assert error["16"] == 0 < 8 * error["8"] < error["4"], error
    assert all(float(r["lost_mass"]) == 0 for r in rows)


def test_given_lifetimes(traces, tmp_path):
    """--from-lifetimes with --kv-bits is the sweep that wrote them; foreign ones have their price, too."""
    path, trace = traces["factored"]
    options = ["--kv-bits", "16,4", "--pending-bits", "8,4"]
    results = simulate(tmp_path, path, SPECS, "-b", "12,28", "--pending", "both", *options)
    run("sim", path, "-o", tmp_path / "again.csv", "--from-lifetimes", tmp_path / "run" / "l.h5", *options)
    back = Results(tmp_path / "again.csv")
    for row in results.rows:
        row["score_updates"] = ""  # nothing is scored
    assert back.rows == results.rows
    for name, block in results.blocks.items():
        assert np.array_equal(block, back.blocks[name]), name
    life = replay(trace, 0, resolve(parse("h2o"), 9, n_prompt=13))[0]
    write_lifetimes(tmp_path / "mine.h5", [({"spec": "mine"}, {0: ({}, life)})])
    run("sim", path, "-o", tmp_path / "mine.csv", "--from-lifetimes", tmp_path / "mine.h5", "--kv-bits", "4", "--metrics",
        "loss,out_err")
    mine = Results(tmp_path / "mine.csv")
    mine.rows[0]["unit"] = "head"
    check_numbers(mine, 0, trace, life, [evictions_of(trace, life, "head")], n_prompt=13, bits=(4, 4, 0))


def test_threads_memory_and_processor_do_not_change_a_byte(traces, tmp_path, monkeypatch):
    path, _ = traces["long"]
    files = []
    for threads, memory, kernels in (1, "1G", ""), (3, "1G", "avx2"), (1, "6M", "portable"):
        monkeypatch.setenv("KVLAG_KERNELS", kernels)
        run("sim", path, "-o", tmp_path / "r.csv", "--force", "-p", "h2o", "-p", "rmm(lag=4)", "-b", "40,64", "--kv-bits",
            "16,8,4", "--pending-bits", "16,8", "--threads", threads, "--memory", memory)
        files.append((tmp_path / "r.csv").read_bytes() + (tmp_path / "r.blocks.h5").read_bytes())
    assert files[0] == files[1] == files[2]


def test_dense_attention_has_nothing_to_quantise(traces, tmp_path):
    for name, more in ("dense32", []), ("both", ["--attention", "dense"]):
        p = run("sim", traces[name][0], "-o", tmp_path / "r.csv", "-p", "h2o", "-b", "9", "--kv-bits", "8", *more, fine=(1, 2))
        assert p.returncode and ("attn/q and attn/k" in p.stderr or "factored form" in p.stderr), p.stderr


@pytest.mark.parametrize("bits", ["8,", "12", "16|8", "", "q8_0"])
def test_widths_that_do_not_exist(traces, tmp_path, bits):
    p = run("sim", traces["factored"][0], "-o", tmp_path / "r.csv", "-p", "h2o", "-b", "9", "--kv-bits", bits, fine=(1, 2))
    assert p.returncode == 2 and "--kv-bits" in p.stderr


def test_the_quantiser_by_hand():
    assert stored([127, 1.5, -1.5, 0.49, -127], 8).tolist() == [127, 2, -2, 0, -127]
    assert stored([-8, 7, 7.6, 0.5, -0.5, 8], 4).tolist() == [-8, 7, 7, 1, 0, 7]
    assert stored([4, 0.25, -0.25, -3.9], 4).tolist() == [4, 0, -0.5, -3.5]  # d = -.5: halves go upwards in q
    assert stored([0, 0], 8).tolist() == stored([0, 0], 4).tolist() == [0, 0]


def two_entries(path):
    """One head of 2 numbers. In 4 bits, with the grid that 8 sets, .4 reads 0 and 4.4 reads 4; 8 and 1 stay."""
    q, k = [(0, 0), (0, math.log(3)), (0, 0)], [(8, .4), (8, 1), (8, 0)]
    v = [(8, 0), (8, 4.4), (8, 0)]
    with h5py.File(path, "w") as f:
        f.attrs["format"], f.attrs["version"], f.attrs["scale"] = "kvlag-trace", np.int32(1), np.float32(1)
        for name, value in dict(n_layer=1, n_head=1, n_kv_head=1, head_dim=2, n_embd=2, n_vocab=9).items():
            f.attrs[name] = np.int32(value)
        f["model/wo"] = np.eye(2, dtype=np.float32)[None]
        s = f.create_group("seq/0000")
        s.attrs["n_tokens"], s.attrs["n_prompt"], s.attrs["source"] = 3, 0, ""
        s["logits/correct"] = np.ones(2, np.uint8)
        for name, x in ("q", q), ("k", k), ("v", v):
            s["attn/" + name] = np.array(x, np.float32)[None, None]
        f.attrs["complete"] = np.int32(1)
    return path


def test_two_entries_by_hand(tmp_path):
    """Step 1 weighs 3^.4 : 3 and reads .65907 * 4.4 = 2.8999. From 4 bits it weighs 1 : 3 and reads .75 * 4 = 3, and with
    entry 1 still in 16 bits .75 * 4.4 = 3.3. Step 0 reads the same as ever, so both count half; step 2 is not counted."""
    path = two_entries(str(tmp_path / "t.h5"))
    rows = simulate(tmp_path, path, ["full", "rmm(lag=1)"], "-b", "3", "--kv-bits", "4", "--pending-bits", "4,16", "--metrics",
                    "out_err=exact").rows
    full = 4.4 * 3 / (3 + 3 ** .4)
    assert [(r["spec"], r["pending_bits"]) for r in rows] == [("full", "4"), ("rmm", "4"), ("rmm", "16")]
    for r, reads in zip(rows, (3, 3, 3.3)):
        assert abs(float(r["out_err"]) - (reads - full) / 2) < 1e-6, r
    # 2 values and a scale are 3 bytes in 4 bits, 4 in 16; steps 0, 1, 2 see 1, 2, 3 entries, one of them pending.
    assert [float(r["kv_bytes"]) for r in rows] == [12, 12, 2 * (3 * 4 + 3 * 3) / 3]
