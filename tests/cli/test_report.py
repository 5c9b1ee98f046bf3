"""The report of kvlag analyze: report.html in a headless browser, its Markdown twin, and summary.json."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from simcli import ROOT, blocks_of, kvlag, refused, rows_of, snapshot

SAMPLES = ROOT / "traces/samples"
BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser",
                                               "google-chrome"))), None)  # fmt: skip
needs_browser = pytest.mark.skipif(not BROWSER, reason="no chromium (Debian: chromium-headless-shell)")
needs_gnuplot = pytest.mark.skipif(not shutil.which("gnuplot"), reason="no gnuplot")
pytestmark = needs_gnuplot
VOID = {"meta", "img", "br", "link"}


def run(*args, code=0):
    done = kvlag(*args)
    assert done.returncode == code, done.stderr.decode()
    return done.stdout.decode()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with the report of one text: three budgets, pending both, the text itself; results.csv beside it."""
    folder = tmp_path_factory.mktemp("report")
    trace = SAMPLES / "tiny-recall.h5"
    run("sim", trace, "-o", folder / "results.csv", "--lifetimes", folder / "lifetimes.h5", "-p", "rmm", "-p", "h2o", "-p",
        "ema", "-p", "streaming", "-p", "oracle(mass,hold=lag)", "-b", "10%,25%,50%", "-L", "0:16:x2", "--pending", "both")  # fmt: skip
    said = run("analyze", folder / "results.csv", "-o", folder / "out", "--lifetimes", folder / "lifetimes.h5", "--trace", trace,
               "--format", "svg,png")  # fmt: skip
    (folder / "said.txt").write_text(said)
    return folder


def page_of(folder):
    return (folder / "out/report.html").read_text()


def summary_of(folder):
    return json.loads((folder / "out/summary.json").read_text(), parse_constant=pytest.fail)


def browse(folder, page, *options):
    """The DOM after everything was loaded."""
    path = folder / "page.html"
    path.write_text(page)
    done = subprocess.run([BROWSER, "--no-sandbox", "--headless", "--disable-gpu", f"--user-data-dir={folder}/profile",
                           "--virtual-time-budget=5000", *options, "--dump-dom", path.as_uri()],
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- the page ----------------------------------------------------------------------------------------------------------


class Checker(HTMLParser):
    """Elements are closed in order, ids are unique, headings go down one level at a time, pictures have words."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.levels, self.images, self.seen = [], [], [], 0, set()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        assert tag != "p" or "p" not in self.open, self.getpos()
        assert tag != "style" or "head" in self.open, self.getpos()
        self.seen.add(tag)
        if "id" in attrs:
            self.ids.append(attrs["id"])
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
        if tag == "img":
            assert attrs["alt"], self.getpos()
            self.images += 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.getpos())


def check(page):
    c = Checker()
    c.feed(page)
    assert page.startswith("<!DOCTYPE html>") and not c.open
    assert len(set(c.ids)) == len(c.ids)
    assert c.levels[0] == 1 and c.levels.count(1) == 1
    assert all(b <= a + 1 for a, b in zip(c.levels, c.levels[1:]))
    return c


def test_html_is_well_formed_and_self_contained(made):
    page = page_of(made)
    c = check(page)
    assert {"main", "nav", "table", "caption", "figure", "figcaption", "title"} <= c.seen
    assert not {"script", "link", "iframe", "object", "base"} & c.seen
    assert '<html lang="en">' in page and 'name="viewport"' in page and '<meta charset="utf-8">' in page
    assert "prefers-color-scheme: dark" in page and "@media print" in page
    assert c.images == len(list((made / "out").glob("*.svg"))) > 5
    targets = re.findall(r"""(?:src|href|srcset|action|data|poster)\s*=\s*["']([^"']*)""", page)
    targets += re.findall(r"(?:url\(|@import\s)([^)]*)", page)
    assert len(targets) > c.images
    for target in targets:
        assert target.startswith(("data:image/svg+xml;base64,", "#")), target[:80]
    assert {t[1:] for t in targets if t.startswith("#")} <= set(c.ids)
    assert "://" not in re.sub(r'"data:[^"]*"', "", page.split('class="kvlag-text"')[0])


FRAME = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:0">
<iframe width="{width}" height="800" style="border:0" srcdoc="{page}"></iframe>
<script>
document.querySelector("iframe").onload = e => {{
  const d = e.target.contentDocument, wide = [...d.querySelectorAll("*")].filter(
    x => !x.closest(".table, pre") && x.getBoundingClientRect().right > d.documentElement.clientWidth + 1);
  document.body.dataset.measured = JSON.stringify({{
    page: d.documentElement.scrollWidth, width: d.documentElement.clientWidth, wide: wide.map(x => x.tagName),
    tables: [...d.querySelectorAll(".table")].map(x => [x.clientWidth, x.scrollWidth]),
    drawn: [...d.images].filter(x => x.naturalWidth > 0).length, images: d.images.length,
    letters: Math.min(...[...d.querySelectorAll("p, li, td")].map(x => parseFloat(getComputedStyle(x).fontSize))),
    lead: d.querySelector(".lead").getBoundingClientRect().top, sections: [...d.querySelectorAll("h2")].map(x => x.innerText)}});
}};
</script>
"""


def measure(folder, width):
    """What a browser makes of the page in a window of this width."""
    dom = browse(folder, FRAME.format(width=width, page=html.escape(page_of(folder))), "--host-resolver-rules=MAP * ~NOTFOUND")
    found = re.search(r'data-measured="([^"]*)"', dom)
    assert found, dom[-2000:]
    return json.loads(html.unescape(found[1]))


@needs_browser
@pytest.mark.parametrize("width", [320, 390, 800, 1200])
def test_browser_shows_it_at_any_width(made, width):
    seen = measure(made, width)
    assert seen["page"] == seen["width"] <= width and not seen["wide"]
    assert seen["drawn"] == seen["images"] > 5
    assert seen["letters"] >= 12 and seen["lead"] < 150
    if width == 390:  # tables scroll inside their boxes
        assert any(inside > box for box, inside in seen["tables"])
    assert seen["sections"] == ["Policies by budget", "Lags", "Memory", "Figures", "The text under the policies",
                                "How to read this", "How this was made"]  # fmt: skip


# ---- the twins ---------------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """The words of the page, in order, without styles."""

    def __init__(self):
        super().__init__()
        self.words, self.inside = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.inside.append((tag, dict(attrs).get("class")))

    def handle_endtag(self, tag):
        self.inside.pop()

    def handle_data(self, data):
        hidden = {("style", None), ("div", "kvlag-text"), ("nav", None), ("title", None), ("figcaption", None)}
        if not hidden & set(self.inside):
            self.words += data.split()


def plain(markdown):
    markdown = re.sub(r"^\*\(report.html shows it in colour.\)\*$|^!\[.*$|^\|[-:|]+\|$|^(#+|>|-) ", "", markdown, flags=re.M)
    return re.sub(r"\\(.)", r"\1", re.sub(r"(?<!\\)\*\*", "", re.sub(r"(?<!\\)\|", " ", markdown))).split()


def test_markdown_says_the_same(made):
    reader = Reader()
    reader.feed(page_of(made))
    markdown = (made / "out/report.md").read_text()
    assert plain(markdown) == reader.words
    shown = re.findall(r"^!\[.*\]\((.*)\)$", markdown, re.M)
    assert sorted(shown) == sorted(p.name for p in (made / "out").glob("*.svg"))


def test_first_lines_are_the_recommendation_everywhere(made):
    words = summary_of(made)["recommendation"]["words"]
    said = (made / "said.txt").read_text()
    assert words.split() == said.split("\n\n")[0].split()
    assert (made / "out/report.md").read_text().split("\n")[2] == "> **" + re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", words) + "**"
    assert html.escape(words) in page_of(made).split("</p>")[0]
    assert words.startswith("For this text, at a budget of 25 % (96 entries), use ")
    assert re.search(r"it costs [-\d.]+ nats/token \(90 % interval [-\d.]+ to [-\d.]+; uncalibrated\)", words)
    assert re.search(r"(the best policy that (waits|does not wait)|the next best)", words)


# ---- summary.json ------------------------------------------------------------------------------------------------------


def walk(node, path=""):
    yield path, node
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from walk(child, f"{path}/{key}")


def test_every_missing_number_has_a_reason(made):
    estimates = 0
    for path, node in walk(summary_of(made)):
        if isinstance(node, dict) and {"value", "lo", "hi"} <= set(node):
            estimates += 1
            missing = None in (node["value"], node["lo"], node["hi"])
            assert missing == ("why" in node), path
            if not missing:
                assert node["lo"] <= node["hi"], path
        elif isinstance(node, dict):
            for key in node:
                if key.endswith("_why"):
                    assert node[key], path
    assert estimates > 100


def test_summary_agrees_with_results(made):
    summary, rows = summary_of(made), rows_of(made / "results.csv")
    value = {(r["spec"], r["budget_asked"], r["lag"], r["pending"]): float(r["dloss_est"]) for r in rows}
    assert [b["budget_asked"] for b in summary["budgets"]] == ["10%", "25%", "50%"]
    for budget in summary["budgets"]:
        ranking = budget["ranking"]
        losses = [r["config"]["dloss_est"]["value"] for r in ranking]
        assert losses == sorted(losses) and ranking[0]["rank"] == 1
        assert not any(r["config"]["policy"] == "oracle" or r["config"]["pending"] == "free" for r in ranking)
        assert {b["config"]["policy"] for b in budget["bounds"]} == {"oracle"}
        for c in (r["config"] for r in ranking):
            lag = "" if c["lag"] is None else f"{c['lag']:g}"
            key = c["spec"], c["budget_asked"], lag, c["pending"]
            assert c["dloss_est"]["value"] == pytest.approx(value[key], rel=1e-8), key
            others = [v for (s, b, _, p), v in value.items() if (s, b, p) == (key[0], key[1], key[3])]
            assert value[key] == min(others)
        assert budget["use"]["policy"] != "oracle" and budget["use"]["pending"] != "free"
    for curve in summary["curves"]:
        points = [p["config"] for p in curve["points"]]
        best = min(points, key=lambda c: c["dloss_est"]["value"])
        assert curve["best_lag"] == best["lag"] and curve["recommended_lag"] <= best["lag"]
        for p in curve["points"]:
            assert p["gain"]["value"] == pytest.approx(points[0]["dloss_est"]["value"] - p["config"]["dloss_est"]["value"])
    front = summary["memory"]["pareto"]
    assert [p["memory"] for p in front] == sorted(p["memory"] for p in front)
    loss = [p["config"]["dloss_est"]["value"] for p in front]
    assert loss == sorted(loss, reverse=True)


def test_summary_names_what_it_was_made_from(made):
    summary = summary_of(made)
    assert (summary["format"], summary["version"], summary["resampled"], summary["resamples"]) == ("kvlag-summary", 1, "blocks", 2000)
    files = {f["role"]: f for f in summary["files"]}
    assert set(files) == {"results", "lifetimes", "trace"} and files["trace"]["name"] == "tiny-recall.h5"
    assert any(re.fullmatch(r"trace: tiny-recall [0-9a-f]{32} attention=factored", c) for c in files["results"]["comments"])
    assert summary["command"].startswith("kvlag analyze results.csv --format svg,png")
    if shutil.which("xxhsum"):
        said = subprocess.run(["xxhsum", "-H2", made / "results.csv"], capture_output=True, text=True).stdout
        assert files["results"]["xxh3_128"] == said.split()[0]
    assert {f["file"] for f in summary["figures"]} == {p.name for p in (made / "out").glob("*.svg")}


def test_same_input_same_bytes(made, tmp_path):
    for name in "a", "b":
        run("analyze", made / "results.csv", "-o", tmp_path / name, "--format", "svg")
    assert [p.read_bytes() for p in sorted((tmp_path / "a").iterdir())] == [p.read_bytes() for p in sorted((tmp_path / "b").iterdir())]


def test_json_goes_to_stdout_alone(made, tmp_path):
    said = run("analyze", made / "results.csv", "-o", tmp_path / "o", "--json", "--figures", "budget")
    assert said == (tmp_path / "o/summary.json").read_text()
    assert kvlag("analyze", made / "results.csv", "-o", tmp_path / "p", "--json", "--format", "term").returncode == 2


# ---- what may be missing or strange ------------------------------------------------------------------------------------


def test_report_is_optional_and_needs_no_svg_files(made, tmp_path):
    run("analyze", made / "results.csv", "-o", tmp_path / "no", "--report", "no", "--figures", "budget")
    assert not {"report.html", "report.md", "summary.json"} & {p.name for p in (tmp_path / "no").iterdir()}
    run("analyze", made / "results.csv", "-o", tmp_path / "png", "--figures", "budget")
    names = {p.name for p in (tmp_path / "png").iterdir()}
    assert {"report.html", "report.md", "summary.json"} <= names and not any(n.endswith("svg") for n in names)
    assert "data:image/svg+xml" in (tmp_path / "png/report.html").read_text()
    assert "](budget_dloss_est.png)" in (tmp_path / "png/report.md").read_text()
    run("analyze", made / "results.csv", "-o", tmp_path / "pdf", "--figures", "budget", "--format", "pdf")
    assert "(Figure in report.html: budget\\_dloss\\_est)" in (tmp_path / "pdf/report.md").read_text()


@pytest.mark.parametrize("name", ["report.html", "report.md", "summary.json"])
def test_nothing_is_overwritten(made, tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("mine")
    refused(tmp_path, 2, [name, "--force"], "analyze", made / "results.csv", "-o", "out", "--figures", "budget", "-q")
    run("analyze", made / "results.csv", "-o", tmp_path / "out", "--figures", "budget", "--force")
    assert (tmp_path / "out" / name).read_text() != "mine"


def test_every_kind_of_figure_says_how_to_read_it(made):
    """A heading, a paragraph, then its pictures."""
    kinds = {f["kind"] for f in summary_of(made)["figures"]}
    figures = page_of(made).split(">Figures</h2>")[1].split("<h2")[0]
    found = re.findall(r'<h3>([^<]+)</h3>\n<p>([^<]{40,})</p>\n<div class="figures">', figures)
    assert len({words for _, words in found}) == len(kinds) == figures.count("<h3>") >= 8


def test_other_files_are_not_harmed(made, tmp_path):
    for name in "notes.txt", "budget.svg", "report.html.bak":
        (tmp_path / name).write_text(name)
    before = snapshot(tmp_path)
    run("analyze", made / "results.csv", "-o", tmp_path, "--figures", "budget", "--force")
    assert before.items() <= snapshot(tmp_path).items()


def test_without_blocks(made, tmp_path):
    shutil.copy(made / "results.csv", tmp_path / "r.csv")
    run("analyze", tmp_path / "r.csv", "-o", tmp_path / "out", "--figures", "budget", "--format", "svg")
    page, summary = page_of(tmp_path), summary_of(tmp_path)
    words = summary["recommendation"]["words"]
    assert "the lowest estimate is that of" in words and "90 % interval" not in words
    assert "no FILE.blocks.h5 stands beside the results" in words
    assert "Nothing was resampled" in page and check(page)
    assert summary["resampled"] is None and summary["resampled_why"]
    test_every_missing_number_has_a_reason(tmp_path)


def test_strange_names_are_escaped(made, tmp_path):
    """What stands in a results file must not become markup, nor break a table."""
    evil = "mix(a|b,<script>alert(1)</script>&amp;*x*`y`)"
    text = (made / "results.csv").read_text().replace(",ema,ema,", f',ema,"{evil}",').replace("tiny-recall", "<b>_t_</b>")
    (tmp_path / "r.csv").write_text(text)
    shutil.copy(blocks_of(made / "results.csv"), tmp_path / "r.blocks.h5")
    run("analyze", tmp_path / "r.csv", "-o", tmp_path / "out", "--figures", "budget", "--format", "svg")
    page, markdown = page_of(tmp_path), (tmp_path / "out/report.md").read_text()
    assert "script" not in check(page).seen and html.escape(evil) in page and "&lt;b&gt;_t_&lt;/b&gt;" in page
    assert r"mix(a\|b,\<script\>alert(1)\</script\>\&amp;\*x\*\`y\`)" in markdown
    tables = [line for line in markdown.splitlines() if line.startswith("|")]
    assert tables and "<script>" not in re.sub(r"\\.", "", markdown)
    reader = Reader()
    reader.feed(page)
    assert plain(markdown) == reader.words
    assert json.loads((tmp_path / "out/summary.json").read_text())


def test_without_gnuplot_the_report_is_there(made, tmp_path):
    (tmp_path / "empty").mkdir()
    done = kvlag("analyze", made / "results.csv", "-o", tmp_path / "out", "--figures", "budget", env={"PATH": str(tmp_path / "empty")})
    assert done.returncode == 1 and b"gnuplot not found" in done.stderr
    assert "(not drawn)" in page_of(tmp_path) and check(page_of(tmp_path)).images == 0


def test_several_texts_and_truths(tmp_path):
    """Two texts, then five copies of them under other names: what is resampled, and whom the words speak of."""
    names = ["tiny-recall", "tiny-scripture"]
    run("sim", *(SAMPLES / f"{n}.h5" for n in names), "-o", tmp_path / "two.csv", "-p", "rmm", "-p", "h2o", "-b", "25%", "-L", "0,4,8")
    run("analyze", tmp_path / "two.csv", "-o", tmp_path / "out", "--figures", "budget", "--format", "svg")
    assert summary_of(tmp_path)["recommendation"]["words"].startswith("For these 2 texts, ")
    assert "tiny-recall and 1 other trace" in page_of(tmp_path)
    for i in range(5):
        shutil.copy(SAMPLES / f"{names[i % 2]}.h5", tmp_path / f"t{i}.h5")
    run("sim", *(tmp_path / f"t{i}.h5" for i in range(5)), "-o", tmp_path / "five.csv", "-p", "rmm", "-p", "h2o", "-b", "25%", "-L", "0,4,8")
    run("analyze", tmp_path / "five.csv", "-o", tmp_path / "out", "--figures", "budget", "--format", "svg", "--force")
    assert summary_of(tmp_path)["recommendation"]["words"].startswith("For texts like these 5, ")
    assert summary_of(tmp_path)["resampled"] == "sequences"


def test_max_loss(made, tmp_path):
    def ask(x):
        run("analyze", made / "results.csv", "-o", tmp_path / "out", "--figures", "budget", "--max-loss", x, "--force")
        return summary_of(tmp_path)

    s = summary_of(made)
    keeps = {b["budget_asked"]: min(r["config"]["dloss_est"]["hi"] for r in b["ranking"]) for b in s["budgets"]}
    for asked, hi in keeps.items():
        told = ask(hi * 1.000001)
        first = next(b for b in keeps if keeps[b] <= hi * 1.000001)
        assert told["max_loss_met"] and told["recommendation"]["budget_asked"] == first
        assert told["recommendation"]["use"]["dloss_est"]["hi"] <= hi * 1.000001
        assert "to lose at most" in told["recommendation"]["words"]
    told = ask(-5)
    assert not told["max_loss_met"] and told["recommendation"]["budget_asked"] == "50%"
    assert told["recommendation"]["words"].startswith("No budget that was priced keeps the loss at -5 or less.")
    assert kvlag("analyze", made / "results.csv", "-o", tmp_path / "x", "--max-loss", "much").returncode == 2
