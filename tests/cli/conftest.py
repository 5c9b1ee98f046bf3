"""Traces that the tests of `kvlag sim` share. Tests run on the CPU backend, whether kvlag-cuda.so was built or not."""

import os
import subprocess
import sys

import pytest

from simcli import ROOT, kvlag

os.environ["KVLAG_CUDA_PLUGIN"] = "/dev/null/kvlag-cuda.so"


@pytest.fixture(scope="session")
def sim_traces(tmp_path_factory):
    """A folder with real.h5 (the tiny model, dense and factored), two.h5 (two sequences with prompts), short.h5
    (40 tokens), dense.h5 (nothing but attention), t1.h5, t2.h5 (1 and 2 tokens) and tiny.gguf."""
    from make_traces import write_trace

    folder = tmp_path_factory.mktemp("sim")
    subprocess.run([sys.executable, ROOT / "tests/tiny/make_gguf.py", folder / "tiny.gguf"], check=True,
                   capture_output=True)  # fmt: skip
    done = kvlag("trace", folder / "tiny.gguf", ROOT / "demo/genesis.txt", "-o", folder / "real.h5", "--tokens", 300,
                 "--attention", "both")  # fmt: skip
    assert done.returncode == 0, done.stderr
    write_trace(folder / "two.h5", 31, rope="base 10000, neox, 8 dims",
                seqs=[dict(T=90, forms=("factored",), n_prompt=20, counted=0.7, probes=6, fisher=1),
                      dict(T=70, forms=("factored",), n_prompt=11, fisher=1)])  # fmt: skip
    write_trace(folder / "short.h5", 32, n_layer=1, n_head=2, n_kv_head=1, seqs=[dict(T=40, forms=("factored",))])
    write_trace(folder / "dense.h5", 33, n_layer=1, n_head=2, n_kv_head=1, wo=False,
                seqs=[dict(T=40, forms=("dense",), logits=False)])  # fmt: skip
    for T in 1, 2:
        write_trace(folder / f"t{T}.h5", 34, n_layer=1, n_head=2, n_kv_head=1, seqs=[dict(T=T, forms=("factored",))])
    return folder
