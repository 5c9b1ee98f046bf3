"""tests/gpu/check.sh where no device is: it says so. With the kernels run on the CPU: its sections work, and those that
fail are named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from simcli import KVLAG, ROOT

BUILD = Path(os.environ.get("BUILD", "build/gcc-release")).absolute()
SECTIONS = ["machine", "parity", "ladder", "speed", "sanitizer"]


def check(out, **more):
    return subprocess.run(["bash", ROOT / "tests/gpu/check.sh"], capture_output=True, text=True, timeout=330,
                          env={**os.environ, "OUT": str(out), "PYTHON": sys.executable, **more})  # fmt: skip


def outcomes(done):
    lines = [line.split(": ", 1) for line in done.stdout.splitlines()]
    return {name: said.split(",")[0] for name, said in lines if name in SECTIONS}


def test_without_a_device_it_says_so(tmp_path):
    if subprocess.run([sys.executable, ROOT / "tests/gpu/device.py"], capture_output=True).returncode == 0:
        pytest.skip("there is a device")
    done = check(tmp_path / "out", PATH="/usr/bin:/bin")
    assert (done.returncode, done.stdout, done.stderr) == (0, "skipped: no CUDA device\n", "")
    assert not (tmp_path / "out").exists()


def test_every_section_on_the_cpu(tmp_path):
    done = check(tmp_path, CHECK_FIBERS="1", KVLAG=KVLAG, BUILD=str(BUILD), TMPDIR=str(tmp_path))
    report = (tmp_path / "gpu-report.md").read_text()
    assert done.returncode == 0, report
    assert outcomes(done) == {**dict.fromkeys(SECTIONS, "passed"), "sanitizer": "left out"}
    assert "FAILED" not in report
    for line in ("| bf16: --offload | same bytes | same bytes | ok |", "| k_attention_back, 2 sets |",
                 "| k_hidden_back |", "| 100 | bf16 | factored | fisher:1 |", "cuBLAS TFLOP/s"):  # fmt: skip
        assert line in report
    assert [p.name for p in tmp_path.iterdir()] == ["gpu-report.md"]  # models and traces are gone


def test_what_fails_is_named_and_the_rest_runs(tmp_path):
    (tmp_path / "build/tests/gpu").mkdir(parents=True)
    (tmp_path / "build/tests/gpu/ladder-fibers").symlink_to(BUILD / "tests/gpu/ladder-fibers")
    done = check(tmp_path, CHECK_FIBERS="1", KVLAG=KVLAG, BUILD=str(tmp_path / "build"))  # no plugin is there
    assert done.returncode == 1
    assert outcomes(done) == {"machine": "passed", "parity": "FAILED", "ladder": "passed", "speed": "FAILED",
                              "sanitizer": "left out"}  # fmt: skip
    report = (tmp_path / "gpu-report.md").read_text()
    assert "| parity | FAILED |" in report and "--backend cuda: no " in report
