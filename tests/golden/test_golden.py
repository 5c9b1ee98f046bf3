"""Numbers reviewed as a diff: the sample traces under every policy, schedule and unit, byte for byte.

Goldens freeze behaviour, right or wrong; tests/oracle says what is right. `make golden` rewrites them.
"""
import os
import subprocess
from pathlib import Path

import pytest

KVLAG = os.path.abspath(os.environ.get("KVLAG", "./kvlag"))
HERE = Path(__file__).parent
RUNS = {
    "scripture-default": ("tiny-scripture", []),
    "scripture-dense": ("tiny-scripture", ["-p", "h2o", "-p", "tova", "-p", "rmm(lag=8)", "-b", "25%", "--attention", "dense",
                                           "--metrics", "lost_mass,out_err=exact"]),
    "recall-lag": ("tiny-recall", ["-p", "rmm(signal=uniform|correct|confidence)", "-p", "h2o(hold=lag)", "-b", "64,25%",
                                   "-L", "0:32:x2", "--pending", "both"]),
    "recall-mixes": ("tiny-recall", ["-p", "mix(evidence=attn|attn*focus|attn>=tau,memory=sum|mean|ema:0.9|recent:8|max:0.9|age)",
                                     "-p", "random(seed=1|2)", "-p", "streaming(sinks=0|2|8)", "-b", "10%", "--prompt", "40"]),
    "recall-every": ("tiny-recall", ["--schedule", "every:16", "-b", "20%", "-L", "4"]),
    "recall-watermark": ("tiny-recall", ["--schedule", "watermark:0.9", "-b", "20%", "-L", "4", "--unit", "layer"]),
    "recall-block": ("tiny-recall", ["--schedule", "block:8", "-b", "20%", "-L", "4"]),
    "recall-prompt": ("tiny-recall", ["--schedule", "prompt", "--prompt", "256", "-b", "20%", "-L", "4"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_golden(name, tmp_path, request):
    trace, options = RUNS[name]
    out = tmp_path / "r.csv"
    subprocess.run([KVLAG, "sim", f"traces/samples/{trace}.h5", "-o", out, "-q", *options], check=True)
    golden = HERE / f"{name}.csv"
    if request.config.getoption("--regenerate"):
        golden.write_bytes(out.read_bytes())
    theirs, ours = out.read_text().splitlines(), golden.read_text().splitlines()
    for line, (a, b) in enumerate(zip(theirs, ours), 1):
        assert a == b, f"{golden.name} line {line}"
    assert len(theirs) == len(ours)
