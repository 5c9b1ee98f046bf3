"""Running `kvlag sim` from tests: its rows, its closing line, and what a refusal must look like."""

import csv
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

KVLAG = os.path.abspath(os.environ.get("KVLAG", "./kvlag"))
ROOT = Path(__file__).resolve().parents[2]
SANITIZED = re.search(rb"__(asan|tsan|ubsan)_", Path(KVLAG).read_bytes()) is not None  # which takes memory of its own
ORACLE = str(ROOT / "tests/oracle")
if ORACLE not in sys.path:
    sys.path.append(ORACLE)

KEY = ["trace", "seq", "policy", "spec", "resolved", "budget_asked", "budget", "lag", "hold", "sinks", "unit",
       "schedule", "pending", "kv_bits", "pending_bits", "n_prompt"]  # fmt: skip
NUMBERS = ["n_counted", "lost_mass", "out_err", "dloss_first", "fisher", "dloss_est", "dloss_lo", "dloss_hi", "kl_est",
           "kl_lo", "kl_hi", "retained", "footprint", "peak", "evictions", "evict_batches", "expired", "resident", "kv_bytes", "score_updates",
           "decode_us"]  # fmt: skip
WHAT_HAPPENED = ["lost_mass", "out_err", "dloss_first", "fisher", "footprint", "peak", "evictions", "evict_batches"]


def kvlag(*args, **more):
    more.setdefault("timeout", 120)
    return subprocess.run([str(more.pop("binary", KVLAG)), *map(str, args)], **{"capture_output": True, **more})


def lines_of(path):
    """Comment lines and the rest, byte exact."""
    lines = Path(path).read_bytes().splitlines(keepends=True)
    return [x for x in lines if x.startswith(b"#")], b"".join(x for x in lines if not x.startswith(b"#"))


def rows_of(path):
    return list(csv.DictReader(io.StringIO(lines_of(path)[1].decode(), newline=""), strict=True))


def blocks_of(path):
    return Path(str(path)[:-4] + ".blocks.h5")


def sim(out, *args, **more):
    """Run it, expect success, return the rows."""
    done = kvlag("sim", *args, "-o", out, "--force", **more)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b""
    return rows_of(out)


def sim_said(out, *args, **more):
    """The same, returning the closing line."""
    done = kvlag("sim", *args, "-o", out, "--force", **more)
    assert done.returncode == 0, done.stderr.decode()
    return done.stderr.decode().splitlines()[-1]


def closing(line):
    """The numbers of the closing line."""
    m = re.search(r": (\d+) rows from (\d+) conf.*planned ([\d.]+) MiB \(([\d.]+) fixed.* (\d+) pass", line)
    assert m, line
    names = "rows", "configurations", "planned", "fixed", "passes"
    return {name: float(x) for name, x in zip(names, m.groups())}


def happened(rows):
    return [tuple(row[c] for c in WHAT_HAPPENED) for row in rows]


def snapshot(folder):
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(Path(folder).rglob("*"))}


def refused(folder, code, words, *args, **more):
    """One line on stderr that says `words`, this exit code, nothing on stdout, and every file as it was."""
    before = snapshot(folder)
    done = kvlag(*args, cwd=folder, **more)
    said = done.stderr.decode(errors="replace")
    assert done.returncode == code, f"exit {done.returncode}, expected {code}: {said}"
    assert said.startswith("kvlag: ") and said.endswith("\n") and said.count("\n") == 1, said
    assert len(said) > len("kvlag: \n"), said
    for word in [words] if isinstance(words, str) else words:
        assert word in said, f"'{word}' is not in: {said}"
    assert not done.stdout, done.stdout
    assert snapshot(folder) == before


# A child inherits the peak of the process it was forked from, so a small one starts it.
LAUNCHER = """
import os
import sys
child = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(child, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def peak_mib(*args):
    """Peak resident memory of a call, and the lines it said."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", LAUNCHER, KVLAG, *map(str, args)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout) / 1024, done.stderr.splitlines()


def killed_after(here, journal, size, *args):
    """Start it in `here`, kill it without warning once its journal holds more bytes. False: it was done before."""
    child = subprocess.Popen([KVLAG, *map(str, args), "-q"], cwd=here)
    while child.poll() is None:
        try:
            if (here / journal).stat().st_size > size:
                break
        except FileNotFoundError:
            pass
    child.send_signal(signal.SIGKILL)
    if child.wait() == 0:
        return False
    for left in here.glob("*.tmp"):  # nobody could remove them
        left.unlink()
    return True
