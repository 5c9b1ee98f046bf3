"""Figures `text` and `lost` of kvlag analyze: from real lifetimes, and from text that is hard to show."""

import os
import re
import shutil
import struct
import xml.etree.ElementTree as ElementTree
import zlib

import h5py
import hdf5plugin  # noqa: F401 (a filter that traces use)
import numpy
import pytest

from simcli import ROOT, kvlag
from test_analyze import analyze, blocks, fake_gnuplot, png_size

SAMPLE = ROOT / "traces/samples/tiny-scripture.h5"
needs_gnuplot = pytest.mark.skipif(not shutil.which("gnuplot"), reason="no gnuplot")
POLICIES = ["-p", "h2o", "-p", "rmm", "-p", "oracle(mass)", "-p", "oracle(mass,hold=lag)", "-L", "4,16", "-b", "25%"]


def sweep(folder, trace, *args):
    done = kvlag("sim", trace, "-o", folder / "r.csv", "--lifetimes", folder / "l.h5", *args)
    assert done.returncode == 0, done.stderr.decode()
    return str(folder / "r.csv"), ["--lifetimes", folder / "l.h5", "--trace", trace]


@pytest.fixture(scope="module")
def scripture(tmp_path_factory):
    """Results of the sample, and the options that bring its text."""
    return sweep(tmp_path_factory.mktemp("text"), SAMPLE, *POLICIES)


def pieces_of(trace):
    with h5py.File(trace) as f:
        s = f["seq/0000"]
        offset, text = s["piece_offset"][:], s["pieces"][:].tobytes()
        return [text[a:b] for a, b in zip(offset, offset[1:])]


def shares_of(lifetimes, spec, lag):
    """Of the later steps those that see entry i, and of the units those that do so at the end."""
    with h5py.File(lifetimes) as f:
        found = [c for c in f["config"].values() if (c.attrs["spec"], c.attrs["lag"]) == (spec, lag)]
        assert len(found) == 1
        evict_at = found[0]["seq/0000/evict_at"][:]
    T = evict_at.shape[2]
    t, i = numpy.arange(T)[:, None], numpy.arange(T)
    seen = numpy.zeros((T, T))
    for gone in evict_at.reshape(-1, T):
        seen += (t > i) & (t < gone)
    units = evict_at.size // T
    with numpy.errstate(invalid="ignore"):
        kept = seen.sum(0) / (units * (T - 1 - i))
    return numpy.where(i == T - 1, 1, kept), (evict_at >= T).reshape(units, T).mean(0)


def data_of(path):
    """The one block of a data file, as lists by column; texts as they are."""
    (comment, names, _), = blocks(path)
    columns = {name: [] for name in names}
    for line in path.read_text().split("\n")[2:]:
        fields = re.findall(r'"(?:[^"\\]|\\.)*"|\S+', line)
        for name, field in zip(names, fields):
            columns[name].append(re.sub(r"\\(.)", r"\1", field[1:-1]) if field[0] == '"' else float(field))
        assert len(fields) in (0, len(names))
    return comment, columns


def shown(piece):
    return piece.decode().replace("\n", "↵")


def words_of(svg):
    return [text.strip() for text in ElementTree.parse(svg).getroot().itertext() if text.strip()]


@needs_gnuplot
def test_files(scripture, tmp_path):
    results, options = scripture
    p = analyze(results, "-o", tmp_path, "--figures", "text,lost", "--format", "png,svg,pdf", *options)
    names = ["text", "lost_h2o", "lost_rmm"]
    assert set(os.listdir(tmp_path)) == {f"{n}.{e}" for n in names for e in ("dat", "gp", "png", "svg", "pdf")}
    for name in names:
        assert png_size(tmp_path / f"{name}.png")[0] == (3395 if name == "text" else 1600)
        assert (tmp_path / f"{name}.pdf").read_bytes()[:5] == b"%PDF-"
        assert (tmp_path / f"{name}.pdf").stat().st_size > 5000
    assert p.stderr == ""


@needs_gnuplot
def test_text_has_its_words(scripture, tmp_path):
    results, options = scripture
    analyze(results, "-o", tmp_path, "--figures", "text", "--format", "svg", *options)
    words = words_of(tmp_path / "text.svg")
    comment, data = data_of(tmp_path / "text.dat")
    first, last = int(data["position"][0]), int(data["position"][-1])
    pieces = pieces_of(SAMPLE)
    assert f"tokens {first} to {last} of {len(pieces)}" in " ".join(words)
    for piece in pieces[first:last + 1]:
        if piece.strip():
            assert words.count(shown(piece).strip()) >= 2, piece  # in both panels
    name, oracle = re.fullmatch(r".* under (.*) \(kept\) and (.*) \(oracle\)", comment).groups()
    assert name in words and oracle in words
    # A line of the figure is a line of text: put together again, without the blanks at which lines were wrapped.
    text = "".join(shown(p) for p in pieces[first:last + 1])
    assert "".join(data["text"]).replace(" ", "") == text.replace(" ", "")


def test_text_shares(scripture, tmp_path):
    """Every share in the data, computed again from the lifetimes; no two tokens in one place."""
    results, options = scripture
    analyze(results, "-o", tmp_path, "--figures", "text", "--format", "term", *options)
    comment, data = data_of(tmp_path / "text.dat")
    for column, words in zip(("kept", "oracle"), re.fullmatch(r".* under (.*) \(kept\) and (.*) \(oracle\)",
                                                              comment).groups()):
        spec, lag = (words.split(", lag ") + [""])[:2]
        want = shares_of(options[1], spec, lag)[0]
        for position, share in zip(data["position"], data[column]):
            assert share == float(f"{want[int(position)]:.4g}")
    taken = {(line, column + k) for line, column, columns in zip(data["line"], data["column"], data["columns"])
             for k in range(int(columns))}
    assert len(taken) == sum(data["columns"])
    assert max(column for _, column in taken) <= 72 and max(data["line"]) < 48


@pytest.mark.parametrize("name, spec, lag, oracle", [("h2o", "h2o", "", ("oracle(mass)", "")),
                                                     ("rmm", "rmm", None, ("oracle(mass,hold=lag)", None))])
def test_lost_ranks(scripture, tmp_path, name, spec, lag, oracle):
    results, options = scripture
    analyze(results, "-o", tmp_path, "--figures", "lost", "--format", "term", *options)
    comment, data = data_of(tmp_path / f"lost_{name}.dat")
    if lag is None:
        lag = re.search(r"under rmm, lag (\d+) ", comment).group(1)
        oracle = oracle[0], lag
    assert f"under {spec}{lag and ', lag ' + lag} (kept) and {oracle[0]}{oracle[1] and ', lag ' + oracle[1]} (or" in comment
    policy, policy_end = shares_of(options[1], spec, lag)
    best, best_end = shares_of(options[1], *oracle)
    T = len(policy)
    gap = (best - policy)[:T - (T + 9) // 10]
    want = [int(i) for i in numpy.argsort(-gap, kind="stable") if gap[i] > 0][:20]
    got = [int(i) for i in data["position"]]
    assert len(got) == len(want)
    assert [round(gap[i], 9) for i in got] == [round(gap[i], 9) for i in want]  # ties may be ordered by rounding
    pieces = pieces_of(SAMPLE)
    for n, i in enumerate(got):
        for column, value in (("kept", policy), ("oracle", best), ("kept_at_end", policy_end), ("oracle_at_end", best_end)):
            assert data[column][n] == float(f"{value[i]:.4g}")
        assert data["token"][n] == shown(pieces[i])
        before = shown(b"".join(pieces[:i]))
        assert data["before"][n] == before[-30:]
        assert data["after"][n] == shown(b"".join(pieces[i + 1:]))[:30]


def dark_share(png):
    """Of the pixels of a PNG as gnuplot writes it: 8 bits, RGB or RGBA, not interlaced."""
    data, at, packed = png.read_bytes(), 8, b""
    width, height, depth, colour = struct.unpack(">IIBB", data[16:26])
    assert depth == 8 and colour in (2, 6)
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at:at + 8])
        packed += data[at + 8:at + 8 + size] if kind == b"IDAT" else b""
        at += size + 12
    n = 3 if colour == 2 else 4
    lines = numpy.frombuffer(zlib.decompress(packed), "u1").reshape(height, 1 + n * width)
    before, dark = numpy.zeros((width, n), int), 0
    for line in lines:
        x, kind = line[1:].reshape(width, n).astype(int), line[0]
        if kind == 1:
            x = x.cumsum(0) % 256
        elif kind == 2:
            x = (x + before) % 256
        elif kind > 2:
            left, corner = numpy.zeros(n, int), numpy.zeros(n, int)
            for k in range(width):
                up = before[k]
                p = left + up - corner
                da, db, dc = abs(p - left), abs(p - up), abs(p - corner)
                paeth = numpy.where((da <= db) & (da <= dc), left, numpy.where(db <= dc, up, corner))
                x[k] = left = (x[k] + ((left + up) // 2 if kind == 3 else paeth)) % 256
                corner = up
        before = x
        dark += (x[:, :3].max(1) < 64).sum()
    return dark / (width * height)


def odd_trace(path, pieces):
    from make_traces import write_trace

    write_trace(str(path), 5, seqs=[dict(T=len(pieces), forms=("factored",), n_prompt=3, fisher=1)])
    with h5py.File(path, "r+") as f:
        s = f["seq/0000"]
        del s["pieces"], s["piece_offset"]
        s["pieces"] = numpy.frombuffer(b"".join(pieces), "u1")
        s["piece_offset"] = numpy.cumsum([0] + [len(p) for p in pieces]).astype("i8")
    return path


ODD = [b"''", b"it", b"'s", b"'", b' "', b"back\\", b"\\", b" {x^2_@}", b"`date`", b"$x", b" <b>", b"&amp;", b"%s", b"#",
       b"\n", b"\x00\x1b", b"\r\n", b"", b" ", b"\xff", b"\xf0\x9f", b"\x98\x80", "生命".encode(), "한국".encode(),
       "नमस्ते".encode(), "\u202eשלום".encode(), "\ufffe".encode(), "👩‍👧".encode(), b"\xcc\x81", b"_" * 200, b"\n\n\n",
       b"\xe4\xb8"] + [b" w%d" % i for i in range(30)]  # fmt: skip


@needs_gnuplot
def test_odd_text(tmp_path):
    trace = odd_trace(tmp_path / "odd.h5", ODD)
    results, options = sweep(tmp_path, trace, "-p", "h2o", "-p", "oracle(mass)", "-b", "25%")
    p = analyze(results, "-o", tmp_path / "o", "--figures", "text,lost", "--format", "svg,png,pdf", *options)
    assert p.stderr == ""
    words = words_of(tmp_path / "o" / "text.svg")
    for word in ("''", "'s", "'", '"', "back\\", "\\", "{x^2_@}", "`date`", "$x", "<b>", "&amp;", "%s", "#", "^@^[", "^M↵",
                 "▯", "�", "😀", "◂", "生命", "한국", "नमस्ते", "שלום", "👩‍👧", "◌́", "_" * 72):  # fmt: skip
        assert words.count(word) >= 2, word  # in both panels
    assert len(words_of(tmp_path / "o" / "lost_h2o.svg")) > 10


@needs_gnuplot
def test_missing_glyphs_do_not_spoil_the_png(tmp_path):
    """Pango's box for a character that no font has would be drawn over the whole picture."""
    trace = odd_trace(tmp_path / "odd.h5", [b"a", "\U000e0fff\ue123\u0378".encode()] + [b" w%d" % i for i in range(30)])
    results, options = sweep(tmp_path, trace, "-p", "h2o", "-b", "50%")
    analyze(results, "-o", tmp_path / "o", "--figures", "text", *options)
    script = (tmp_path / "o" / "text.gp").read_text()
    assert "has_e1 = has('e123')\n" in script and "''.box" in script
    assert dark_share(tmp_path / "o" / "text.png") < 0.1  # letters alone: 0.05


def test_no_oracle_is_one_column(tmp_path):
    results, options = sweep(tmp_path, SAMPLE, "-p", "h2o", "-b", "25%")
    p = analyze(results, "-o", tmp_path / "o", "--figures", "text,lost", "--format", "term", *options)
    assert sorted(os.listdir(tmp_path / "o")) == ["text.dat", "text.gp"]
    assert "lost: " in p.stderr and "holds no policy with an oracle at its budget, figure skipped" in p.stderr
    comment, data = data_of(tmp_path / "o" / "text.dat")
    assert comment == "share of later steps that see the token under h2o" and "oracle" not in data
    assert "\nwidth = 3.3\n" in (tmp_path / "o" / "text.gp").read_text()


def test_skipped_and_refused(scripture, tmp_path):
    results, options = scripture
    p = analyze(results, "-o", tmp_path / "a", "--figures", "text,lost", *options[:2])
    for name in "text", "lost":
        assert f"{name}: needs --lifetimes FILE.h5 and --trace FILE.h5, skipped\n" in p.stderr
    assert os.listdir(tmp_path / "a") == []
    other = ROOT / "traces/samples/tiny-recall.h5"
    p = analyze(results, "-o", tmp_path / "b", "--figures", "text", *options[:3], other, code=1)
    assert "tiny-recall.h5: is not the trace that " in p.stderr and "l.h5 was made from" in p.stderr
    assert not (tmp_path / "b").exists()


def test_trace_without_text(tmp_path):
    trace = odd_trace(tmp_path / "t.h5", [b"w"] * 20)
    with h5py.File(trace, "r+") as f:
        del f["seq/0000/pieces"], f["seq/0000/piece_offset"]
    results, options = sweep(tmp_path, trace, "-p", "h2o", "-b", "50%")
    p = analyze(results, "-o", tmp_path / "o", "--figures", "text", *options)
    assert "text: " in p.stderr and "t.h5 holds no text, skipped\n" in p.stderr


def test_only_the_full_cache(tmp_path):
    results, _ = sweep(tmp_path, SAMPLE, "-p", "h2o", "-b", "25%")
    with h5py.File(tmp_path / "l.h5", "r+") as f:
        f["config/0000"].attrs["policy"] = f["config/0000"].attrs["spec"] = "full"
    p = analyze(results, "-o", tmp_path / "o", "--figures", "text", "--lifetimes", tmp_path / "l.h5", "--trace", SAMPLE)
    assert "holds no policy, figure skipped" in p.stderr


def test_long_text_is_cut_to_a_page(tmp_path):
    """Of 100 lines the 48 in which oracle and policy differ most: the oracle keeps what stands in lines 40 to 80."""
    T = 1000
    trace = odd_trace(tmp_path / "t.h5", [b"word%02d\n" % (i % 100) if i % 10 == 9 else b"w " for i in range(T)])
    results, options = sweep(tmp_path, trace, "-p", "h2o", "-p", "oracle(mass)", "-b", "25%")
    with h5py.File(tmp_path / "l.h5", "r+") as f:
        for c in f["config"].values():
            e = c["seq/0000/evict_at"]
            i = numpy.arange(T)
            e[...] = numpy.where((c.attrs["policy"] == "oracle") & (i >= 400) & (i < 800), T + 1, i + 1)
    analyze(results, "-o", tmp_path / "o", "--figures", "text", "--format", "term", *options)
    _, data = data_of(tmp_path / "o" / "text.dat")
    assert max(data["line"]) == 47
    assert data["position"][0] <= 400 and data["position"][-1] >= 799
    assert f"tokens {data['position'][0]:.0f} to {data['position'][-1]:.0f} of 1000" in (
        tmp_path / "o" / "text.gp").read_text()


def test_says_what_gnuplot_said(scripture, tmp_path):
    results, options = scripture
    env = fake_gnuplot(tmp_path / "bin", "cat >/dev/null; echo 'line 9: warning: degree' >&2; echo 'bad label' >&2; exit 1\n")
    p = analyze(results, "-o", tmp_path / "o", "--figures", "text", *options, code=1, env=env)
    assert "gnuplot failed: bad label" in p.stderr
