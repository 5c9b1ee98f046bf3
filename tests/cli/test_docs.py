"""Whatever README and docs show is run here: each `$` command, and its output line by line with numbers masked. Commands
that cannot be run are named with the reason; numbers that stand in prose are held against what they were taken from."""
import csv
import itertools
import math
import re
import subprocess
import sys
from collections import defaultdict

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np
import pytest

import documents
from documents import DOCUMENTS, ROOT

NEEDS_MODEL = {"README.md": ("SmolLM2-135M-Instruct.Q4_1.gguf", "make model"), "docs/models.md": ("gemma-3-270m-q4_k_m.gguf", "make gemma")}
FEWEST = {"README.md": 6, "docs/models.md": 5, "docs/recipes.md": 25, "docs/reading-an-estimate.md": 9}  # commands: no block lost its language
INSTALLS = "installs what it needs and takes minutes"
NOT_RUN = {
    "README.md": {"make demo": INSTALLS, "make check": "runs this test"},
    "docs/recipes.md": {
        "./kvlag trace models/SmolLM2-135M-Instruct.Q4_1.gguf --chat conversation.json -o out/chat.h5 --generate 200 --show": "needs a model with a chat template (test_trace_texts.py has one)",
        **dict.fromkeys(
            [
                ".venv-parity/bin/python tracer/from_transformers.py tests/tiny demo/genesis.txt -o out/hf.h5 --tokens 256",
                "./kvlag info out/hf.h5 --check",
                "./kvlag sim out/hf.h5 -o out/hf.csv -p h2o -p rmm-sinks -p streaming -b 25% -L 8,16",
            ],
            "needs torch and transformers (tests/parity/from_transformers.py runs it)",
        ),
    },
    "docs/cluster.md": {
        "examples/slurm.sh out/r.csv out/a.h5 out/b.h5 -p rmm -p h2o -b 10%,25% -L 0:64:x2": "needs Slurm (test_shard.py has a mock)",
        "mpirun -n 2 build/gcc-release/kvlag-mpi sim out/a.h5 -o out/r.csv -p rmm -b 10%,25% -L 0:64:x2": "needs MPI",
    },
    "docs/gpu/README.md": {
        "make gpu-bundle": "compiles for minutes with nvcc",
        "bash tests/gpu/check.sh": "needs a GPU (test_gpu_script.py runs it on fibers)",
    },
}  # fmt: skip
# Of pkg-config, mpirun, the bench and from_transformers.py.
OTHERS_OPTIONS = {"--cflags", "--libs", "--map-by", "--bind-to", "--quick", "--only", "--callgrind", "--compute"}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder in which a document was run, once."""
    made = {}

    def of(document):
        model, fetch = NEEDS_MODEL.get(document, ("", ""))
        if not (ROOT / "models" / model).exists():
            pytest.skip(f"{model} is not in models/ ({fetch} fetches it)")
        if document not in made:
            made[document] = folder = tmp_path_factory.mktemp(re.sub(r"\W", "-", document))
            documents.checkout(folder)
            assert documents.run(document, folder) >= FEWEST.get(document, 0)
        return made[document]

    return of


SHOWING = [d for d in DOCUMENTS if any(language in ("console", "python") for language, _ in documents.blocks(d))]


@pytest.mark.parametrize("document", SHOWING)
def test_what_it_shows_is_true(document, folder_of):
    folder_of(document)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_that_are_not_run_are_known(document):
    assert set(documents.not_run(document)) == set(NOT_RUN.get(document, {}))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    for link, target, anchor in documents.links(document):
        assert target.exists(), link
        if anchor:
            assert anchor in documents.anchors(str(target.relative_to(ROOT))), link


def test_every_document_is_linked_from_the_readme():
    linked = {target for _, target, _ in documents.links("README.md")}
    assert [d for d in DOCUMENTS if d != "README.md" and ROOT / d not in linked] == []


def test_options_that_documents_name_exist():
    commands = "trace sim verify analyze advise compare merge info make-trace policies completion".split()
    helps = [subprocess.run([documents.KVLAG, "help", c], capture_output=True, text=True, check=True) for c in commands]
    known = OTHERS_OPTIONS | {"--version", "--help"} | set(re.findall(r"--[a-z][a-z-]*", " ".join(h.stdout for h in helps)))
    for document in DOCUMENTS:
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", documents.text(document))) <= known, document


# ---- the machinery can fail ------------------------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path, monkeypatch):
    def write(text):
        (tmp_path / "page.md").write_text(text)
        return "page.md"

    monkeypatch.setattr(documents, "ROOT", tmp_path)
    return write


def test_a_command_in_a_block_that_is_not_run_is_found(page):
    text = "Text\n\n```\nkvlag sim x \\\n    -b 2   # a remark\n.5 .5\n```\n\n    ./kvlag info y\n\n```sh\nfoo\n```\n\n```console\n$ make\n```\n"
    assert list(documents.not_run(page(text))) == ["kvlag sim x -b 2", "./kvlag info y", "foo"]


def test_output_that_changed_is_found(page, tmp_path):
    document = page("```console\n$ echo took 3.5 s, \\\n  12 rows\ntook 1 s, 7 rows\n```\n")
    assert documents.run(document, tmp_path) == 1
    with pytest.raises(AssertionError, match="no longer prints: took 1 s, 7 lines"):
        documents.run(page("```console\n$ echo took 3.5 s, 12 rows\ntook 1 s, 7 lines\n```\n"), tmp_path)
    with pytest.raises(AssertionError, match="page.md: false"):
        documents.run(page("```console\n$ false\n```\n"), tmp_path)
    with pytest.raises(AssertionError, match="page.md: python"):
        documents.run(page("```python\nassert 0\n```\n"), tmp_path)


def test_links_and_anchors(page, tmp_path):
    document = page("# A `b`: c\n\n## D\n\n## D\n\n[x](page.md#d-1) [y](#a-b-c) [z](gone.md) [w](https://e.org/#f) `[v](u)`\n")
    assert documents.anchors(document) == {"a-b-c", "d", "d-1"}
    found = list(documents.links(document))
    assert [link for link, _, _ in found] == ["page.md#d-1", "#a-b-c", "gone.md"]
    assert [target.exists() for _, target, _ in found] == [True, True, False]


# ---- numbers in prose ------------------------------------------------------------------------------------------------


def table(document, heading):
    """The cells of the table whose first column is headed so, without the heading's two rows."""
    lines = documents.text(document).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first + 2 :])
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in rows]


def results(path):
    return list(csv.DictReader(line for line in open(path) if not line.startswith("#")))


def test_lag_and_hold_by_hand(folder_of):
    """The table of costs, and the pictures of who is there, are what kvlag computes."""
    folder = folder_of("docs/concepts.md")
    rows = results(folder / "out/eight.csv")
    costs = table("docs/concepts.md", "policy")
    assert len(costs) == len(rows) == 7
    for spec, lag, hold, lost in costs:
        (row,) = [r for r in rows if (r["spec"], r["lag"], r["hold"]) == (spec, lag, hold)]
        assert float(row["lost_mass"]) == pytest.approx(float(lost), abs=6e-4)
    with h5py.File(folder / "out/eight.lifetimes.h5") as f:
        evict_at = [c["seq/0000/evict_at"][0, 0] for c in f["config"].values()]
    seen = {}
    for row, leaves in zip(rows, evict_at):
        for t in range(3, 7):
            marks = ["." if leaves[i] <= t else "p" if t - i < 2 else "#" for i in range(t + 1)]
            seen[row["lag"], row["hold"], t] = " ".join(marks)
    shown = re.findall(r"^(?:seen by step)? +([3-6]) +([#p. ]+?) +(?:seen by step)? +\1 +([#p. ]+?)$", documents.text("docs/concepts.md"), re.M)  # fmt: skip
    assert [int(t) for t, _, _ in shown] == [3, 4, 5, 6]
    for t, smoother, held in shown:
        assert (smoother, held) == (seen["2", "2", int(t)], seen["0", "2", int(t)])


def test_models_that_are_known():
    """Every architecture, and every family of chat templates."""
    source = {name: (ROOT / f"tracer/{name}.c").read_text() for name in ("arch", "chat_style")}
    names = re.findall(r'\{\.name = "(.*?)",\s+\.types = "(.*?)"', source["arch"])
    shown = [(name.strip("`"), re.sub("[`, ]+", "|", types).strip("|"))
             for _, name, types, _ in table("docs/models.md", "models")]  # fmt: skip
    assert names == shown and len(names) >= 10
    templates = re.search(r"told by what stands in them: (.*?)\. A base", re.sub(r"\s+", " ", documents.text("docs/models.md")))
    assert sorted(templates[1].split(", ")) == sorted(set(re.findall(r'\{\.name = "(.*?)"', source["chat_style"])))


def test_windows_of_gemma(folder_of):
    folder = folder_of("docs/models.md")
    rows = {(row["spec"], row["budget"] if row["budget_asked"] else ""): row for row in results(folder / "out/gemma.csv")}
    shown = table("docs/models.md", "policy")
    assert len(shown) == len(rows) == 5
    for spec, budget, *cells in shown:
        row = rows[spec, budget]
        for column, cell in zip(("evictions", "expired", "lost_mass", "kl_est"), cells):
            assert float(row[column]) == pytest.approx(float(cell), abs=0.6 * 10 ** -len(cell.partition(".")[2])), (spec, budget)
    said = re.search(r"it takes (\.\d+) of all attention in the last forty steps", re.sub(r"\s+", " ", documents.text("docs/models.md")))
    with h5py.File(folder / "out/gemma.h5") as f:
        first = np.array(f["seq/0000/attn/probs"][:, :, -40:, 0], "f8").mean(axis=(1, 2))
        sees = f.attrs["window"] == 0
    assert sees.sum() == 3 and first[sees].mean() == pytest.approx(float(said[1]), abs=0.006) and not first[~sees].any()


def test_one_step_by_hand(tmp_path):
    """H2O at budget 2 drops entry 1 after step 2 and loses .6 at step 3; dropping entry 0, it would lose .1."""
    block = next(b for _, b in documents.blocks("docs/concepts.md") if b.startswith("step 0    1\n"))
    rows = [[float(x) for x in line.split()[2:]] for line in block.splitlines()] + [[0.2] * 5]
    probs = np.zeros((1, 1, 5, 5), "f4")
    for t, row in enumerate(rows):
        probs[0, 0, t, : t + 1] = row
    with h5py.File(tmp_path / "t.h5", "w") as f:
        f.attrs.update(format="kvlag-trace", version=1, n_layer=1, n_head=1, n_kv_head=1, head_dim=1)
        f["seq/0000/attn/probs"] = probs
        f.attrs["complete"] = 1
    subprocess.run([documents.KVLAG, "sim", "t.h5", "-o", "r.csv", "-p", "h2o(hold=1)", "-p", "window", "-b", "2", "-q",
                    "--lifetimes", "l.h5"], cwd=tmp_path, check=True)  # fmt: skip
    h2o, window = results(tmp_path / "r.csv")
    assert float(h2o["lost_mass"]) == pytest.approx(0.6 / 4, abs=1e-6)
    assert float(window["lost_mass"]) == pytest.approx(0.1 / 4, abs=1e-6)
    with h5py.File(tmp_path / "l.h5") as f:
        assert list(f["config/0000/seq/0000/evict_at"][0, 0, :3]) == [6, 3, 4]


def test_layers_with_a_window(folder_of):
    """The table by layer is what the lifetimes and blocks say; the prose below it, what the rows say."""
    folder = folder_of("docs/concepts.md")
    full, h2o = results(folder / "out/windows.csv")
    with h5py.File(folder / "out/windows.lifetimes.h5") as f:
        evict_at = f["config/0001/seq/0000/evict_at"][:, 0]
    with h5py.File(folder / "out/windows.blocks.h5") as f:
        lost = f["head_lost_mass"][1, :, 0]
    shown = table("docs/concepts.md", "layer")
    assert len(shown) == len(evict_at) == 2
    for (_, evicted, expired, mass), leaves, window, ours in zip(shown, evict_at, (0, 3), lost):
        gone = [i for i in range(6) if leaves[i] <= 6]
        assert evicted == ", ".join(str(i) for i in gone if not window or leaves[i] < i + window)
        assert expired == ", ".join(str(i) for i in gone if window and leaves[i] == i + window)
        assert ours == pytest.approx(float(mass), abs=6e-4)
    prose = re.sub(r"\s+", " ", documents.text("docs/concepts.md"))
    numbers = re.search(r"`evictions` (\S+), `expired` (\S+), `lost_mass` (\.\d+)\. .*? says (\S+), (\S+) and (\S+), and `footprint` (\.\d+)", prose)  # fmt: skip
    rows = [(row, name) for row in (h2o, full) for name in ("evictions", "expired", "lost_mass")] + [(full, "footprint")]
    for (row, name), number in zip(rows, numbers.groups(), strict=True):
        assert float(row[name]) == pytest.approx(float(number), abs=6e-4), name


@pytest.fixture(scope="module")
def priced():
    """docs/fidelity.csv, each text priced with one scale a family, fitted on the other seven texts (one sample)."""
    rows = list(csv.DictReader(open(ROOT / "docs/fidelity.csv")))
    for row in rows:
        row["fisher"], row["true"] = float(row["fisher_1"]), float(row["true_kl"])
    for row in rows:
        others = [r for r in rows if r["tokens"] == row["tokens"] and r["text"] != row["text"] and r["true"] >= 0.003]
        ratio = [math.log(r["true"] / r["fisher"]) for r in others]
        family = [x for x, r in zip(ratio, others) if r["family"] == row["family"]]
        row["kl"] = row["fisher"] * math.exp((sum(family) + 2 * np.mean(ratio)) / (len(family) + 2))
    return rows


def bounds(cell):
    """'1.1 to 1.25', 'below 1.1', 'above 3'."""
    numbers = [float(x) for x in re.findall(r"\d*\.?\d+", cell)]
    return (0, numbers[0]) if cell.startswith("below") else (numbers[0], (numbers[1:] or [math.inf])[0])


def test_pairs_of_estimates(priced):
    pairs, groups = defaultdict(list), defaultdict(list)
    for row in priced:
        groups[row["text"], row["tokens"], row["budget_asked"]].append(row)
    shown = table("docs/reading-an-estimate.md", "larger `kl_est` over smaller")
    for group in groups.values():
        for a, b in itertools.combinations(group, 2):
            factor = max(a["kl"], b["kl"]) / min(a["kl"], b["kl"])
            cell = next(cell for cell, _, _ in shown if bounds(cell)[0] <= factor < bounds(cell)[1])
            pairs[cell].append((a["kl"] > b["kl"]) == (a["true"] > b["true"]))
    for cell, n, share in shown:
        assert (len(pairs[cell]), f"{100 * np.mean(pairs[cell]):.0f} %") == (int(n), share), cell


def test_truth_over_estimate(priced):
    for cell, n, scale, spread in table("docs/reading-an-estimate.md", "true KL"):
        low, high = bounds(cell)
        logs = [math.log(r["true"] / r["kl"]) for r in priced if low <= r["true"] < high]
        got = len(logs), math.exp(np.mean(logs)), math.exp(np.sqrt(np.mean(np.square(logs))))
        assert got[0] == int(n) and got[1:] == pytest.approx((float(scale), float(spread)), abs=0.0051), cell


def test_large_damage(priced):
    said = re.sub(r"\s+", " ", documents.text("docs/reading-an-estimate.md"))
    (scale,) = re.findall(r"where `kl_est` is above 1 the truth is on average (\S+) of it", said)
    logs = [math.log(r["true"] / r["kl"]) for r in priced if r["kl"] > 1]
    assert math.exp(np.mean(logs)) == pytest.approx(float(scale), abs=0.0051)
    ((large, all_of_them),) = re.findall(r"(\d+) of the (\d+) windows of fidelity.md have a true KL above .3", said)
    windows = [r["true"] for r in priced if r["family"] == "window"]
    assert (sum(x > 0.3 for x in windows), len(windows)) == (int(large), int(all_of_them))


def test_families_without_calibration(priced):
    said = re.sub(r"\s+", " ", documents.text("docs/reading-an-estimate.md"))
    found = re.search(r"the truth is then (\S+) of the estimate for windows, (\S+) for static policies, (\S+) for "
                      r"attention-driven ones and (\S+) for oracles", said)  # fmt: skip
    for family, scale in zip(("window", "static", "attention", "oracle"), found.groups()):
        logs = [math.log(r["true"] / (1.5 * r["fisher"])) for r in priced if r["family"] == family and r["true"] >= 0.003]
        assert math.exp(np.mean(logs)) == pytest.approx(float(scale), abs=0.0051), family


def test_policies_to_begin_with(folder_of):
    """Each line of python-policies.md's table, put into the example, is the policy that it is said to be."""
    folder = folder_of("docs/python-policies.md")
    program, trace = (folder / "my_policy.py").read_text(), "traces/samples/tiny-recall.h5"
    shown = table("docs/python-policies.md", "to reproduce")
    assert len(shown) == 4
    for n, (spec, line, guards) in enumerate(shown):
        sinks, hold = re.fullmatch(r"SINKS (\d+), HOLD (\d+)", guards).groups()
        changed = re.sub(r"score\[residents\] = np.maximum.*", lambda _: line.strip("`"), program)
        changed = changed.replace("SINKS, HOLD = 4, 16", f"SINKS, HOLD = {sinks}, {hold}")
        (folder / "changed.py").write_text(changed)
        subprocess.run([sys.executable, "changed.py", trace, f"out/{n}.h5", "64"], cwd=folder, check=True)
        subprocess.run([documents.KVLAG, "sim", trace, "-o", f"out/{n}.csv", "-p", spec.strip("`"), "-b", "64", "-q",
                        "--lifetimes", f"out/{n}-same.h5"], cwd=folder, check=True)  # fmt: skip
        mine, same = (h5py.File(folder / "out" / f)["config/0000/seq/0000/evict_at"][:] for f in (f"{n}.h5", f"{n}-same.h5"))
        assert (mine == same).mean() > 0.99, spec
