"""make paper: every number, table and figure of docs/experiments.md.

Measures with kvlag what the experiments say, writes docs/experiments/*.csv and the pictures beside them, then the text
(report.py, from the CSVs alone). Works in out/paper, where a file younger than the binary is not made again. A quarter
of an hour on two cores, most of it closed-loop reruns of SmolLM2.

Usage: run.py [--text]     KVLAG: the binary; --text only writes the text again
"""
import csv
import os
import subprocess
import sys
from pathlib import Path

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np

sys.path[:0] = [str(Path(__file__).parent), "tests/tiny"]
import figures
import report
from make_recall import recall

KVLAG = os.environ.get("KVLAG", "./kvlag")
SMOL, TINY = "models/SmolLM2-135M-Instruct.Q4_1.gguf", "build/tiny.gguf"
WORK, DOCS = Path("out/paper"), Path("docs/experiments")
T95 = {5: 2.5706, 7: 2.3646, 19: 2.0930}  # 97.5 % points of Student's t by degrees of freedom


# ---- kvlag -------------------------------------------------------------------------------------------------------------


def kvlag(out, *args, beside=()):
    """Run kvlag unless it was run with these words and its output is younger than the binary and the inputs; returns
    that output's path. `beside`: an option and the other file that it writes."""
    out = WORK / out
    words, said = " ".join(map(str, (*args, *beside))), out.with_name(out.name + ".args")
    older = max(Path(a).stat().st_mtime for a in (KVLAG, *args) if os.path.isfile(str(a)))
    if not said.exists() or said.read_text() != words or out.stat().st_mtime < older:
        print("kvlag", words, "-o", out, flush=True)
        subprocess.run([KVLAG, *words.split(" "), "-o", str(out), "--force", "-q"], check=True)
        said.write_text(words)
    return out


def rows_of(path):
    with open(path, newline="") as f:
        return list(csv.DictReader(line for line in f if not line.startswith("#")))


def policies(specs):
    return [x for spec in specs for x in ("-p", spec)]


def half_width(values):
    """Of the 95 % interval of a mean."""
    return T95[len(values) - 1] * np.std(values, ddof=1) / np.sqrt(len(values))


def by_configuration(rows):
    found = {}
    for row in rows:
        found.setdefault((row["spec"], row["budget_asked"], row["lag"], row["pending"]), []).append(row)
    return found.items()


def number(x):
    return "%.6g" % x


def write(name, records):
    with open(DOCS / f"{name}.csv", "w", newline="") as f:
        out = csv.DictWriter(f, list(records[0]), lineterminator="\n")
        out.writeheader()
        out.writerows(records)


# ---- the controlled task -----------------------------------------------------------------------------------------------

LAGS = "0,1,2,4,5,6,8,10,12,16,24,32"
BOTH = ["rmm(lag=8)", "h2o"]
TASK = ["oracle(mass)", "h2o(recent=0)", "h2o", "h2o-mean", "lfu", "random", "scissorhands-sum", "streaming", "ema", "roco", "tova",
        "snapkv-w32-k5-avg", "lru", "window", "rmm", "rmm(signal=uniform)", "rmm(signal=confidence|agrees|entropy,lag=8)"]
VARIANTS = {  # options of make-trace: policies beside
    "": None,
    "--correct always": ["rmm(lag=8)", "mix(evidence=attn,memory=first:8,hold=8)", "h2o(hold=8)", "h2o"],
    "--failing 0": ["h2o", "rmm(signal=uniform,lag=8)", "rmm(lag=8)"],
    **{f"--lag-of-proof {n}": [f"rmm(lag={n - 1}|{n})"] for n in (3, 12)},
    **{f"--flip {x}": ["rmm(lag=8)"] for x in (0.05, 0.1, 0.2, 0.5)},
    **{f"--{option} {x}": BOTH for option, values in {
        "seed": (1, 2), "facts": (8, 24, 32), "distance": (50, 200), "distractor-attention": (0.4,),
        "distractors": (0.1, 0.5), "failing": (0.2, 0.8), "fact-attention": (0.3, 0.2), "noise": (0, 1)}.items() for x in values},
}
MEMORIES = ["first", "recent", "ema", "sum"]


def memory_specs(horizons, sinks=0):
    """Policies that differ in their memory alone: the same evidence, budget and guard."""
    guard = f"sinks={sinks}," if sinks else ""  # spelt as the results spell it
    return {f"mix(evidence=attn*correct,memory={word},{guard}hold={h})": (name, h) for h in horizons for name, word in (
        ("first", f"first:{h}"), ("recent", f"recent:{h}"), ("ema", f"ema:{1 - 1 / h:.6g}"), ("sum", "sum"))}


def task_trace(variant):
    return kvlag("reuse%s.h5" % variant.replace("--", "-").replace(" ", "-"), "make-trace", "reuse", *variant.split())


def task_records(variant, results):
    for (spec, _, lag, pending), rows in by_configuration(rows_of(results)):
        kept = [float(r["retained"]) for r in rows]
        yield {"variant": variant, "spec": spec, "lag": lag, "pending": pending, "retained": number(np.mean(kept)),
               "half_width": number(half_width(kept)), "lost_mass": number(np.mean([float(r["lost_mass"]) for r in rows]))}


def controlled_task():
    records = []
    for variant, specs in VARIANTS.items():
        trace = task_trace(variant)
        more = policies(specs) if specs else policies(TASK) + ["-L", LAGS, "--pending", "both"]
        records += task_records(variant, kvlag(trace.with_suffix(".csv").name, "sim", trace, "-b", 40, *more))
    write("reuse", records)


def held_by_h2o():
    """What H2O holds after step 300 of the task: means over sequences and kv heads."""
    trace = task_trace("")
    lifetimes = WORK / "h2o.lifetimes.h5"
    kvlag("h2o.csv", "sim", trace, "-b", 40, "-p", "h2o", beside=("--lifetimes", lifetimes))
    counts = []
    with h5py.File(trace) as f, h5py.File(lifetimes) as lives:
        for name, seq in f["seq"].items():
            token, entry = seq["tokens"][:], np.arange(len(seq["tokens"]))
            for evict_at in lives[f"config/0000/seq/{name}/evict_at"][0]:
                held = (entry <= 300) & (evict_at > 301)
                later = held & (entry >= 40) & (entry <= 280)
                counts.append({"last 20": (held & (entry > 280)).sum(), "first 40": (held & (entry < 40)).sum(),
                               "distractors between": (later & (token == 1)).sum(), "facts between": (later & (token >= 2)).sum(),
                               "others between": (later & (token == 0)).sum()})
    write("held", [{"held": key, "mean": number(np.mean([c[key] for c in counts]))} for key in counts[0]])


def who_stays():
    """The picture of four policies' lifetimes."""
    trace = task_trace("")
    lifetimes = WORK / "stay.lifetimes.h5"
    out = kvlag("stay.csv", "sim", trace, "-b", 40, *policies(["oracle(mass)", "rmm(lag=8)", "h2o", "streaming"]),
                beside=("--lifetimes", lifetimes))
    subprocess.run([KVLAG, "analyze", str(out), "-o", str(WORK / "stay"), "--figures", "retention", "--report", "no", "--lifetimes", str(lifetimes),
                    "--trace", str(trace), "--force", "-q"], check=True, stdout=subprocess.DEVNULL)
    (DOCS / "stay.png").write_bytes((WORK / "stay/retention.png").read_bytes())


# ---- recall by trained models ------------------------------------------------------------------------------------------

FILTERS = ["h2o", "ema", "tova", "streaming"]
RECALL = {  # model: (budgets, lags, policies), in closed loop
    "tiny": ("64,128", "2,4,8,16,32", FILTERS + ["window", "random", "rmm(sinks=4)", "rmm(signal=uniform,sinks=4)"]),
    "SmolLM2": ("64", "8,16,32", FILTERS + ["rmm(sinks=4)"]),
}
KINDS = ["once", "again"]  # a fact is said once, or said again at once


def documents(model, kind):
    """Marked texts, as files."""
    folder = WORK / "recall" / model / kind
    folder.mkdir(parents=True, exist_ok=True)
    if model == "tiny":
        texts = {f"{seed}.txt": recall(1700, seed, marked=True, again=kind == "again") for seed in range(1, 9)}
    else:
        lines = {p.name: p.read_text().splitlines(True) for p in sorted(Path("tests/paper/recall").glob("*.txt"))}
        texts = {name: "".join(x for x in of if kind == "again" or not x.startswith("Again:")) for name, of in lines.items()}
    for name, words in texts.items():
        if not (folder / name).exists() or (folder / name).read_text() != words:
            (folder / name).write_text(words)
    return [folder / name for name in texts]


def full_losses(trace):
    """Mean loss of the full cache over the counted steps, of each sequence; and their numbers."""
    losses, tokens = [], []
    with h5py.File(trace) as f:
        for seq in f["seq"].values():
            logprob = seq["logits/target_logprob"][:].astype(float)
            counted = seq["counted"][:].astype(bool) if "counted" in seq else np.ones(len(logprob), bool)
            losses.append(-logprob[counted].mean())
            tokens.append(len(seq["tokens"]))
    return losses, tokens


def recall_records(model, kind, trace, truth):
    losses, tokens = full_losses(trace)
    for (spec, budget, lag, _), rows in by_configuration(rows_of(truth)):
        loss = [losses[int(r["seq"])] + float(r["true_dloss"]) for r in rows]
        cost = [float(r["true_dloss"]) for r in rows]
        yield {"model": model, "kind": kind, "spec": spec, "budget": budget, "lag": lag, "mode": rows[0]["mode"],
               "texts": len(rows), "tokens": number(np.mean(tokens)), "loss": number(np.mean(loss)), "dloss": number(np.mean(cost)),
               "half_width": number(half_width(cost)), "exact_match": number(np.mean([float(r["exact_match"]) for r in rows]))}


def recall_trace(model, kind):
    gguf = TINY if model == "tiny" else SMOL
    return gguf, kvlag(f"recall-{model}-{kind}.h5", "trace", gguf, *documents(model, kind), "--marked", "--attention", "factored",
                       "--gradients", "none")


def trained_recall():
    records = []
    for model, (budgets, lags, specs) in RECALL.items():
        for kind in KINDS:
            gguf, trace = recall_trace(model, kind)
            opened = kvlag(f"recall-{model}-{kind}-open.csv", "verify", gguf, trace, "-b", budgets, *policies(["full", "oracle(mass)"]))
            closed = kvlag(f"recall-{model}-{kind}.csv", "verify", gguf, trace, "--mode", "closed", "-b", budgets, "-L", lags,
                           *policies(specs))
            records += [*recall_records(model, kind, trace, opened), *recall_records(model, kind, trace, closed)]
    write("recall", records)


# ---- a text of 2000 tokens ---------------------------------------------------------------------------------------------

BUDGETS = "200,500"
SOME = ["full", "window", "random", "streaming", "h2o", "rmm(sinks=4,lag=32)", "oracle(mass)", "oracle(loss)"]
MORE = ["ema", "tova", "rmm(sinks=4,lag=8|128)"]  # at the smaller budget only


def text_trace():
    return kvlag("text.h5", "trace", SMOL, "demo/genesis.txt", "--tokens", 2000, "--attention", "factored")


def text_truths(trace):
    calibration = WORK / "text.json"
    truth = kvlag("text.truth.csv", "verify", SMOL, trace, *policies(SOME), "-b", BUDGETS, beside=("--calibrate", calibration))
    more = kvlag("text.more.csv", "verify", SMOL, trace, *policies(MORE), "-b", BUDGETS.split(",")[0])
    rows, (loss,) = rows_of(truth) + rows_of(more), full_losses(trace)[0]
    write("text", [{"spec": r["spec"], "budget": r["budget_asked"], "lag": r["lag"], "loss": number(loss + float(r["true_dloss"])),
                    "dloss": number(float(r["true_dloss"])), "kl": number(float(r["true_kl"])),
                    "top1_flips": number(float(r["top1_flips"]))} for r in rows])
    return calibration


def text_lags(trace, calibration):
    out = kvlag("text.lag.csv", "sim", trace, "-b", BUDGETS, "-L", "0:256:x2", "--pending", "both", "--metrics", "lost_mass,loss",
                "--calibration", calibration, *policies(["rmm(sinks=4)", "oracle(mass,hold=lag)", "oracle(mass)", "oracle(loss)"]
                                                        + FILTERS + ["window", "random"]))
    write("lag", [{key: r[key] for key in ("spec", "budget_asked", "lag", "pending", "lost_mass", "kl_est", "kl_lo", "kl_hi",
                                           "dloss_est", "dloss_lo", "dloss_hi")} for r in rows_of(out)])
    subprocess.run([KVLAG, "analyze", str(out), "-o", str(WORK / "lag"), "--figures", "lag", "--report", "no", "--force", "-q"], check=True,
                   stdout=subprocess.DEVNULL)
    return out


# ---- measuring against accumulating ------------------------------------------------------------------------------------


def memories(calibration):
    """One evidence, one guard, one budget; only the memory differs."""
    records = []

    def add(where, specs, rows, value, n):
        for (spec, *_), mine in by_configuration(rows):
            name, horizon = specs[spec]
            of = [value(r) for r in mine]
            records.append({"where": where, "memory": name, "horizon": horizon, "value": number(np.mean(of)),
                            "half_width": number(half_width(of)) if n > 1 else ""})

    specs = memory_specs([2, 4, 6, 8, 12, 16, 24, 32])
    task = kvlag("memory-reuse.csv", "sim", task_trace(""), "-b", 40, *policies(specs))
    add("reuse", specs, rows_of(task), lambda r: float(r["retained"]), 20)
    specs = memory_specs([2, 4, 8, 16, 32], sinks=4)
    for kind in KINDS:
        gguf, trace = recall_trace("tiny", kind)
        truth = kvlag(f"memory-{kind}.csv", "verify", gguf, trace, "--mode", "closed", "-b", 64, *policies(specs))
        add(kind, specs, rows_of(truth), lambda r: float(r["true_dloss"]), 8)
    specs = memory_specs([2, 4, 8, 16, 32, 64, 128], sinks=4)
    text = kvlag("memory-text.csv", "sim", text_trace(), "-b", 200, "--metrics", "loss", "--calibration", calibration,
                 *policies(specs))
    add("text", specs, rows_of(text), lambda r: float(r["kl_est"]), 1)
    write("memory", records)


def measure():
    WORK.mkdir(parents=True, exist_ok=True)
    DOCS.mkdir(exist_ok=True)
    controlled_task()
    held_by_h2o()
    who_stays()
    trained_recall()
    trace = text_trace()
    calibration = text_truths(trace)
    text_lags(trace, calibration)
    memories(calibration)
    figures.draw(DOCS, WORK)


def main():
    if "--text" not in sys.argv:
        measure()
    text = report.text(DOCS, "tests/paper/experiments.md")
    Path("docs/experiments.md").write_text(text)


if __name__ == "__main__":
    main()
