"""`kvlag sim --pool` against the oracle: who waits, what leaves when, how much is held; and the numbers of the rows
computed again from the lifetimes."""
import csv
import math
import os
import subprocess

import numpy as np
import pytest

from make_traces import write_trace
from metrics import measure
from pool import Request, jain, replay_pool
from specs import parse, resolve
from tracefile import read_lifetimes, read_trace

KVLAG = os.path.abspath(os.environ.get("KVLAG", "kvlag"))
pytestmark = pytest.mark.skipif(not os.path.exists(KVLAG), reason=f"no {KVLAG}")

LENGTHS = [(34, 8), (22, 0), (27, 12), (16, 3), (25, 1)]  # tokens, prompt
WINDOWED = [0, 9]
# specs, M, watermark, rule, arrivals every, cap
CASES = [(["window"], 20, None, "fair", 0, None), (["h2o(hold=2)", "window"], 24, None, "fair", 3, None),
         (["h2o(hold=2)"], 20, 0.7, "fair", 2, None), (["tova(unit=head)"], 18, None, "lowest", 1, None),
         (["ema(alpha=0.8,hold=1)"], 24, 0.8, "lowest", 4, None), (["h2o", "lru"], 30, None, "fair", 2, 9),
         (["rmm(lag=4,hold=3)", "streaming(sinks=2)", "random(hold=2)"], 26, None, "fair", 3, None),
         (["h2o(hold=2,schedule=every:3)", "window(schedule=block:4)"], 24, None, "fair", 2, None),
         (["window(schedule=block:3)"], 22, 0.8, "fair", 1, None), (["full", "h2o(hold=1)"], 45, None, "fair", 5, None),
         (["h2o(hold=1,schedule=prompt)", "window"], 24, None, "fair", 2, 6), (["mix(evidence=attn,memory=mean,hold=2)"], 20, None, "lowest", 0, 8),
         (["tova"], 20, None, "fair", 2, None), (["h2o(unit=layer,hold=3)"], 24, 0.9, "lowest", 2, None)]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pool")
    seqs = [dict(T=T, forms=("factored",), n_prompt=P, fisher=1) for T, P in LENGTHS]
    write_trace(folder / "requests.h5", 41, seqs=seqs, window=WINDOWED)
    return folder


def schedule_of(spec):
    before, found, after = spec.partition("schedule=")
    if not found:
        return spec, "step"
    inner = before.rstrip(",(") + (")" if "(" in before.rstrip(",(") else "")
    return inner, after.rstrip(")")


def requests_of(trace, specs, M, between, cap):
    requests = []
    for seq in range(len(trace.seqs)):
        spec, schedule = schedule_of(specs[seq % len(specs)])
        policy = parse(spec)
        budget = M if cap is None else cap
        if policy.name == "full":
            budget = trace.seqs[seq].T
        config = resolve(policy, budget, policy.unit, schedule, n_prompt=trace.seqs[seq].n_prompt)
        requests.append(Request(seq, seq * between, config, cap is not None))
    return requests


def rows_of(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(line for line in f if not line.startswith("#")))


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{'+'.join(c[0])}-{c[1]}-{c[3]}")
def test_the_oracle_agrees(folder, tmp_path, case):
    specs, M, watermark, rule, between, cap = case
    trace = read_trace(folder / "requests.h5")
    args = ["--pool", M, "--arrivals", between, "--pool-rule", rule] + [x for s in specs for x in ("-p", s)]
    args += ["--pool-watermark", watermark] if watermark else []
    args += ["-b", cap] if cap else []
    done = subprocess.run([KVLAG, "sim", folder / "requests.h5", "-o", tmp_path / "r.csv", "--lifetimes",
                           tmp_path / "r.h5", *map(str, args)], capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    requests = requests_of(trace, specs, M, between, cap)
    unit = next(r.config.unit for r in requests if r.config.policy.name != "full")
    low = M if watermark is None else math.floor(watermark * M)
    want = replay_pool(trace, requests, M, low, rule, unit)
    rows = rows_of(tmp_path / "r.csv")
    given = {seq: at for _, seqs in read_lifetimes(tmp_path / "r.h5") for seq, (_, at) in seqs.items()}
    assert len(rows) == len(requests) == len(given)
    for r, w, row in zip(requests, want, rows):
        assert int(row["seq"]) == r.seq and row["budget_asked"] == f"pool:{M}"
        assert int(row["waited"]) == w.start - r.arrival and int(row["arrival"]) == r.arrival
        np.testing.assert_array_equal(given[r.seq], w.evict_at, err_msg=f"sequence {r.seq}")
        assert float(row["held"]) == pytest.approx(w.held, rel=1e-8)
        numbers = measure(trace, r.seq, w.evict_at, r.config.n_prompt)
        for name in "lost_mass", "dloss_first", "fisher":
            assert float(row[name]) == pytest.approx(numbers[name], rel=1e-3, abs=1e-6), (name, r.seq)
    said = dict(zip(("jain", "spread"), closing(done.stdout)))
    assert said["jain"] == pytest.approx(jain([w.held for w in want]), abs=1e-4)
    loss = [float(row["dloss_est"]) for row in rows]
    assert said["spread"] == pytest.approx(max(loss) - min(loss), rel=1e-4, abs=1e-9)


def closing(stdout):
    words = stdout.splitlines()[-1].replace(",", "").split()
    return float(words[words.index("held") + 1]), float(words[-1])
