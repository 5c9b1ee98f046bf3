"""`--grid FILE`: options from a file do what the same options do on the command line, byte for byte."""

import pytest

from simcli import blocks_of, kvlag, refused, sim

LINE = ["-p", "rmm(lag=0|8)", "-p", "h2o", "-b", "8,50%", "--pending", "both", "--schedule", "every:2", "--unit", "layer",
        "--kv-bits", "16,8", "--metrics", "lost_mass", "--seed", "7", "--prompt", "3"]  # fmt: skip
FILE = """
# what LINE says, in another order
pending=both
  policy = rmm(lag=0|8)   # two lags
budget = 8,50%
schedule = every:2
policy =    h2o
unit\t=\tlayer
kv-bits = 16,8
metrics = lost_mass
seed = 7
prompt = 3
quiet = false
threads = 2
"""


@pytest.fixture
def here(tmp_path, sim_traces):
    (tmp_path / "t.h5").symlink_to(sim_traces / "short.h5")
    return tmp_path


def same(a, b):
    assert a.read_bytes() == b.read_bytes()
    assert blocks_of(a).read_bytes() == blocks_of(b).read_bytes()


def grid(folder, text, name="g.grid"):
    (folder / name).write_text(text)
    return folder / name


def test_the_same_bytes(here):
    rows = sim(here / "a.csv", here / "t.h5", *LINE)
    assert len(rows) > 10
    sim(here / "b.csv", here / "t.h5", "--grid", grid(here, FILE))
    same(here / "a.csv", here / "b.csv")
    sim(here / "c.csv", "--grid=" + str(grid(here, FILE.replace("\n", "\r\n"), "dos.grid")), here / "t.h5")
    same(here / "a.csv", here / "c.csv")


def test_the_command_line_goes_first(here):
    """An option given there replaces the file's, a list as a whole; the rest of the file holds."""
    given = ["-p", "tova", "-b", "12", "--prompt", "4"]
    left = [x for pair in zip(LINE[::2], LINE[1::2]) if pair[0] not in given for x in pair]
    sim(here / "a.csv", here / "t.h5", *given, *left)
    for args in [*given, "--grid", "g.grid"], ["--grid", "g.grid", *given]:
        grid(here, FILE)
        sim(here / "b.csv", "t.h5", *args, cwd=here)
        same(here / "a.csv", here / "b.csv")


def test_files_are_relative_to_the_file(here):
    (here / "sub").mkdir()
    g = grid(here / "sub", "output = r.csv\nlifetimes = ./l.h5\npolicy = h2o\nbudget = 8\nforce = true\n")
    done = kvlag("sim", "t.h5", "--grid", "sub/g.grid", cwd=here)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (here / "sub").iterdir()) == ["g.grid", "l.h5", "r.blocks.h5", "r.csv"]
    assert kvlag("sim", "t.h5", "--grid", "sub/g.grid", cwd=here).returncode == 0  # force = true
    sim(here / "plain.csv", here / "t.h5", "-p", "h2o", "-b", 8)
    same(here / "plain.csv", here / "sub/r.csv")
    g.write_text(f"from-lifetimes = {here}/sub/l.h5\noutput = r2.csv\n")
    done = kvlag("sim", "t.h5", "--grid", "sub/g.grid", cwd=here)
    assert done.returncode == 0 and (here / "sub/r2.csv").exists(), done.stderr


@pytest.mark.parametrize("text, words", [
    ("\npolcy = h2o\n", ["g.grid:2: unknown key 'polcy'", "did you mean policy?"]),
    ("zzzzzz = 1", ["g.grid:1: unknown key 'zzzzzz'"]),
    ("p = h2o", ["g.grid:1: unknown key 'p'"]), ("-b = 12", ["g.grid:1: unknown key '-b'"]),
    ("policy = h2o\nunit = haed", ["g.grid:2:", "'haed'", "did you mean head?"]),
    ("metrics = lost_mass,los", ["g.grid:1:", "did you mean loss?"]),
    ("threads = many", ["g.grid:1:", "'many' is not a whole number"]), ("threads = 0", ["g.grid:1:", "out of range"]),
    ("budget = 1\n\nbudget = 2", ["g.grid:3:", "twice"]), ("budget =", ["g.grid:1: budget: no value (LIST)"]),
    ("budget = # 12", ["g.grid:1: budget: no value"]), ("force = yes", ["g.grid:1: force: 'yes' is not true or false"]),
    ("grid = g.grid", ["g.grid:1: 'grid' cannot stand in a file"]), ("h2o", ["g.grid:1: 'h2o' is not key = value"]),
    (" = 3", ["g.grid:1: unknown key ''"]), ("policy = h2o\0", ["NUL"]), ("# x\n" * 300000, ["1 MiB"]),
])  # fmt: skip
def test_mistakes(here, text, words):
    grid(here, text)
    code = 1 if words[0] in ("NUL", "1 MiB") else 2
    refused(here, code, words, "sim", "t.h5", "-o", "new.csv", "--grid", "g.grid")


def test_what_is_no_file(here):
    refused(here, 1, ["none.grid", "No such file"], "sim", "t.h5", "-o", "new.csv", "--grid", "none.grid")
    refused(here, 1, ["Is a directory"], "sim", "t.h5", "-o", "new.csv", "--grid", ".")
    refused(here, 2, ["--grid needs a value"], "sim", "t.h5", "-o", "new.csv", "--grid")


def test_the_file_is_an_input(here):
    """Results never replace it."""
    grid(here, "policy = h2o\nbudget = 8\n")
    before = (here / "g.grid").read_bytes()
    done = kvlag("sim", "t.h5", "-o", "g.grid", "--grid", "g.grid", "--force", cwd=here)
    assert done.returncode == 2 and (here / "g.grid").read_bytes() == before


def test_a_hash_inside_a_word_is_no_comment(here):
    g = grid(here, "policy = h2o\nbudget = 8\noutput = r#1.csv#\n")
    done = kvlag("sim", "t.h5", "--grid", g, cwd=here)
    assert done.returncode in (0, 2), done.stderr
    assert b"r#1.csv#" in done.stderr or (here / "r#1.csv#").exists()


def test_verify_takes_one_too(tmp_path, sim_traces):
    model, trace = sim_traces / "tiny.gguf", sim_traces / "real.h5"
    grid(tmp_path, "policy = h2o\npolicy = streaming\nbudget = 32\noutput = b.csv\n")
    assert kvlag("verify", model, trace, "-o", tmp_path / "a.csv", "-p", "h2o", "-p", "streaming", "-b", 32).returncode == 0
    done = kvlag("verify", model, trace, "--grid", tmp_path / "g.grid")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
