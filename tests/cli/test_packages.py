"""What others get to use: an installed kvlag, libkvlag with its headers and pkg-config file, policies as plugins, and
what docs/adding-a-policy.md says about them. Everything is compiled as a stranger would."""
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np
import pytest

import documents
from simcli import KVLAG, ROOT, happened, kvlag, lines_of, refused, rows_of, sim
from test_shard import mpi, needs_mpi

BUILD = Path(os.environ.get("BUILD", Path(KVLAG).parent)).resolve()
SANITIZER = {"asan": ["-fsanitize=address"], "ubsan": ["-fsanitize=undefined"], "tsan": ["-fsanitize=thread"]}
CC, _, MODE = BUILD.name.partition("-") if re.fullmatch(r"(gcc|clang)-\w+", BUILD.name) else ("gcc", "-", "release")
WARNINGS = ["-std=c17", "-Wall", "-Wextra", "-Werror"]
SAMPLE = ROOT / "traces/samples/tiny-recall.h5"
PAGE = "docs/adding-a-policy.md"
EQUALS = "mix(evidence=attn>=tau,memory=ema:0.5,tau=1/resident,hold=1)"  # lrfu(1)


def run(*argv, **more):
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=300, **more)
    assert done.returncode == 0, f"{argv}\n{done.stdout}{done.stderr}"
    return done.stdout


def make(target, *variables):
    clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return run("make", "-s", target, f"BUILD={BUILD}", f"CC={CC}", f"MODE={MODE}", "NVCC=", *variables, cwd=ROOT, env=clean)


def pkg_config(prefix, *options):
    return run("pkg-config", *options, "kvlag", env={**os.environ, "PKG_CONFIG_PATH": f"{prefix}/lib/pkgconfig"}).split()


def plugin(source, out, *flags):
    run(CC, *WARNINGS, "-O2", "-fPIC", "-shared", "-fvisibility=hidden", *flags, source, "-o", out, "-lm")
    return out


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed") / "usr"
    make("install", f"PREFIX={folder}")
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A folder in which out/ holds the programs that the page shows, and its plugin, compiled strictly."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "out").mkdir()
    for language, block in documents.blocks(PAGE):
        if name := documents.file_of(language, block):
            (folder / name).write_text(block + "\n")
    plugin(folder / "out/lrfu.c", folder / "out/lrfu.so", f"-I{ROOT}", "-Wpedantic", "-Wshadow")
    return folder


# ---- installing ------------------------------------------------------------------------------------------------------


def test_what_is_installed_and_that_it_can_be_removed(tmp_path):
    variables = f"DESTDIR={tmp_path}", "PREFIX=/usr", "LIBDIR=/usr/lib/here", "ZSHDIR=/usr/share/zsh/vendor-completions"
    make("install", *variables)
    found = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if not p.is_dir()}
    version = kvlag("--version").stdout.decode().split()[1]
    library = {"libkvlag.so", "libkvlag.so.0", f"libkvlag.so.{version}", "libkvlag.a", "pkgconfig/kvlag.pc"}
    assert {f"usr/lib/here/{name}" for name in library} <= found
    assert {"usr/bin/kvlag", "usr/share/man/man1/kvlag.1", "usr/share/man/man1/kvlag-sim.1",
            "usr/share/bash-completion/completions/kvlag", "usr/share/zsh/vendor-completions/_kvlag",
            "usr/share/fish/vendor_completions.d/kvlag.fish", "usr/share/doc/kvlag/README.md",
            "usr/share/doc/kvlag/docs/adding-a-policy.md", "usr/share/doc/kvlag/traces/samples/tiny-recall.h5",
            "usr/include/kvlag/sim/policy.h"} <= found  # fmt: skip
    assert "libdir=${prefix}/lib/here" in (tmp_path / "usr/lib/here/pkgconfig/kvlag.pc").read_text()
    make("uninstall", *variables)
    assert [p for p in tmp_path.rglob("*") if not p.is_dir()] == []


def test_the_installed_program_works(prefix, tmp_path):
    def said(*argv):
        return run(prefix / "bin/kvlag", *argv, cwd=tmp_path)

    assert said("--version") == kvlag("--version").stdout.decode()
    said("sim", prefix / "share/doc/kvlag/traces/samples/tiny-recall.h5", "-o", "r.csv", "-p", "window", "-b", "64")
    assert len(rows_of(tmp_path / "r.csv")) == 1


def test_the_program_for_other_models_is_installed(prefix, tmp_path):
    """Where the recipes say, and in one line what it needs."""
    script = prefix / "share/doc/kvlag/tracer/from_transformers.py"
    done = subprocess.run([sys.executable, "-I", "-S", script, "m", "t", "-o", "x.h5"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "No module named 'h5py' (needs torch, transformers 4.53 or newer, h5py and hdf5plugin)" in done.stderr


def test_the_version_is_one(prefix):
    version = kvlag("--version").stdout.decode().split()[1]
    assert pkg_config(prefix, "--modversion") == [version]
    changelog = (ROOT / "debian/changelog").read_text()
    assert re.match(r"kvlag \(([^)]+)\)", changelog)[1] == version


def test_the_tarball_is_reproducible_and_whole():
    if not (ROOT / ".git").exists():
        pytest.skip("no git here")
    names = f"kvlag-{kvlag('--version').stdout.decode().split()[1]}"
    tarball, made = ROOT / f"build/{names}.tar.gz", []
    for _ in range(2):
        tarball.unlink(missing_ok=True)
        make("dist")
        made.append(tarball.read_bytes())
    assert made[0] == made[1]
    listed = run("tar", "-tzf", tarball).splitlines()
    committed = run("git", "ls-tree", "-r", "--name-only", "-z", "HEAD", cwd=ROOT).split("\0")[:-1]
    assert {name for name in listed if not name.endswith("/")} == {f"{names}/{name}" for name in committed}


def test_the_debian_packages(page, tmp_path):
    """A minute and a half: builds from the tarball, and lintian has nothing to say."""
    if not os.environ.get("KVLAG_DEB"):
        pytest.skip("KVLAG_DEB=1 asks for it; .ci/run runs make deb")
    make("deb")
    for package in (ROOT / "build/deb").glob("*.deb"):
        run("dpkg-deb", "-x", package, tmp_path)
    library = next(tmp_path.glob("usr/lib/*/libkvlag.so")).parent
    assert (tmp_path / "usr/share/man/man1/kvlag.1.gz").exists()
    plugin(page / "out/lrfu.c", tmp_path / "lrfu.so", f"-I{tmp_path}/usr/include/kvlag")
    run(tmp_path / "usr/bin/kvlag", "sim", tmp_path / "usr/share/doc/kvlag/traces/samples/tiny-recall.h5", "-o", tmp_path / "r.csv",
        "--plugin", tmp_path / "lrfu.so", "-p", "lrfu", "-b", "64")  # fmt: skip
    run(CC, *WARNINGS, f"-I{tmp_path}/usr/include/kvlag", ROOT / "tests/packages/read_trace.c", "-o", tmp_path / "read",
        f"-L{library}", "-lkvlag", "-lm")  # fmt: skip
    run(tmp_path / "read", SAMPLE, 1, 77, 64, tmp_path / "l.h5", env={**os.environ, "LD_LIBRARY_PATH": str(library)})


# ---- libkvlag --------------------------------------------------------------------------------------------------------


def test_headers_compile_alone(prefix):
    headers = sorted((prefix / "include/kvlag").rglob("*.h"))
    assert {str(h.relative_to(prefix / "include/kvlag")) for h in headers} >= {"traces/trace.h", "sim/policy.h"}
    for header in headers:
        run(CC, *WARNINGS, "-Wpedantic", "-fsyntax-only", *pkg_config(prefix, "--cflags"), "-include", header, "-x", "c",
            "/dev/null")  # fmt: skip


def test_the_library_shows_what_its_headers_declare(prefix):
    declared = set()
    for header in (prefix / "include/kvlag").rglob("*.h"):
        code = re.sub(r"/\*.*?\*/|^\s*#.*?(?<!\\)$", "", header.read_text(), flags=re.S | re.M)
        declared |= set(re.findall(r"^[\w ]*?\b[ *]*(\w+)\([^;{]*\)(?: __attribute__\(.*\))?;", code, flags=re.M))
    for symbols in (["nm", "-D", "--defined-only", prefix / "lib/libkvlag.so.0"],
                    ["nm", "-g", "--defined-only", prefix / "lib/libkvlag.a"]):  # fmt: skip
        shown = {line.split()[-1].partition("@")[0] for line in run(*symbols).splitlines() if len(line.split()) == 3}
        assert {s for s in shown if s != "KVLAG_0" and not s.startswith("__")} == declared
    assert "SONAME" in (dynamic := run("objdump", "-p", prefix / "lib/libkvlag.so")) and "libkvlag.so.0\n" in dynamic


@pytest.mark.parametrize("how", ["shared", "static"])
def test_a_program_of_somebody_else(prefix, tmp_path, how):
    flags = pkg_config(prefix, "--cflags", "--libs", *(["--static"] if how == "static" else []))
    if how == "static":
        flags = ["-l:libkvlag.a" if f == "-lkvlag" else f for f in flags]
    run(CC, *WARNINGS, *SANITIZER.get(MODE, []), ROOT / "tests/packages/read_trace.c", "-o", tmp_path / "read", *flags)
    assert ("libkvlag" in run("objdump", "-p", tmp_path / "read")) == (how == "shared")
    out = run(tmp_path / "read", SAMPLE, 1, 77, 64, tmp_path / "l.h5", env={**os.environ, "LD_LIBRARY_PATH": f"{prefix}/lib"})
    said = {tuple(line.split()[:2]): line.split()[2:] for line in out.splitlines()}
    with h5py.File(SAMPLE) as f:
        seq, H, KV, D = f["seq/0000"], int(f.attrs["n_head"]), int(f.attrs["n_kv_head"]), int(f.attrs["head_dim"])
        tokens, q, k = seq["tokens"][:], seq["attn/q"][1].astype("f8"), seq["attn/k"][1].astype("f8")
        scale, layers = float(f.attrs["scale"]), int(f.attrs["n_layer"])
    assert said["policy", "7"] == []
    assert said["trace", "tiny-recall"] == [str(x) for x in (layers, H, KV, D)]
    assert said["tokens", str(len(tokens))] == [str(tokens.sum())]
    for h in range(H):
        scores = scale * k[h // (H // KV), :78] @ q[h, 77]
        row = np.exp(scores - scores.max())
        moment = (row / row.sum()) @ np.arange(1, 79)
        assert abs(float(said["row", str(h)][0]) - moment) < 1e-4 * moment
    for kv in range(KV):
        total = np.abs(k[kv]).sum()
        assert abs(float(said["keys", str(kv)][0]) - total) < 1e-6 * total
    ours = sim(tmp_path / "w.csv", SAMPLE, "-p", "window", "-b", "64")
    theirs = sim(tmp_path / "t.csv", SAMPLE, "--from-lifetimes", tmp_path / "l.h5")
    assert [row["lost_mass"] for row in ours] == [row["lost_mass"] for row in theirs]


# ---- plugins ---------------------------------------------------------------------------------------------------------


def test_the_page_can_be_followed_after_an_installation(prefix, page, tmp_path):
    plugin(page / "out/lrfu.c", tmp_path / "lrfu.so", *pkg_config(prefix, "--cflags"))
    assert run(prefix / "bin/kvlag", "policies", "--plugin", tmp_path / "lrfu.so", "lrfu").startswith("lrfu: evict")


@pytest.mark.parametrize("a, b", [("lrfu(0)", "lfu"), ("lrfu(lambda=1)", EQUALS), ("lrfu(0,tau=0.02)", "lfu(tau=0.02)")])
def test_the_plugin_equals_what_it_must(page, tmp_path, a, b):
    for options in (["-b", "10%,25%"], ["-b", "64", "--unit", "layer", "--schedule", "every:4"], ["-b", "9%", "--schedule", "block:8"]):
        rows = sim(tmp_path / "r.csv", SAMPLE, "--plugin", page / "out/lrfu.so", "-p", a, "-p", b, *options)
        n = len(rows) // 2
        assert n and happened(rows[:n]) == happened(rows[n:])
        assert rows[0]["policy"] == "lrfu"


def test_the_worked_example(page, tmp_path):
    """The rows of the page's table: of equal scores the first entry goes; with lambda=0 the same one."""
    rows = [[1, 0, 0, 0], [.65, .35, 0, 0], [.2, .4, .4, 0], [.5, .09, .1, .31]]  # fmt: skip
    with h5py.File(tmp_path / "t.h5", "w") as f:
        f.attrs.update(format="kvlag-trace", version=1, n_layer=1, n_head=1, n_kv_head=1, head_dim=1)
        f["seq/0000/attn/probs"] = np.array(rows, "f4")[None, None]
        f.attrs["complete"] = 1
    for spec in "lrfu(1)", "lrfu(0)", "lrfu(1,tau=0.09)":
        sim(tmp_path / "r.csv", tmp_path / "t.h5", "--plugin", page / "out/lrfu.so", "-p", spec, "-b", "3",
            "--lifetimes", tmp_path / "l.h5")  # fmt: skip
        with h5py.File(tmp_path / "l.h5") as f:
            evict_at = f["config/0000/seq/0000/evict_at"][0, 0]
        # At tau = .09 entry 1 was used at steps 1, 2 and 3, entry 2 at 2 and 3: now that is the least.
        assert list(evict_at) == ([5, 5, 4, 5] if "tau" in spec else [5, 4, 5, 5])


def test_the_plugin_against_the_oracle_of_the_page(page, tmp_path, monkeypatch):
    from make_traces import write_trace
    from test_sim import check_all, simulate
    from tracefile import read_trace

    monkeypatch.syspath_prepend(page / "out")
    importlib.import_module("oracle_lrfu")
    write_trace(tmp_path / "t.h5", 35, seqs=[dict(T=48, forms=("factored",), n_prompt=9)])
    specs = ["lrfu", "lrfu(0.3,hold=2)", "lrfu(lambda=1,tau=0.1,row=max)"]
    for schedule, unit in ("step", "head"), ("every:3", "layer"), ("prompt", "head"):
        results = simulate(tmp_path, tmp_path / "t.h5", specs, "-b", "7,12", "--schedule", schedule, "--unit", unit,
                           "--plugin", page / "out/lrfu.so")  # fmt: skip
        assert check_all(results, read_trace(tmp_path / "t.h5")) == len(results.rows) == 6


def test_the_plugin_as_a_built_in_policy(page, tmp_path):
    """The steps of the page's last section, in a kvlag linked from the registry as it would be then."""
    policies = tmp_path / "sim/policies"
    policies.mkdir(parents=True)
    code = (page / "out/lrfu.c").read_text()
    for was, becomes in (('#include "sim/policy.h"', '#include "sim/policies/presets.h"'), ("static const policy lrfu =", "const policy policy_lrfu ="),
                         ("const policy *const kvlag_policies[] = {&lrfu, NULL};\n", "")):  # fmt: skip
        assert code.count(was) == 1
        code = code.replace(was, becomes)
    (policies / "lrfu.c").write_text(code)
    presets = (ROOT / "sim/policies/presets.h").read_text()
    (policies / "presets.h").write_text(presets + "extern const policy policy_lrfu;\n")
    registry = (ROOT / "sim/registry.c").read_text()
    (tmp_path / "sim/registry.c").write_text(registry.replace("    &policy_full,\n", "    &policy_full,\n    &policy_lrfu,\n"))
    objects = []
    for source in "sim/policies/lrfu.c", "sim/registry.c":
        objects.append(tmp_path / (Path(source).stem + ".o"))
        run(CC, *WARNINGS, *SANITIZER.get(MODE, []), "-O2", "-D_GNU_SOURCE", f"-I{tmp_path}", f"-I{ROOT}", "-c", tmp_path / source,
            "-o", objects[-1])  # fmt: skip
    libraries = run("pkg-config", "--libs", "hdf5", "openblas", "libzstd", "libpcre2-8", "libcjson", "libxxhash",
                    "libutf8proc").split()
    run(CC, *SANITIZER.get(MODE, []), "-rdynamic", "-o", tmp_path / "kvlag", BUILD / "kvlag.o", *objects, BUILD / "kvlag.a",
        *libraries, "-lm", "-lpthread", "-ldl")  # fmt: skip
    options = ["sim", SAMPLE, "-p", "lrfu(0.01|0.5)", "-p", "ada(lrfu)", "-b", "10%,25%"]
    run(tmp_path / "kvlag", *options, "-o", tmp_path / "built-in.csv")
    sim(tmp_path / "plugin.csv", *options[1:], "--plugin", page / "out/lrfu.so")
    assert lines_of(tmp_path / "built-in.csv")[1] == lines_of(tmp_path / "plugin.csv")[1]
    refused(tmp_path, 1, "lrfu: the name is taken", "policies", "--plugin", page / "out/lrfu.so", binary=tmp_path / "kvlag")


def test_what_results_say_of_plugins(page, tmp_path):
    shutil.copy(page / "out/lrfu.so", tmp_path / "lrfu.so")
    rows = sim(tmp_path / "r.csv", SAMPLE, "--plugin", tmp_path / "lrfu.so", "-p", "lrfu", "-p", "window", "-b", "64")
    comments = [line.decode() for line in lines_of(tmp_path / "r.csv")[0]]
    assert len(rows) == 2 and any("--plugin lrfu.so" in c and str(tmp_path) not in c for c in comments)
    assert len([c for c in comments if re.fullmatch(r"# plugin: lrfu\.so XXH3 [0-9a-f]{16}\n", c)]) == 1
    other = plugin(page / "out/lrfu.c", tmp_path / "other.so", f"-I{ROOT}", "-O0")
    both = ["sim", SAMPLE, "-p", "lrfu(0|1)", "-b", "64,96"]
    assert kvlag(*both, "-o", tmp_path / "a.csv", "--plugin", tmp_path / "lrfu.so", "--shard", "1/2").returncode == 0
    os.replace(other, tmp_path / "lrfu.so")
    assert kvlag(*both, "-o", tmp_path / "b.csv", "--plugin", tmp_path / "lrfu.so", "--shard", "2/2").returncode == 0
    refused(tmp_path, 1, ["b.csv does not belong to", "# plugin: lrfu.so XXH3"], "merge", "a.csv", "b.csv", "-o", "m.csv")


def test_policies_of_plugins_in_lists_and_mistakes(page, tmp_path):
    lrfu = page / "out/lrfu.so"
    assert b'"lrfu"' in kvlag("policies", "--json", "--plugin", lrfu).stdout
    assert b'"lrfu"' not in kvlag("policies", "--json").stdout
    refused(tmp_path, 2, "did you mean lrfu?", "sim", SAMPLE, "-o", "r.csv", "-p", "lrfx", "-b", "9", "--plugin", lrfu)
    refused(tmp_path, 2, "unknown policy 'lrfu'", "sim", SAMPLE, "-o", "r.csv", "-p", "lrfu", "-b", "9")
    refused(tmp_path, 2, "out of range", "sim", SAMPLE, "-o", "r.csv", "-p", "lrfu(2)", "-b", "9", "--plugin", lrfu)


FAULTS = [("OLD_ABI", "version 1 of the contract, this kvlag has version 2"), ("TAKEN_NAME", "h2o: the name is taken"),
          ("NO_SCORE", "faulty: it has no function 'score'"), ("NAME_OF_MIX", "cannot be called 'evidence'"),
          ("EMPTY_LIST", "kvlag_policies is empty"), ("NO_FAULT -DUNNAMED -Wno-unused", "exports no kvlag_policies"),
          ("NO_FAULT -DUNDEFINED", "undefined symbol: no_such_function")]  # fmt: skip
AT_WORK = [("NAN_SCORE", 1, "policy faulty: the score of entry 3 in step 40 is nan (sequence 0, layer 1, kv head 0)"),
           ("NO_SCORES_AT_ALL", 1, "policy faulty: the score of entry 0 in step 64 is nan"),
           ("REFUSES", 2, "faulty: no thanks"), ("MANY_FIELDS", 1, "faulty: it keeps -3 fields")]  # fmt: skip


@pytest.mark.parametrize("fault, words", FAULTS)
def test_plugins_that_are_refused(tmp_path, fault, words):
    plugin(ROOT / "tests/packages/faulty.c", tmp_path / "faulty.so", f"-I{ROOT}", *f"-DFAULT={fault}".split())
    refused(tmp_path, 1, ["--plugin", "faulty.so", words], "policies", "--plugin", "faulty.so")


@pytest.mark.parametrize("fault, code, words", AT_WORK)
def test_plugins_that_fail_at_work(tmp_path, fault, code, words):
    plugin(ROOT / "tests/packages/faulty.c", tmp_path / "faulty.so", f"-I{ROOT}", f"-DFAULT={fault}")
    budget = ["-b", "40" if fault == "NAN_SCORE" else "64"]
    refused(tmp_path, code, words, "sim", SAMPLE, "-o", "r.csv", "-p", "faulty", *budget, "--plugin", "faulty.so")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """What the sample was traced with."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    run(sys.executable, ROOT / "tests/tiny/make_gguf.py", path)
    return path


@pytest.mark.parametrize("mode", ["open", "closed"])
def test_plugins_in_reruns(page, model, tmp_path, mode):
    done = kvlag("verify", model, SAMPLE, "-o", tmp_path / "t.csv", "--mode", mode, "--plugin", page / "out/lrfu.so",
                 "-p", "lrfu(0)", "-p", "lfu", "-b", "64")  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours, theirs = rows_of(tmp_path / "t.csv")
    assert (ours["policy"], theirs["policy"]) == ("lrfu", "lfu") and ours["true_kl"] == theirs["true_kl"] != "0"
    assert any(c.startswith(b"# plugin: lrfu.so XXH3 ") for c in lines_of(tmp_path / "t.csv")[0])


@pytest.mark.parametrize("where", ["head", "layer", "model", "pool", "closed"])
def test_scores_are_checked_wherever_a_policy_is_replayed(model, tmp_path, where):
    plugin(ROOT / "tests/packages/faulty.c", tmp_path / "faulty.so", f"-I{ROOT}", "-DFAULT=NO_SCORES_AT_ALL")
    command = ["sim", SAMPLE, "-o", "r.csv", "-b", "64", "--unit", where]
    if where == "pool":
        command = ["sim", SAMPLE, "-o", "r.csv", "--pool", "96"]
    if where == "closed":
        command = ["verify", model, SAMPLE, "-o", "t.csv", "-b", "64", "--mode", "closed"]
    words = ["policy faulty: the score of entry 0 in step", "scores must be finite"]
    refused(tmp_path, 1, words, *command, "-p", "faulty", "--plugin", "faulty.so")


@needs_mpi
def test_plugins_under_the_launcher(page, tmp_path):
    options = [SAMPLE, "--plugin", page / "out/lrfu.so", "-p", "lrfu(0|1)", "-b", "64,96"]
    done = mpi(2, "sim", *options, "-o", tmp_path / "m.csv", "--threads", 1)
    assert done.returncode == 0, done.stderr
    sim(tmp_path / "s.csv", *options)
    assert (tmp_path / "m.csv").read_bytes() == (tmp_path / "s.csv").read_bytes()


def test_files_that_are_no_plugins(page, tmp_path):
    (tmp_path / "text.so").write_text("not a shared object, but long enough to be looked at as one " * 9)
    refused(tmp_path, 1, ["--plugin", "gone.so: No such file"], "policies", "--plugin", "gone.so")
    refused(tmp_path, 1, ["--plugin", "text.so", "invalid ELF header"], "policies", "--plugin", "text.so")
    refused(tmp_path, 1, ["--plugin", "Is a directory"], "policies", "--plugin", ".")
    lrfu = page / "out/lrfu.so"
    refused(tmp_path, 1, "the name is taken", "policies", "--plugin", lrfu, "--plugin", lrfu)
