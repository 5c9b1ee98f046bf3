"""Whatever the README shows is run here: each `$` command, and its output line by line with numbers masked."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KVLAG = os.path.abspath(os.environ.get("KVLAG", "./kvlag"))
MODEL = ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf"


def shown():
    """(command, output lines) pairs of the README's console blocks."""
    for block in re.findall(r"```console\n(.*?)```", (ROOT / "README.md").read_text(), re.S):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, *output = part.splitlines()
            yield command, [line for line in output if line.strip()]


def masked(line):
    """Numbers, hashes and runs of blanks differ between runs and machines; words do not."""
    return re.sub(r"\s+", " ", re.sub(r"\b[0-9a-f]{16,32}\b|[0-9]+(\.[0-9]+)?", "#", line)).strip()


def test_the_tour_is_true():
    if not MODEL.exists():
        pytest.skip("models/ is empty (make model fetches the weights)")
    commands = list(shown())
    assert len(commands) >= 6
    for command, output in commands:
        command = command.replace("./kvlag", KVLAG).replace(".venv/bin/python", sys.executable)
        done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        lines = [masked(line) for line in (done.stdout + done.stderr).splitlines()]
        for line in output:
            assert masked(line) in lines, f"{command}\nno longer prints: {line}\nbut:\n" + "\n".join(lines)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target
