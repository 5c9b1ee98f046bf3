"""Intervals and p values of `kvlag analyze` against scipy.stats.bootstrap: `resampling.py`.

Three made-up policies on twelve texts, two of which share most of what happens to them. What analyze says of their means and
paired differences is held against scipy's percentile bootstrap over the same texts, widened as bootstrap.h says: by
sqrt(n/(n-1)) and Student's over the normal 95 % point, which come from scipy, too.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile

import numpy as np
from scipy import stats

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
N = 12
# A 5 % point of 2000 resamples has a standard error of .0216 / .103 = .047 standard deviations, .0143 of the
# interval's width: four of them. A p value of .1 has one of .0067.
ENDS, P = 0.06, 0.03

COLUMNS = ("trace seq policy spec budget_asked budget lag sinks unit schedule pending lost_mass dloss_first fisher dloss_est "
           "dloss_lo dloss_hi kl_est kl_lo kl_hi").split()


def losses(seed):
    rng = np.random.default_rng(seed)
    common = rng.gamma(2.0, 0.1, N)
    return {"h2o": common, "ema": common + rng.normal(0.02, 0.04, N), "streaming": rng.gamma(2.0, 0.2, N)}


def write(path, loss):
    with open(path, "w", newline="") as f:
        f.write("# kvlag results v1\n")
        out = csv.writer(f, lineterminator="\n")
        out.writerow(COLUMNS)
        for policy, values in loss.items():
            for seq, x in enumerate(values):
                row = dict(trace="t", seq=seq, policy=policy, spec=policy, budget_asked="64", budget=64, lag="", sinks=0,
                           unit="head", schedule="step", pending="charged", lost_mass=x, dloss_first=x, fisher=0,
                           dloss_est=x, dloss_lo=x, dloss_hi=x, kl_est=0, kl_lo=0, kl_hi=0)
                out.writerow([row[c] if isinstance(row[c], (int, str)) else repr(float(row[c])) for c in COLUMNS])


def reference(x):
    """Mean, widened resamples' 5 and 95 % points, and the two-sided p value of 0."""
    b = stats.bootstrap((x,), np.mean, n_resamples=100000, method="percentile", confidence_level=0.9, rng=1)
    widen = np.sqrt(N / (N - 1)) * stats.t.ppf(0.95, N - 1) / stats.norm.ppf(0.95)
    mean = x.mean()
    ends = [mean + widen * (e - mean) for e in b.confidence_interval]
    wide = mean + widen * (b.bootstrap_distribution - mean)
    return mean, *ends, 2 * min((wide < 0).mean(), (wide > 0).mean())


failures = 0


def within(what, value, limit):
    global failures
    good = abs(value) <= limit
    failures += not good
    print(f"  {'ok  ' if good else 'FAIL'} {what}: {value:+.4f} (at most {limit:g})")


def compare(what, ours, x):
    mean, lo, hi, _ = reference(x)
    within(f"{what}, value", (ours["value"] - mean) / abs(mean), 1e-9)
    within(f"{what}, lower end, of the width", (ours["lo"] - lo) / (hi - lo), ENDS)
    within(f"{what}, upper end, of the width", (ours["hi"] - hi) / (hi - lo), ENDS)


def run(seed, kvlag, folder):
    loss = losses(seed)
    path, out = os.path.join(folder, f"r{seed}.csv"), os.path.join(folder, f"out{seed}")
    write(path, loss)
    subprocess.run([kvlag, "analyze", path, "-o", out, "--figures", "budget", "-q"], check=True, capture_output=True)
    with open(os.path.join(out, "summary.json")) as f:
        ranking = json.load(f)["budgets"][0]["ranking"]
    first = loss[ranking[0]["config"]["spec"]]
    print(f"seed {seed}: {' < '.join(r['config']['spec'] for r in ranking)}")
    for r in ranking:
        x = loss[r["config"]["spec"]]
        compare(r["config"]["spec"], r["config"]["dloss_est"], x)
        if r is ranking[0]:
            continue
        compare(f"{r['config']['spec']} less the first", r["behind"], x - first)
        within("p value", r["p"] - reference(x - first)[3], P)


def main():
    kvlag = os.environ.get("KVLAG", os.path.join(ROOT, "kvlag"))
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(3):
            run(seed, os.path.abspath(kvlag), folder)
    print("all within Monte Carlo error" if not failures else f"{failures} comparisons failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
