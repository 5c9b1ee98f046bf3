"""make fidelity: how far to trust the estimates. Every configuration below is priced from a trace and rerun for real.

Each text is priced with a calibration fitted on the other texts of the same length, which never saw it. Writes
docs/fidelity.md, docs/fidelity.csv (one row a configuration) and docs/fidelity.png; works in out/fidelity and takes up
again where it stopped. Needs the model (make model) and about half an hour on two cores.

Usage: run.py [--quick]     KVLAG: the binary
"""
import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np
from scipy import stats

KVLAG = os.environ.get("KVLAG", "./kvlag")
MODEL = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = ["scripture", "dialogue", "poetry", "legal", "python", "c", "manual", "table"]
LENGTHS = [512, 1024]
SAMPLES = 4  # the first one is what `kvlag trace` takes by default; the others show what more would bring
BUDGETS = "64,128,256"
SPECS = ["window", "streaming", "random", "lru", "h2o", "ema", "tova", "rmm(lag=8|32)", "rmm(sinks=4,lag=8)",
         "mix(evidence=attn,memory=mean,hold=16)", "oracle(mass)", "oracle(loss)"]
FAMILY = {"window": "window", "streaming": "static", "random": "static", "oracle": "oracle"}
LEAST_KL = 0.003
WORK = Path("out/fidelity")
KEY = ["seq", "spec", "budget_asked", "lag", "unit", "schedule", "pending", "n_prompt"]


def kvlag(*args):
    subprocess.run([KVLAG, *map(str, args), "-q"], check=True)


def rows_of(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(line for line in f if not line.startswith("#")))


def configurations():
    return [x for spec in SPECS for x in ("-p", spec)] + ["-b", BUDGETS]


def measure(text, length):
    """Trace, price and rerun one text; files that are there are kept."""
    name = WORK / f"{text}-{length}"
    trace, results, truth = f"{name}.h5", f"{name}.csv", f"{name}.truth.csv"
    if not os.path.exists(trace):
        kvlag("trace", MODEL, f"tests/fidelity/texts/{text}.txt", "-o", trace, "--tokens", length, "--attention",
              "factored", "--gradients", f"fisher:{SAMPLES}")
    if not os.path.exists(results):
        kvlag("sim", trace, "-o", results, "--metrics", "lost_mass,loss,out_err", *configurations())
    if not os.path.exists(truth):
        kvlag("verify", MODEL, trace, "-o", truth, *configurations())
    return trace, results, truth


def joined(text, length, results, truth):
    """One record a configuration: estimates beside truths."""
    known = {tuple(r[k] for k in KEY): r for r in rows_of(truth)}
    with h5py.File(results.replace(".csv", ".blocks.h5")) as f:
        fisher = f["fisher"][:].sum(axis=2)  # [rows, samples]
    out = []
    for r, row in enumerate(rows_of(results)):
        true = known.get(tuple(row[k] for k in KEY))
        if true is None:
            continue
        record = {"text": text, "tokens": length, "family": FAMILY.get(row["policy"], "attention")}
        record.update({k: row[k] for k in ("spec", "budget_asked", "lag", "lost_mass", "out_err", "dloss_first")})
        for s in range(SAMPLES):
            record[f"fisher_{s + 1}"] = "%.6g" % (fisher[r, s] / float(row["n_counted"]))
        record.update(true_kl=true["true_kl"], true_dloss=true["true_dloss"], key=(text, length, r))
        out.append(record)
    return out


def fit(points):
    """(global log c, {family: log c}, s, n) as DESIGN section 6 says; points are (family, fisher, true KL)."""
    logs = [(f, math.log(kl / x)) for f, x, kl in points if kl >= LEAST_KL and x > 0]
    n, m = len(logs), sum(r for _, r in logs) / len(logs)
    families, squares = {}, 0
    for f in {f for f, _ in logs}:
        mine = [r for g, r in logs if g == f]
        families[f] = (len(mine), (sum(mine) + 2 * m) / (len(mine) + 2))
        squares += sum((r - sum(mine) / len(mine)) ** 2 for r in mine)
    return m, families, math.sqrt(squares / max(1, n - len(families))), n


def calibration(records, length):
    """The calibration file that kvlag sim reads, from all records of that length."""
    m, families, s, n = fit([(r["family"], float(r["fisher_1"]), float(r["true_kl"])) for r in records])
    return {"format": "kvlag-calibration", "version": 1, "model": model_name(), "n_tokens": length, "budgets": BUDGETS,
            "n": n, "log_c": m, "s": s,
            "families": {f: dict(zip(("n", "log_c"), families.get(f, (0, m))))
                         for f in ("window", "static", "attention", "oracle")}}


def model_name():
    with h5py.File(WORK / f"{TEXTS[0]}-{LENGTHS[0]}.h5") as f:
        name = f.attrs["name"]
        return name.decode() if isinstance(name, bytes) else name


def price_held_out(records, text, length):
    """Price a text of which one sample was taken, with the other texts' calibration."""
    others = [r for r in records if r["text"] != text and r["tokens"] == length]
    file, out = WORK / f"without-{text}-{length}.json", WORK / f"{text}-{length}.held-out.csv"
    file.write_text(json.dumps(calibration(others, length)))
    one = WORK / "one" / f"{text}-{length}.h5"  # the name of a trace is part of the key that joins it with its truth
    if not one.exists():
        kvlag("trace", MODEL, f"tests/fidelity/texts/{text}.txt", "-o", one, "--tokens", length, "--attention", "factored")
    kvlag("sim", one, "-o", out, "--force", "--metrics", "lost_mass,loss", "--calibration", file, *configurations())
    return out


def spread(true, est):
    """(scale, factor of one standard deviation, number) of true / est where the true KL is no noise."""
    logs = [math.log(t / e) for t, e in zip(true, est) if t >= LEAST_KL and e > 0]
    return math.exp(np.mean(logs)), math.exp(np.sqrt(np.mean(np.square(logs)))), len(logs)


def main():
    global TEXTS, LENGTHS
    if "--quick" in sys.argv:
        TEXTS, LENGTHS = TEXTS[:3], [256]
    (WORK / "one").mkdir(parents=True, exist_ok=True)
    records = []
    for length in LENGTHS:
        for text in TEXTS:
            print(f"{text}, {length} tokens", flush=True)
            _, results, truth = measure(text, length)
            records += joined(text, length, results, truth)
    held_out = {(text, length): price_held_out(records, text, length) for length in LENGTHS for text in TEXTS}
    from report import write  # beside this file
    write(records, held_out, WORK)


if __name__ == "__main__":
    main()
