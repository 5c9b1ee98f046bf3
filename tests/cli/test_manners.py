"""What kvlag says about itself: help, topics, man pages, and every example they show, run for real."""

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import termios

import pytest

from simcli import KVLAG, ROOT, kvlag, sim

MODEL = ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf"


def said(*args):
    done = kvlag(*args)
    assert (done.returncode, done.stderr) == (0, b""), (args, done.stderr)
    return done.stdout.decode()


def listed(heading):
    """The names that stand under a heading of the overview."""
    under = re.search(rf"^{heading}:\n((?:  .*\n)+)", said("help"), re.M)
    return re.findall(r"^  (\S+) ", under[1], re.M)


def commands():
    return listed("Commands")


def examples(page):
    """Commands under "Examples:", lines that end in a backslash joined."""
    if "\nExamples:\n" not in page:
        return []
    lines = page.split("\nExamples:\n")[1].replace(" \\\n     ", "").splitlines()
    return [line.strip() for line in lines if line.startswith("  kvlag ")]


# ---- help ------------------------------------------------------------------------------------------------------------


def test_the_overview_teaches_a_first_round():
    page = said("help")
    assert {"trace", "sim", "verify", "analyze", "merge", "info", "make-trace", "policies", "help", "man"} <= set(commands())
    assert {"spec", "budgets", "grid", "files", "environment"} <= set(listed("Topics"))
    first = re.findall(r"^  kvlag (\S+) .*(?:\\\n.*)*", page.split("A first round:")[1], re.M)
    assert first[:3] == ["trace", "sim", "analyze"]
    assert "--version" in page and "-h" in page
    assert page == said("--help") == said("-h")


def test_every_page_fits_100_columns_and_topics_78():
    for name in ["", *commands(), *listed("Topics")]:
        most = 78 if name in listed("Topics") else 100
        for line in said("help", *name.split()).splitlines():
            assert len(line) <= most, (name, line)


def test_help_behind_a_command_is_its_page():
    for name in commands():
        page = said("help", name)
        assert page.startswith(f"kvlag {name}") and page == said(name, "--help"), name
        assert 1 <= len(examples(page)) <= 6, name
        assert said(name, "-h") == page


def test_examples_are_true(tmp_path):
    """In the order of the list, in one folder, since they build on each other. Without the real model its examples are
    left out and a sample trace stands in for the one they would have made."""
    (tmp_path / "out").mkdir()
    for name in "README.md", "LICENSE", "examples":
        (tmp_path / name).symlink_to(ROOT / name)
    if MODEL.exists():
        (tmp_path / "models").symlink_to(MODEL.parent.resolve())
    else:
        shutil.copy(ROOT / "traces/samples/tiny-scripture.h5", tmp_path / "out/t.h5")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "kvlag").symlink_to(KVLAG)
    env = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}", "TERM": "dumb"}
    for command in (x for name in commands() for x in examples(said("help", name))):
        if "models/" in command and not MODEL.exists() or "truth" in command and not MODEL.exists():
            continue
        if "| man " in command and not shutil.which("man"):
            continue
        done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, env=env, capture_output=True,
                              text=True)  # fmt: skip
        assert done.returncode == 0, (command, done.stderr)


def kept_lines(topic):
    """The first column of what a topic sets off: specs, options."""
    return [re.split(r" {2,}", line.strip())[0] for line in said("help", topic).splitlines()[2:] if line.startswith("  ") and line[2] != " "]


def test_what_topics_show_is_true(tmp_path, sim_traces):
    """Specs and options that topics show are accepted, and count as many configurations as they say."""
    trace, out = sim_traces / "two.h5", tmp_path / "r.csv"
    specs = kept_lines("spec")
    assert len(specs) > 10
    for spec in specs:
        rows = sim(out, trace, "-p", spec, "-b", 30, "-L", 2, "--prompt", 40)
        n = {"rmm(lag=0|8|64)": 2, "h2o(hold=8|16,sinks=0|4)": 4, "lag(0|8,h2o)": 2}.get(spec, 1)
        assert len(rows) == 2 * n, spec  # two sequences; a hold above the budget and a lag beyond it are skipped
    options = [x.replace("P", "4").replace("F", "0.5").replace("N", "4") for x in kept_lines("budgets")]
    assert len(options) > 10
    for option in options:
        fixed = [] if option.startswith("-b") else ["-b", "30"]
        lag = [] if option.startswith("-L") else ["-L", "2"]
        rows = sim(out, trace, "-p", "rmm", *fixed, *lag, *option.split(), "--prompt", 40)
        lags, budgets = {int(row["lag"]) for row in rows}, {row["budget_asked"] for row in rows}
        wanted = {"-L 8,16": {8, 16}, "-L 0:64:8": {0, 8, 16, 24}, "-L 0:256:x2": {0, 1, 2, 4, 8, 16}, "-L budget/2": {15}}
        assert lags == wanted.get(option, {2}), option
        assert budgets == ({"64", "128"} if "64" in option and "-b" in option else {"10%", "25%"} if "%" in option else {"30"})


def test_the_grid_that_a_topic_shows_is_one(tmp_path, sim_traces):
    (tmp_path / "results").mkdir()
    lines = [line for line in said("help", "grid").splitlines() if line.startswith("  ")]
    (tmp_path / "g.grid").write_text("\n".join(lines))
    assert kvlag("sim", sim_traces / "real.h5", "--grid", tmp_path / "g.grid").returncode == 0
    assert (tmp_path / "results/first.csv").exists()


# ---- man pages -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("man")
    said("man", "-o", folder)
    return folder


def words(text):
    """Without what fonts, filling and hyphenation do to it."""
    text = re.sub(r".\x08", "", text)
    return re.sub(r"\s+", " ", re.sub(r"\u2010\n\s+", "", text))


def test_there_is_a_page_for_every_command(pages):
    assert {p.name for p in pages.iterdir()} == {"kvlag.1", *(f"kvlag-{name}.1" for name in commands())}
    assert said("man") == (pages / "kvlag.1").read_text()
    for name in commands():
        assert said("man", name) == (pages / f"kvlag-{name}.1").read_text()


@pytest.mark.skipif(not shutil.which("groff"), reason="groff is not installed")
def test_pages_have_no_warnings(pages):
    for page in sorted(pages.iterdir()):
        done = subprocess.run(["groff", "-ww", "-z", "-man", page], capture_output=True, text=True)
        assert (done.returncode, done.stderr, done.stdout) == (0, "", ""), page.name


@pytest.mark.skipif(not shutil.which("man"), reason="man is not installed")
def test_pages_render(pages):
    """What lintian runs, and what readers see: every option, and every example as it can be typed."""
    env = {**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "80", "MANROFFSEQ": "", "MAN_KEEP_FORMATTING": ""}
    for page in sorted(pages.iterdir()):
        done = subprocess.run(["man", "--warnings", "-E", "UTF-8", "-l", page], capture_output=True, text=True, env=env)
        assert (done.returncode, done.stderr) == (0, ""), page.name
        shown = words(done.stdout)
        assert max(len(line) for line in done.stdout.splitlines()) <= 80, page.name
        for section in "NAME", "SYNOPSIS", "DESCRIPTION", "EXIT STATUS", "EXAMPLES", "SEE ALSO":
            assert section in shown, (page.name, section)
        if page.name == "kvlag.1":
            assert all(word in shown for word in ("SPECS", "BUDGETS AND LAGS", "FILES", "ENVIRONMENT", "NO_COLOR"))
            continue
        help_page = said("help", page.name[6:-2])
        for option in re.findall(r"^ {2,6}(?:-., )?--(\S+)", help_page, re.M):
            assert f"--{option}" in shown, (page.name, option)
        for command in examples(help_page):
            assert command in shown.replace(" \\ ", " "), (page.name, command)


def test_pages_are_not_overwritten(pages):
    before = (pages / "kvlag.1").read_bytes()
    done = kvlag("man", "-o", pages)
    assert done.returncode == 2 or done.returncode == 1
    assert b"--force" in done.stderr and (pages / "kvlag.1").read_bytes() == before
    said("man", "-o", pages, "--force")
    assert kvlag("man", "smi").returncode == 2 and kvlag("man", "sim", "-o", pages).returncode == 2


# ---- policies --------------------------------------------------------------------------------------------------------


def test_the_tables_of_the_documentation_are_what_the_command_prints():
    text = (ROOT / "docs/policies.md").read_text()
    part = re.search(r"<!-- begin: kvlag policies --markdown -->\n(.*?)<!-- end -->\n", text, re.S)[1]
    assert part == said("policies", "--markdown"), "kvlag policies --markdown belongs between the marks in docs/policies.md"


def test_tables_hold_everything():
    """Each policy once, in tables whose rows have as many cells as their headings, with what --json says of it."""
    tables = [t.splitlines() for t in said("policies", "--markdown").split("\n\n") if t.startswith("|")]
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table}) == 1, table[0]
    facts = {x["name"]: x for x in json.loads(said("policies", "--json"))}
    rows = {re.match(r"\| `([a-z0-9-]+)", row)[1]: row for table in tables for row in table[2:]}
    assert set(facts) <= set(rows)
    for name, fact in facts.items():
        assert fact["help"] in rows[name] and fact["source"] in rows[name], name
    assert "`hold=budget/2`" in rows["h2o"] and "`sinks=" not in rows["h2o"] and "`sinks=4`" in rows["streaming"]
    assert "`head\\|layer\\|model`" in rows["unit"] and "| `head` |" in rows["unit"]
    assert facts["ada"]["argument"] == {"name": "floor", "param": "floor", "default": ""}
    assert kvlag("policies", "rmm", "--markdown").returncode == 2


# ---- which one was meant ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args, meant", [
    (["smi"], "sim"), (["help", "bugdets"], "budgets"), (["help", "simm"], "sim"), (["man", "polices"], "policies"),
    (["sim", "t.h5", "--polciy", "h2o"], "--policy"), (["sim", "t.h5", "--unit", "haed"], "head"),
    (["sim", "t.h5", "--pending=chraged"], "charged"), (["sim", "t.h5", "--metrics", "lost_mas"], "lost_mass"),
    (["trace", "m", "t", "--attention", "densse"], "dense"), (["policies", "streamin"], "streaming"),
    (["make-trace", "randm"], "random"), (["completion", "fisch"], "fish"),
])  # fmt: skip
def test_a_slip_is_named_with_what_was_meant(args, meant):
    done = kvlag(*args)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1
    assert f"did you mean {meant}?" in done.stderr.decode()


@pytest.mark.parametrize("spec, meant", [
    ("h20", "h2o"), ("rmm(leg=3)", "lag"), ("h2o(resent=3)", "recent"), ("rmm(signal=uniforn)", "uniform"),
    ("h2o(unit=haed)", "head"), ("h2o(schedule=evry:2)", "every:P"), ("mix(memory=sun)", "sum"),
    ("mix(memory=emma:0.5)", "ema:A"), ("ada(h2o,flor=0.1)", "floor"), ("adda(h2o)", "ada"), ("lag(3,h20)", "h2o"),
    ("then(snapkw,h2o)", "snapkv"), ("oracle(mas)", "mass"),
])  # fmt: skip
def test_a_slip_in_a_spec_too(tmp_path, spec, meant):
    trace = ROOT / "traces/samples/tiny-recall.h5"
    done = kvlag("sim", trace, "-o", tmp_path / "r.csv", "-p", spec, "-b", "8", "-L", "2")
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1
    assert f"did you mean {meant}?" in done.stderr.decode()


def test_a_slip_in_a_schedule_or_figure(tmp_path):
    trace = ROOT / "traces/samples/tiny-recall.h5"
    done = kvlag("sim", trace, "-o", tmp_path / "r.csv", "-p", "h2o", "-b", "8", "--schedule", "promt")
    assert b"did you mean prompt?" in done.stderr
    for option, slip, meant in ("--figures", "lag,retenton", "retention"), ("--format", "sgv", "svg"):
        done = kvlag("analyze", "r.csv", "-o", tmp_path / "fig", option, slip)
        assert done.returncode == 2 and f"did you mean {meant}?" in done.stderr.decode(), done.stderr


# ---- terminals -------------------------------------------------------------------------------------------------------


def at_terminal(*args, columns=80, stdout_too=False, **variables):
    """Run it with stderr (and stdout) on a pseudo-terminal; what arrived there, and the exit code."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"} | variables
    child = subprocess.Popen([KVLAG, *map(str, args)], stdin=subprocess.DEVNULL, stderr=follower, env=env,
                             stdout=follower if stdout_too else subprocess.DEVNULL)  # fmt: skip
    os.close(follower)
    seen = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # the other end is closed
            piece = b""
        if not piece:
            break
        seen += piece
    os.close(leader)
    return seen.decode(), child.wait(timeout=60)


def test_colours_are_for_terminals_whose_user_wants_them():
    red = "\x1b[1;31mkvlag:\x1b[m unknown command"
    assert at_terminal("smi")[0].startswith(red)
    assert at_terminal("smi", NO_COLOR="")[0].startswith(red)
    for variables in {"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": ""}:
        seen, code = at_terminal("smi", **variables)
        assert seen.startswith("kvlag: unknown command") and "\x1b" not in seen and code == 2, variables
    assert "\x1b[1mExamples:\x1b[m" in at_terminal("help", "sim", stdout_too=True)[0]
    assert "\x1b" not in at_terminal("help", "sim", stdout_too=True, NO_COLOR="yes")[0]
    assert "\x1b" not in at_terminal("help", "sim")[0]  # only stderr is a terminal, stdout is not
    for args in ["help"], ["help", "sim"], ["smi"], ["policies"], ["man"]:
        done = subprocess.run([KVLAG, *args], capture_output=True, env={**os.environ, "TERM": "xterm"})
        assert b"\x1b" not in done.stdout + done.stderr


def drawn(seen):
    """What stood on the progress line, one after the other."""
    return [x for x in re.findall(r"\r\x1b\[K([^\r\n\x1b]*)", seen) if re.match(r"\S+ +\d+ %", x)]


# Work for half a second and more, in several passes for sim.
@pytest.mark.parametrize("what, unit, args", [
    ("sim", "rows", ["sim", "long.h5", "-p", "h2o", "-p", "rmm", "-p", "snapkv", "-p", "roco", "-b", "64,128,256,512,1024",
                     "--memory", "20M", "--threads", "1"]),
    ("trace", "tokens", ["trace", "tiny.gguf", ROOT / "demo/genesis.txt", ROOT / "demo/genesis.txt", "--tokens", "2000",
                         "--attention", "dense", "--threads", "1"]),
    ("analyze", "figures", ["analyze", "r.csv", "--format", "png,svg,pdf"]),
])  # fmt: skip
def test_progress(tmp_path, sim_traces, what, unit, args):
    made = kvlag("make-trace", "random", "-o", tmp_path / "long.h5", "--tokens", 8192, "--heads", 4)
    assert made.returncode == 0, made.stderr
    (tmp_path / "tiny.gguf").symlink_to(sim_traces / "tiny.gguf")
    if what == "analyze":
        if not shutil.which("gnuplot"):
            pytest.skip("gnuplot is not installed")
        sim(tmp_path / "r.csv", sim_traces / "real.h5", "-p", "h2o", "-p", "rmm", "-p", "oracle(mass,hold=lag)", "-b", "32,64", "-L", "0:16:x2")
    args = [tmp_path / x if (tmp_path / str(x)).exists() else x for x in args]
    out = tmp_path / {"sim": "out.csv", "trace": "out.h5", "analyze": "out"}[what]
    seen, code = at_terminal(*args, "-o", out)
    assert code == 0, seen
    lines = drawn(seen)
    assert len(lines) >= 2, seen
    last = -1
    for line in lines:
        m = re.fullmatch(rf"{what} +(\d+) %  [\d.e+]+ {unit}/s  (?:\d+:)?\d+:\d\d left", line)
        assert m and len(line) < 80, line
        assert last <= int(m[1]) <= 100, lines
        last = int(m[1])
    after = seen[seen.rindex(lines[-1]) + len(lines[-1]):]
    assert what != "sim" or "2 passes" in after
    assert after.startswith("\r\x1b[K") and not re.search(r"\d %", after)  # cleared before the closing line
    narrow, _ = at_terminal(*args, "-o", out, "--force", columns=20)
    assert drawn(narrow) and all(len(line) < 20 for line in drawn(narrow))
    assert drawn(at_terminal(*args, "-o", out, "--force", "-q")[0]) == []
    assert b"\r" not in kvlag(*args, "-o", out, "--force").stderr


# ---- pipes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [
    ["policies"], ["policies", "--json"], ["policies", "--markdown"], ["help"], ["help", "sim"], ["man"], ["completion", "bash"],
    ["info", "t.h5"], ["info", "t.h5", "--json"], ["analyze", "r.csv", "-o", "fig", "--format", "png", "-q"],
])  # fmt: skip
def test_a_reader_that_has_seen_enough(tmp_path, args):
    """Whoever reads stops after a line, or before the first: no message, no temporary file."""
    (tmp_path / "t.h5").symlink_to(ROOT / "traces/samples/tiny-recall.h5")
    if "r.csv" in args:
        assert kvlag("sim", "t.h5", "-o", "r.csv", "-p", "h2o", "-p", "rmm", "-b", "8,16", "-L", "2,4", cwd=tmp_path).returncode == 0
    for reader in "head -1", "true":
        done = subprocess.run(["bash", "-c", f'"$0" "$@" | {reader} >/dev/null; exit ${{PIPESTATUS[0]}}', KVLAG, *args],
                              cwd=tmp_path, capture_output=True)  # fmt: skip
        assert done.returncode in (0, 141) and done.stderr == b"", done
        left = {p.name for p in tmp_path.rglob("*") if p.is_file()}
        assert not [name for name in left if "tmp" in name or name.startswith(".")], left
        shutil.rmtree(tmp_path / "fig", ignore_errors=True)
