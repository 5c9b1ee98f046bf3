"""Which backend computes: the plugin that is looked for, what is said when it cannot be used, and the options."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import pytest

KVLAG = os.path.abspath(os.environ.get("KVLAG", "./kvlag"))
ROOT = Path(__file__).resolve().parents[2]
NO_DEVICE = "no CUDA device (driver not found); use --backend cpu"
# A plugin whose device is never there.
SOURCE = """
#include "base/err.h"
#include "tracer/backend.h"
static int load(const model *m, pool *p, const backend_options *o, backend_state **out) {
    (void)m, (void)p;
    *out = 0;
    return o->offload ? err_set(ERR_DATA, "out of device memory for %s/%s on '%s'", o->precision, o->weights, o->device)
                      : err_set(ERR_DATA, "%s", MESSAGE);
}
static void unload(backend_state *s) { (void)s; }
const int kvlag_plugin_version = VERSION;
const backend kvlag_cuda_backend = {.name = "cuda", .packs = true, .load = load, .unload = unload};
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, ROOT / "tests/tiny/make_gguf.py", folder / "tiny.gguf"], check=True,
                   capture_output=True)  # fmt: skip
    (folder / "text.txt").write_text("Tirzah gold. Seth honey. Tirzah gold.\n" * 2)
    return folder / "tiny.gguf", folder / "text.txt"


def build(path, source=SOURCE, version="BACKEND_PLUGIN_VERSION", *more):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        pytest.skip("no C compiler for a plugin")
    flags = [f'-DMESSAGE="{NO_DEVICE}"', f"-DVERSION={version}", "-I", ROOT, "-D_GNU_SOURCE", "-std=c17"]
    subprocess.run([compiler, *flags, "-shared", "-fPIC", "-x", "c", "-o", path, "-", *more], input=source, text=True,
                   check=True)  # fmt: skip
    return path


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    return build(tmp_path_factory.mktemp("plugin") / "kvlag-cuda.so")


def trace(inputs, out, *options, plugin="/dev/null/kvlag-cuda.so", kvlag=KVLAG):
    env = {**os.environ, "KVLAG_CUDA_PLUGIN": str(plugin)}
    return subprocess.run([kvlag, "trace", *map(str, inputs), "-o", str(out), *options], capture_output=True, text=True,
                          env=env)  # fmt: skip


def refused(code, words, folder, done):
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr
    assert not list(folder.iterdir())


def test_kvlag_links_no_cuda():
    linked = subprocess.run(["ldd", KVLAG], capture_output=True, text=True, check=True).stdout.lower()
    assert "libhdf5" in linked
    assert "cuda" not in linked and "cublas" not in linked and "nvidia" not in linked


def test_without_the_plugin(inputs, tmp_path):
    refused(1, ["--backend cuda: no /x/y.so", "make cuda", "use --backend cpu"], tmp_path,
            trace(inputs, tmp_path / "o.h5", "--backend", "cuda", plugin="/x/y.so"))  # fmt: skip
    quiet = trace(inputs, tmp_path / "a.h5")
    assert quiet.returncode == 0 and "CUDA" not in quiet.stderr and "using the CPU" not in quiet.stderr
    assert "no /x/y.so: using the CPU" in trace(inputs, tmp_path / "b.h5", "-v", plugin="/x/y.so").stderr
    assert trace(inputs, tmp_path / "c.h5", "--backend", "cpu", "-q").stderr == ""


def test_a_plugin_that_cannot_be_used(inputs, plugin, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    other = build(tmp_path / "other.so", version="77")
    empty = build(tmp_path / "empty.so", "int nothing;")
    broken = tmp_path / "broken.so"
    broken.write_text("no shared object")
    build(tmp_path / "libgone.so", "int gone(void) { return 1; }")
    needy = build(tmp_path / "needy.so", SOURCE + "int gone(void); int f(void) { return gone(); }", "1", "-L", tmp_path,
                  "-lgone")  # fmt: skip
    (tmp_path / "libgone.so").unlink()
    for path, words in (plugin, [NO_DEVICE]), (other, ["plugin version 77", "make cuda"]), (empty, ["is no plugin"]), \
            (broken, ["broken.so", "use --backend cpu"]), (needy, ["libgone.so", "use --backend cpu"]):  # fmt: skip
        refused(1, words, work, trace(inputs, work / "o.h5", "--backend", "cuda", plugin=path))
        done = trace(inputs, work / "o.h5", plugin=path)
        assert done.returncode == 0
        assert done.stderr.startswith("CUDA: ") and words[0].split(";")[0] in done.stderr.splitlines()[0]
        assert done.stderr.splitlines()[0].endswith("; using the CPU") and done.stderr.count("--backend cpu") == 0
        with h5py.File(work / "o.h5") as f:
            assert (f.attrs["backend"], f.attrs["compute"]) == ("cpu", "f32")
            assert f.attrs["command"] == "kvlag trace tiny.gguf text.txt"
        (work / "o.h5").unlink()
    # Whoever says cpu never loads it.
    assert "CUDA" not in trace(inputs, work / "o.h5", "--backend", "cpu", plugin=plugin).stderr


def test_where_the_plugin_is_found(inputs, plugin, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib/kvlag").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    own = tmp_path / "bin/kvlag"
    shutil.copy(KVLAG, own)
    ask = (inputs, tmp_path / "out/o.h5", "--backend", "cuda")
    missing = trace(*ask, plugin="", kvlag=own)
    refused(1, [f"no kvlag-cuda.so in {tmp_path}/bin and {tmp_path}/bin/../lib/kvlag"], tmp_path / "out", missing)
    for place in "lib/kvlag", "bin":
        shutil.copy(plugin, tmp_path / place)
        refused(1, [NO_DEVICE], tmp_path / "out", trace(*ask, plugin="", kvlag=own))
        (tmp_path / place / "kvlag-cuda.so").unlink()
    (tmp_path / "bare.so").write_bytes(plugin.read_bytes())
    done = subprocess.run([own, "trace", *inputs, "-o", tmp_path / "out/o.h5", "--backend", "cuda"], cwd=tmp_path,
                          capture_output=True, text=True, env={**os.environ, "KVLAG_CUDA_PLUGIN": "bare.so"})  # fmt: skip
    refused(1, [NO_DEVICE], tmp_path / "out", done)


def test_options_reach_the_backend(inputs, plugin, tmp_path):
    done = trace(inputs, tmp_path / "o.h5", "--backend", "cuda", "--offload", "--precision", "bf16", "--weights",
                 "blocks", "--device", "3", plugin=plugin)  # fmt: skip
    refused(1, ["out of device memory for bf16/blocks on '3'"], tmp_path, done)


def test_the_cpu_refuses_what_is_not_its_own(inputs, tmp_path):
    for options, message in (("--precision", "bf16"), "the CPU backend computes in f32"), \
            (("--weights", "dense"), "--weights dense: the CPU backend"), (("--device", "0"), "--device 0: the CPU"), \
            (("--offload",), "--offload: the CPU backend"):  # fmt: skip
        for backend in (), ("--backend", "cpu"):
            refused(2, [message], tmp_path, trace(inputs, tmp_path / "o.h5", *options, *backend))
    refused(2, ["--precision"], tmp_path, trace(inputs, tmp_path / "o.h5", "--precision", "f16"))


def test_what_changes_results_is_recorded(inputs, tmp_path):
    assert trace(inputs, tmp_path / "o.h5", "--backend", "cpu", "--precision", "f32", "--weights", "blocks").returncode == 0
    with h5py.File(tmp_path / "o.h5") as f:
        assert f.attrs["command"] == "kvlag trace tiny.gguf text.txt --backend cpu --precision f32"


def test_verify_chooses_alike(inputs, plugin, tmp_path):
    assert trace(inputs, tmp_path / "t.h5", "--gradients", "none").returncode == 0
    ask = [KVLAG, "verify", inputs[0], tmp_path / "t.h5", "-o", tmp_path / "o.csv", "-p", "h2o", "-b", "8"]
    env = {**os.environ, "KVLAG_CUDA_PLUGIN": str(plugin)}
    done = subprocess.run([*ask, "--backend", "cuda"], capture_output=True, text=True, env=env)
    assert done.returncode == 1 and NO_DEVICE in done.stderr and done.stderr.count("\n") == 1
    done = subprocess.run([*ask, "--precision", "bf16"], capture_output=True, text=True)
    assert done.returncode == 2 and "the CPU backend computes in f32" in done.stderr
    done = subprocess.run(ask, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and done.stderr.startswith("CUDA: no CUDA device (driver not found); using the CPU\n")
    assert "# command: kvlag verify tiny.gguf t.h5 -p h2o -b 8\n" in (tmp_path / "o.csv").read_text()


def test_the_closing_lines_say_where_time_went(inputs, tmp_path):
    (tmp_path / "long").write_text("Tirzah gold. Seth honey. Tirzah gold.\n" * 60)
    said = trace((inputs[0], tmp_path / "long"), tmp_path / "o.h5", "-v", "--threads", "3").stderr.splitlines()[-1]
    assert said.startswith("time: compute ") and "(3 threads)" in said
    assert said.split("bound by ")[1] in ("computation", "copies", "compression", "writing")
    number = [float(x) for x in said.replace(",", "").split() if x.replace(".", "").isdigit()]
    compute, copy, pack, write, total = number
    assert copy == 0 and compute > 0 and pack > 0 and compute + pack <= total + 0.02
    assert "time:" not in trace(inputs, tmp_path / "p.h5").stderr
