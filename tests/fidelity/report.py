"""What the records of run.py say: docs/fidelity.md, its table, and the figure that kvlag analyze draws."""
import csv
import math
import shutil
import subprocess

import numpy as np
from run import FAMILY, KEY, KVLAG, LEAST_KL, SAMPLES, rows_of
from scipy import stats

FAMILIES = ["window", "static", "attention", "oracle"]


# ---- forms of the estimate, each fitted on the other texts of the same length ----------------------------------------


def features(records, form):
    """Columns of a linear model of log true KL, and the offset that it does not fit."""
    fisher = np.array([np.mean([float(r[f"fisher_{s + 1}"]) for s in range(form["samples"])]) for r in records])
    lost = np.array([float(r["lost_mass"]) for r in records])
    offset = np.log(np.maximum(fisher, 1e-12))
    columns = [np.ones(len(records))]
    if form.get("power"):
        columns.append(offset - math.log(0.1))
    if form.get("curve"):
        columns.append((offset - math.log(0.1)) ** 2)
    if form.get("lost_mass"):
        columns.append(np.log(np.maximum(lost, 1e-6)) - math.log(0.1))
    return offset, np.stack(columns, axis=1)


def held_out_errors(records, form):
    """log(true KL / estimate) of every usable record, its text left out of the fit."""
    errors = {}
    for text, length in sorted({(r["text"], r["tokens"]) for r in records}):
        usable = [r for r in records if r["tokens"] == length and float(r["true_kl"]) >= LEAST_KL]
        train, test = [r for r in usable if r["text"] != text], [r for r in usable if r["text"] == text]
        offset, x = features(train, form)
        y = np.log([float(r["true_kl"]) for r in train]) - offset
        beta = np.linalg.lstsq(x, y, rcond=None)[0]
        rest = y - x @ beta
        shift = {}
        for f in FAMILIES:
            mine = rest[[r["family"] == f for r in train]]
            shift[f] = mine.sum() / (len(mine) + 2) if form.get("family") else 0
        offset, x = features(test, form)
        guess = offset + x @ beta + np.array([shift[r["family"]] for r in test])
        for r, e in zip(test, np.log([float(r["true_kl"]) for r in test]) - guess):
            errors[r["key"]] = e
    return errors


FORMS = [
    ("one scale, one sample", {"samples": 1}),
    ("scale per family, one sample (what kvlag does)", {"samples": 1, "family": True}),
    (f"scale per family, {SAMPLES} samples", {"samples": SAMPLES, "family": True}),
    ("power of the estimate, per family", {"samples": 1, "family": True, "power": True}),
    ("power and curvature (saturation), per family", {"samples": 1, "family": True, "power": True, "curve": True}),
    ("power and lost mass, per family", {"samples": 1, "family": True, "power": True, "lost_mass": True}),
    (f"power and lost mass, per family, {SAMPLES} samples",
     {"samples": SAMPLES, "family": True, "power": True, "lost_mass": True}),
]


def forms_table(records):
    lines = ["| form | spread out of sample | worst text |", "|---|---|---|"]
    for name, form in FORMS:
        errors = held_out_errors(records, form)
        by_text = {}
        for (text, length, _), e in errors.items():
            by_text.setdefault((text, length), []).append(e)
        rms = {k: math.sqrt(np.mean(np.square(v))) for k, v in by_text.items()}
        worst = max(rms, key=rms.get)
        total = math.sqrt(np.mean(np.square(list(errors.values()))))
        lines.append(f"| {name} | {math.exp(total):.3f} | {math.exp(rms[worst]):.2f} ({worst[0]}, {worst[1]}) |")
    return lines


# ---- what kvlag printed for texts that its calibration never saw ------------------------------------------------------


def priced(held_out, work):
    """(length, text, results row, truth row) of every held-out configuration with an eviction."""
    for (text, length), results in held_out.items():
        truth = {tuple(r[k] for k in KEY): r for r in rows_of(work / f"{text}-{length}.truth.csv")}
        for row in rows_of(results):
            true = truth.get(tuple(row[k] for k in KEY))
            if true and float(row["fisher"]) > 0:
                yield length, text, row, true


def column(rows, which, name):
    return np.array([float(r[which][name]) for r in rows])


def coverage(rows, name):
    low, high = column(rows, 2, f"{name}_lo"), column(rows, 2, f"{name}_hi")
    true = column(rows, 3, f"true_{name}")
    k, n = int(((low <= true) & (true <= high)).sum()), len(rows)
    low_tail, high_tail = stats.binom.cdf(k, n, 0.85), stats.binom.sf(k - 1, n, 0.95)
    return k, n, low_tail, high_tail


def measured_table(rows):
    lines = ["| tokens | configurations | Spearman KL | Spearman loss | spread (true KL >= .003) | coverage KL | coverage loss |",
             "|---|---|---|---|---|---|---|"]
    for length in sorted({r[0] for r in rows}) + ["all"]:
        mine = [r for r in rows if length in ("all", r[0])]
        usable = [r for r in mine if float(r[3]["true_kl"]) >= LEAST_KL]
        logs = np.log(column(usable, 3, "true_kl") / column(usable, 2, "kl_est"))
        kl = stats.spearmanr(column(mine, 2, "kl_est"), column(mine, 3, "true_kl")).statistic
        loss = stats.spearmanr(column(mine, 2, "dloss_est"), column(mine, 3, "true_dloss")).statistic
        parts = []
        for name in ("kl", "dloss"):
            k, n, low, high = coverage(usable if name == "kl" else mine, name)
            parts.append(f"{k}/{n} = {100 * k / n:.1f} % (P <= {low:.3g}, >= {high:.3g})")
        lines.append(f"| {length} | {len(mine)} | {kl:.3f} | {loss:.3f} | {math.exp(math.sqrt(np.mean(logs ** 2))):.3f} | "
                     + " | ".join(parts) + " |")
    return lines


def text_table(rows):
    lines = ["| text | tokens | scale (true / estimate) | spread | window | static | attention | oracle |",
             "|---|---|---|---|---|---|---|---|"]
    for text, length in sorted({(r[1], r[0]) for r in rows}):
        mine = [r for r in rows if r[1] == text and r[0] == length and float(r[3]["true_kl"]) >= LEAST_KL]
        logs = np.log(column(mine, 3, "true_kl") / column(mine, 2, "kl_est"))
        family = np.array([FAMILY.get(r[2]["policy"], "attention") for r in mine])
        cells = [f"{math.exp(logs[family == f].mean()):.2f}" if (family == f).any() else "" for f in FAMILIES]
        lines.append(f"| {text} | {length} | {math.exp(logs.mean()):.2f} | {math.exp(logs.std()):.2f} | " + " | ".join(cells) + " |")
    return lines


def write(records, held_out, work):
    names = [k for k in records[0] if k != "key"]
    with open("docs/fidelity.csv", "w", newline="") as f:
        out = csv.DictWriter(f, names, extrasaction="ignore", lineterminator="\n")
        out.writeheader()
        out.writerows(records)
    truths = [work / f"{text}-{length}.truth.csv" for text, length in held_out]
    subprocess.run([KVLAG, "analyze", *map(str, held_out.values()), *map(str, truths), "-o", str(work / "figures"),
                    "--figures", "fidelity", "--report", "no", "--force", "-q"], check=True, stdout=open(work / "analyze.txt", "w"))
    shutil.copy(work / "figures" / "fidelity.png", "docs/fidelity.png")
    rows = list(priced(held_out, work))
    head = open("tests/fidelity/head.md").read()
    body = [head, "## Held-out texts\n", *measured_table(rows), "\n## Text by text\n", *text_table(rows),
            "\n## Other forms, on texts they were not fitted on\n", *forms_table(records), ""]
    open("docs/fidelity.md", "w").write("\n".join(body))
    print("\n".join(body))
