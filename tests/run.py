"""Run every test and end with one line: N passed, N failed, N skipped.

Unit tests are cmocka programs (their TAP output is counted); the rest is pytest. BUILD is the build folder, KVLAG the
binary under test. With --unit only the C programs run.
"""
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as tree
from pathlib import Path

BUILD = Path(os.environ["BUILD"])
PYTEST = ["tests/oracle", "tests/cli", "tests/golden"]


def run_unit(program, total):
    done = subprocess.run([program], capture_output=True, text=True, errors="replace",
                          env={**os.environ, "CMOCKA_MESSAGE_OUTPUT": "TAP"})
    lines = done.stdout.splitlines()
    results = [line for line in lines if re.match(r"(not )?ok \d+", line)]
    skipped = [line for line in results if "# SKIP" in line]  # cmocka says "not ok" of these
    good = [line for line in results if line not in skipped and line.startswith("ok")]
    bad = [line for line in results if line not in skipped and line.startswith("not")]
    crashed = done.returncode != 0 and not bad
    total["passed"] += len(good)
    total["skipped"] += len(skipped)
    total["failed"] += len(bad) + crashed
    print(f"{'FAIL' if bad or crashed else 'ok':5}{program.name}: {len(good)} of {len(good) + len(bad)}"
          + (f", {len(skipped)} skipped" if skipped else ""), flush=True)
    if bad or crashed:
        print(done.stdout, done.stderr, f"exit {done.returncode}", sep="\n", flush=True)


def run_fuzz(total):
    """Replay the seeds and a bounded number of deterministic mutations; a crash is the failure."""
    for program in sorted(p for p in (BUILD / "tests/fuzz").glob("fuzz_*") if not p.suffix):
        corpus = Path("tests/fuzz/corpus") / program.name.removeprefix("fuzz_")
        done = subprocess.run([program, corpus], capture_output=True, text=True, errors="replace")
        total["passed" if done.returncode == 0 else "failed"] += 1
        print(f"{'ok' if done.returncode == 0 else 'FAIL':5}{program.name}", flush=True)
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n", flush=True)


def run_pytest(total):
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        folders = [f for f in PYTEST if list(Path(f).glob("test_*.py"))]
        subprocess.run([sys.executable, "-m", "pytest", "-q", "--durations=5", f"--junitxml={report.name}", *folders])
        suite = tree.parse(report.name).getroot().find("testsuite")
        bad = int(suite.get("failures")) + int(suite.get("errors"))
        skipped = int(suite.get("skipped"))
        total["failed"] += bad
        total["skipped"] += skipped
        total["passed"] += int(suite.get("tests")) - bad - skipped


def main():
    total = {"passed": 0, "failed": 0, "skipped": 0}
    for folder in ("tests/unit", "tests/cuda"):
        for program in sorted(p for p in (BUILD / folder).glob("test_*") if not p.suffix):
            if Path(folder, program.name + ".c").exists():
                run_unit(program, total)
    run_fuzz(total)
    if "--unit" not in sys.argv:
        run_pytest(total)
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    return 1 if total["failed"] or not total["passed"] else 0


sys.exit(main())
