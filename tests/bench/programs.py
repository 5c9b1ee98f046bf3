"""The programs that are measured, what they print, and what they cost."""

import os
import re
import subprocess
import sys
import time
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("BUILD", "build/gcc-release")
MODEL = ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = ROOT / "demo/genesis.txt"  # about 2700 tokens

commands = []  # that ran since the report took them, as one would type them


class Cost(typing.NamedTuple):
    """Seconds, and seconds of processor time of all threads together."""

    wall: float
    processor: float

    def __add__(self, other):
        return Cost(self.wall + other.wall, self.processor + other.processor)

    def __sub__(self, other):
        return Cost(self.wall - other.wall, self.processor - other.processor)

    def times(self, factor):
        return Cost(self.wall * factor, self.processor * factor)


def least(costs):
    return Cost(*map(min, zip(*costs)))


def remember(command):
    command = [os.path.relpath(c, ROOT) if str(c).startswith(str(ROOT)) else os.path.basename(str(c)) for c in command]
    commands.append(" ".join(command))


def output_of(*command):
    remember(command)
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True).stdout


def costs_of_repeats(output):
    """[{name: Cost}] of the lines "repeat  products 1.293 s (2.473 s)  forward 1.480 s (2.836 s)"."""
    found = re.findall(r"^repeat.*", output, re.M)
    one = re.compile(r"(\w+) ([\d.]+) s \(([\d.]+) s\)")
    return [{name: Cost(float(wall), float(cpu)) for name, wall, cpu in one.findall(line)} for line in found]


def driver(name, *arguments):
    """What a program of this folder prints."""
    return output_of(BUILD / "tests/bench" / name, *arguments)


def processor_seconds(pid):
    """Of all threads of a process so far (proc(5): utime and stime)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Ran(typing.NamedTuple):
    said: str
    after: Cost  # from the end of its first line on
    whole: Cost
    peak: float  # resident memory at most, MiB. A child begins with that of the process that started it


def kvlag(*arguments):
    command = [str(a) for a in (BUILD / "kvlag", *arguments, "--force")]
    remember(command)
    launched = time.perf_counter()
    program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said = program.stderr.readline()
    first, used = time.perf_counter(), processor_seconds(program.pid)
    said += program.stderr.read()
    _, status, usage = os.wait4(program.pid, 0)
    program.returncode = os.waitstatus_to_exitcode(status)
    end, processor = time.perf_counter(), usage.ru_utime + usage.ru_stime
    if program.returncode:
        sys.exit(f"{' '.join(command)}: {said}")
    return Ran(said, Cost(end - first, processor - used), Cost(end - launched, processor), usage.ru_maxrss / 1024)


def kvlag_trace(path, n_tokens, form, gradients="none"):
    """From the line that announces the file, printed when the model is loaded, to the end of the process."""
    ran = kvlag("trace", MODEL, TEXT, "--tokens", n_tokens, "--attention", form, "--gradients", gradients, "-o", path)
    if "will take about" not in ran.said.splitlines()[0]:
        sys.exit(f"kvlag trace no longer begins with what it plans: {ran.said}")
    return ran.after


def kvlag_sim(trace, results, *words, expected=None):
    """Whole process, and the number of configurations, `expected` of them."""
    ran = kvlag("sim", trace, "-o", results, *words)
    found = re.search(r"from (\d+) configurations in ([\d.]+) s", ran.said)
    if not found:
        sys.exit(f"kvlag sim no longer ends with how many configurations took how long: {ran.said}")
    if expected and int(found[1]) != expected:
        sys.exit(f"{found[1]} configurations where {expected} were meant: {ran.said}")
    return ran, int(found[1]), float(found[2])


def grid(n_tokens, n_budgets=10, n_lags=16):
    """Words for kvlag sim: n_budgets * (4 + n_lags) configurations, budgets from 6 to 48 % of the tokens."""
    lags = "|".join(str(i * n_tokens // 512) for i in range(n_lags))
    budgets = ",".join(str(n_tokens // 16 + i * 3 * n_tokens // 64) for i in range(n_budgets))
    specs = [f"rmm(lag={lags})", "h2o", "ema", "tova", "streaming"]
    return [*(word for s in specs for word in ("-p", s)), "-b", budgets]
