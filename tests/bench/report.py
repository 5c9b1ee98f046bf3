"""What was measured, as lines while it runs and as a table at the end."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import programs
from programs import BUILD, ROOT, least


class Bench:
    def __init__(self, folder, quick):
        self.folder, self.quick = Path(folder), quick
        self.rows, self.facts, self.traces = [], [], {}

    def repeats(self, n):
        return min(n, 2) if self.quick else n

    def tokens(self, n):
        return min(n, 512) if self.quick else n

    def trace(self, n_tokens, form, gradients="none"):
        """A trace of SmolLM2, made once for all figures that want it."""
        key = n_tokens, form, gradients
        if key not in self.traces:
            self.traces[key] = self.folder / f"{n_tokens}-{form}-{gradients.replace(':', '')}.h5"
            programs.kvlag_trace(self.traces[key], *key)
        return self.traces[key]

    def compare(self, figure, pairs, goal=None):
        """pairs: Cost of numerator and denominator of each repeat; goal: ("<=" or ">=", number), None where the figure
        only informs."""
        ratios = [a.wall / b.wall for a, b in pairs]
        a, b = (least(side) for side in zip(*pairs))
        self.add(figure, a.wall / b.wall, goal, max(ratios) / min(ratios), f"{a.processor / b.processor:.3f}")
        print(f"{figure}: fastest of {len(pairs)} {a.wall:.3f} s / {b.wall:.3f} s, repeats",
              " ".join(f"{r:.3f}" for r in ratios))  # fmt: skip
        self.say_commands()

    def state(self, figure, values, unit, goal=None, best=max):
        """A number that is no ratio; values: one a repeat."""
        self.add(figure, best(values), goal, max(values) / min(values), "", unit)
        print(f"{figure}: best of {len(values)} {best(values):.4g} {unit}, repeats",
              " ".join(f"{v:.4g}" for v in values))  # fmt: skip
        self.say_commands()

    def leave_out(self, figure, why):
        self.rows.append((figure, "skipped", "", "", "", why))
        print(f"{figure}: skipped, {why}", flush=True)

    def add(self, figure, value, goal, spread, processor, unit=""):
        met = goal and (value <= goal[1] if goal[0] == "<=" else value >= goal[1])
        said = (f"{goal[0]} {goal[1]:.4g}", "yes" if met else "no") if goal else ("", "")
        digits = 3 if value < 10 else 1 if value < 1000 else 0
        self.rows.append((figure, f"{value:.{digits}f} {unit}".strip(), *said, f"{spread:.2f}", processor))

    def say_commands(self):
        for command in dict.fromkeys(programs.commands):
            print(f"    {command}")
        programs.commands.clear()
        print(flush=True)


def processor_name():
    found = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)
    return found[1] if found else "unknown processor"


def compiler():
    """What the measured program says it was built by."""
    done = subprocess.run(["readelf", "-p", ".comment", BUILD / "kvlag"], capture_output=True, text=True)
    found = [line.split("]", 1)[1].strip() for line in done.stdout.splitlines() if "]" in line]
    own = [name for name in found if "clang" in name] or found
    return own[0] if own else "unknown compiler"


def git(*arguments):
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True).stdout.strip()


def commit():
    return git("rev-parse", "--short", "HEAD") + (" and changes" if git("status", "--porcelain", "-uno") else "")


def print_table(head, rows):
    width = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, ["-" * w for w in width], *rows]:
        print("| " + " | ".join(str(cell).ljust(w) for cell, w in zip(row, width)) + " |")


def print_facts(facts, load, seconds):
    facts = [processor_name(), f"{len(os.sched_getaffinity(0))} threads", compiler(), *dict.fromkeys(facts),
             f"commit {commit()}"]  # fmt: skip
    print(f"\n{', '.join(facts)}\nload {load:.2f} at the start, {os.getloadavg()[0]:.2f} at the end, {seconds:.0f} s")


def folder():
    return tempfile.TemporaryDirectory(prefix="kvlag-bench-")
