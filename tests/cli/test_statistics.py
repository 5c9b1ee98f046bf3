"""What the statistics of analyze take for granted, held against the committed measurements (docs/fidelity.csv)."""
import csv
import itertools
import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]


def constant(name):
    return float(re.search(rf"#define {name} ([0-9.]+)", (ROOT / "analyze/bootstrap.h").read_text()).group(1))


def residuals():
    """(text, T, policy, log(true KL / fisher) less its family's mean) where the truth is at least .003."""
    lines = [line for line in open(ROOT / "docs/fidelity.csv") if not line.startswith("#")]
    rows = [r for r in csv.DictReader(lines) if float(r["true_kl"]) >= 0.003 and float(r["fisher_1"]) > 0]
    logs = np.array([np.log(float(r["true_kl"]) / float(r["fisher_1"])) for r in rows])
    families = np.array([r["family"] for r in rows])
    for f in set(families):
        logs[families == f] -= logs[families == f].mean()
    policy = [r["spec"] if r["family"] == "oracle" else r["spec"].split("(")[0] for r in rows]
    return [(r["text"], r["tokens"], p, x) for r, p, x in zip(rows, policy, logs)]


def test_what_estimates_share_of_their_error():
    rows = residuals()
    assert len(rows) > 500
    variance = np.mean([r[3] ** 2 for r in rows])
    assert abs(np.sqrt(variance) - constant("BOOTSTRAP_OWN_SPREAD")) < 0.01
    products = {"policy": [], "text": [], "none": []}
    for a, b in itertools.combinations(rows, 2):
        kind = "none" if a[:2] != b[:2] else "policy" if a[2] == b[2] else "text"
        products[kind].append(a[3] * b[3])
    share = {kind: np.mean(x) / variance for kind, x in products.items()}
    sequence, series = constant("BOOTSTRAP_SHARE_SEQUENCE"), constant("BOOTSTRAP_SHARE_SERIES")
    assert abs(share["none"]) < 0.05
    assert abs(share["text"] - sequence) < 0.05
    assert abs(share["policy"] - (sequence + series)) < 0.1
