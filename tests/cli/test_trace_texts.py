"""kvlag trace: what is traced. JSON lines, conversations, token ids, windows, answers that the model writes, and runs that
are taken up."""

import fcntl
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np
import pytest

from simcli import KVLAG, ROOT, killed_after, kvlag, refused
from philox import words  # noqa: I001  (simcli makes the oracles' folder known)

TSAN = b"__tsan_" in Path(KVLAG).read_bytes()
GENESIS = ROOT / "demo/genesis.txt"
PROMPT = b"In the beginning God"
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

DATED = (
    "{{ 'Cutting Knowledge Date: December 2023\\n' }}{% set date_string = '26 Jul 2024' %}{{ 'Today Date: ' + date_string }}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    subprocess.run([sys.executable, ROOT / "tests/tiny/make_gguf.py", path], check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """The tiny model as a folder, with a chat template."""
    folder = tmp_path_factory.mktemp("chatty") / "tiny"
    shutil.copytree(ROOT / "tests/tiny", folder, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHATML}))
    return folder


def changed(model, path, key, value):
    """A copy of a GGUF file with a number of its metadata replaced."""
    raw = bytearray(model.read_bytes())
    at = raw.index(key.encode()) + len(key) + 4
    raw[at : at + len(value)] = value
    path.write_bytes(raw)
    return path


def trace(*args, said=False, **more):
    done = kvlag("trace", *args, **more)
    assert done.returncode == 0, done.stderr.decode()
    return done.stderr.decode() if said else done.stdout


class Seq:
    def __init__(self, s):
        self.n_prompt, self.source, self.ids = int(s.attrs["n_prompt"]), s.attrs["source"], s["tokens"][:].tolist()
        self.top = s["logits/topk_id"][:], s["logits/topk_logprob"][:]
        self.pieces = None
        if "pieces" in s:
            at, raw = s["piece_offset"][:], s["pieces"][:].tobytes()
            assert at[0] == 0 and at[-1] == len(raw)
            self.pieces = [raw[a:b] for a, b in zip(at, at[1:])]

    def text(self, first=0, last=None):
        return b"".join(self.pieces[first:last])


def read(path):
    with h5py.File(path) as f:
        return [Seq(f["seq"][name]) for name in sorted(f["seq"])], f.attrs["command"]


def traced(folder, *args, **more):
    trace(*args, "-o", folder / "t.h5", "--force", "-q", **more)
    return read(folder / "t.h5")[0]


def ids_of(tiny, folder, words):
    (folder / "words").write_bytes(words)
    return traced(folder, tiny, folder / "words")[0].ids


# ---- JSON lines ------------------------------------------------------------------------------------------------------


def test_a_line_is_a_text(tiny, tmp_path):
    lines = [
        json.dumps({"prompt": "And God said, ", "text": "Let there be light", "id": 7}),
        json.dumps({"text": "caf\u00e9 \u2603 \ud83d\ude00\n\ttwo\\u0000 lines"}, ensure_ascii=True),
        "  ",
        json.dumps({"prompt": "And the", "completion": " evening and the morning"}) + "\r",
        json.dumps({"prompt": "", "text": "the first day", "completion": None}),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text(lines[0] + "\n")
    seqs = traced(tmp_path, tiny, tmp_path / "a.jsonl", "--jsonl", tmp_path / "b.jsonl")
    assert [s.source for s in seqs] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:4", "a.jsonl:5", "b.jsonl:1"]
    assert seqs[0].text() == b"And God said, Let there be light"
    assert seqs[1].text().decode() == "caf\u00e9 \u2603 \U0001f600\n\ttwo\\u0000 lines"
    assert seqs[2].text() == b"And the evening and the morning"
    assert seqs[3].text() == b"the first day"
    assert [s.n_prompt for s in seqs[1:4]] == [0, 3, 0] and seqs[2].text(0, 3) == b"And the"
    # The text is read as one: a token that holds the prompt's last bytes belongs to the prompt.
    assert seqs[0].ids == ids_of(tiny, tmp_path, seqs[0].text())
    n = seqs[0].n_prompt
    assert len(seqs[0].text(0, n - 1)) < len("And God said, ") <= len(seqs[0].text(0, n))
    assert seqs[4].ids == seqs[0].ids and seqs[4].n_prompt == n


def test_lines_from_standard_input_and_a_prompt_by_number(tiny, tmp_path):
    raw = b'{"prompt": "And God said, ", "text": "Let there be light"}\n{"text": "and there was light"}\n'
    seqs = traced(tmp_path, tiny, "-", "--jsonl", "--prompt", 1, "--tokens", 5, input=raw)
    assert [(s.source, s.n_prompt, len(s.ids)) for s in seqs] == [("-:1", 1, 5), ("-:2", 1, 4)]


@pytest.mark.parametrize("line, message", [
    ('{"prompt": "a", "text": 3}', "'text' is not a text"),
    ('{"prompt": "a"}', "nothing follows the prompt (--generate lets the model write it)"),
    ('{"completion": "a b c"}', "'completion' without a 'prompt'"),
    ('{"prompt": "a", "text": "b", "completion": "c"}', "both 'text' and 'completion'"),
    ('{"words": "a"}', "none of 'text', 'prompt' and 'messages'"),
    ('["a", "b"]', "not a JSON object"),
    ('{"text": "a b c"', "JSON"),
    ('{"text": "a b c"} x', "JSON"),
    ('{"text": "a\\u0000b"}', "NUL"),
    ('{"text": ""}', "the text is empty"),
    ('{"text": "a"}', "1 token; a trace needs at least 2"),
    ('{"prompt": "And God said", "text": ""}', "leaves no step to count"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "no chat template"),
])  # fmt: skip
def test_bad_lines_are_named(tiny, tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "In the beginning"}\n\n' + line + "\n")
    refused(tmp_path, 1, ["a.jsonl:3: ", message], "trace", tiny, "a.jsonl", "--jsonl", "-o", "t.h5")


def test_a_file_without_lines(tiny, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n \n")
    refused(tmp_path, 1, "a.jsonl: holds no line", "trace", tiny, "a.jsonl", "--jsonl", "-o", "t.h5")


# ---- token ids -------------------------------------------------------------------------------------------------------


def test_ids_are_taken_as_they_are(tiny, tmp_path):
    want = traced(tmp_path, tiny, GENESIS, "--tokens", 60)[0]
    (tmp_path / "plain").write_text("\n".join(map(str, want.ids)))
    (tmp_path / "array").write_text(f" {json.dumps(want.ids)}\n")
    (tmp_path / "tight").write_text("[" + ",".join(map(str, want.ids)) + "]")
    seqs = traced(tmp_path, tiny, "--ids", *(tmp_path / name for name in ("plain", "array", "tight")))
    assert [s.ids for s in seqs] == [want.ids] * 3 and [s.pieces for s in seqs] == [want.pieces] * 3
    assert np.array_equal(seqs[0].top[1], want.top[1])
    cut = traced(tmp_path, tiny, "--ids", tmp_path / "plain", "--skip", 7, "--tokens", 20, "--prompt", 3)[0]
    assert cut.ids == want.ids[7:27] and cut.n_prompt == 3 and cut.source == "plain@7"
    assert cut.text() == want.text(7, 27)


def test_no_bos_is_put_before_ids(tiny, tmp_path):
    bos = changed(tiny, tmp_path / "bos.gguf", "tokenizer.ggml.add_bos_token", b"\1")
    (tmp_path / "ids").write_text("5 6 7 8 9")
    assert traced(tmp_path, bos, "--ids", tmp_path / "ids", "--tokens", 2, "--stride", 2)[1].ids == [7, 8]
    assert traced(tmp_path, bos, GENESIS, "--tokens", 4)[0].ids[0] == 0


def test_ids_of_a_model_whose_tokenizer_is_not_known(tiny, tmp_path):
    raw = tiny.read_bytes()
    (tmp_path / "odd.gguf").write_bytes(raw.replace(b"gpt-2", b"gtp-7"))
    (tmp_path / "ids").write_text("1 2 3 4 5")
    said = trace(tmp_path / "odd.gguf", "--ids", tmp_path / "ids", "-o", tmp_path / "t.h5", said=True)
    assert "gtp-7" in said and "no text is kept beside the ids" in said
    seq = read(tmp_path / "t.h5")[0][0]
    assert seq.ids == [1, 2, 3, 4, 5] and seq.pieces is None
    for more in ["words"], ["--ids", "ids", "--generate", 3]:
        (tmp_path / "words").write_text("some words")
        refused(tmp_path, 1, "gtp-7", "trace", "odd.gguf", *more, "-o", "x.h5")


@pytest.mark.parametrize("content, message", [
    ("1 2 x", "id 2: 'x' is not a token id"), ("1 2x", "id 1: '2x'"), ("-1 2", "id 0: '-1'"), ("1.5 2", "id 0: '1.5'"),
    ("1 1024", "id 1: 1024 is outside the vocabulary of 1024"), ("99999999999999999999 1", "outside the vocabulary"),
    ("", "holds no token ids"), ("[]", "holds no token ids"), ("[1, 2", "after 2 ids"), ("[1 2]", "after 1 ids"),
    ("[1, 2,]", "id 2: ']'"), ("1, 2", "id 1: ','"), ("[1, 2] 3", "after 2 ids"), ("1 2]", "id 2: ']'"),
    ("[[1, 2]]", "id 0: '[1,'"), ("7", "1 token; a trace needs at least 2"),
])  # fmt: skip
def test_bad_ids_are_named(tiny, tmp_path, content, message):
    (tmp_path / "ids").write_text(content)
    refused(tmp_path, 1, ["ids: ", message], "trace", tiny, "ids", "--ids", "-o", "t.h5")


# ---- windows ---------------------------------------------------------------------------------------------------------


def test_windows_over_a_book(tiny, tmp_path):
    book = traced(tmp_path, tiny, GENESIS, "--tokens", 500)[0]
    (tmp_path / "book").write_bytes(book.text())
    said = trace(tiny, tmp_path / "book", "--tokens", 64, "--stride", 100, "--skip", 10, "-o", tmp_path / "w.h5", said=True)
    seqs, command = read(tmp_path / "w.h5")
    assert command == "kvlag trace tiny.gguf book --tokens 64 --skip 10 --stride 100"
    assert [s.source for s in seqs] == [f"book@{at}" for at in (10, 110, 210, 310, 410)]
    for s, at in zip(seqs, range(10, 500, 100)):
        assert s.ids == book.ids[at : at + 64] and s.text() == book.text(at, at + 64)
    assert "5 windows of 64 tokens, one every 100; 26 tokens at the end are in none" in said
    # The last one is whole to the token, or not there.
    for tokens, n in (90, 5), (91, 4):
        assert len(traced(tmp_path, tiny, tmp_path / "book", "--tokens", tokens, "--stride", 100, "--skip", 10)) == n
    two = traced(tmp_path, tiny, tmp_path / "book", "--tokens", 64, "--stride", 100, "--windows", 2)
    assert [s.source for s in two] == ["book@0", "book@100"]


def test_a_text_shorter_than_a_window_is_one(tiny, tmp_path):
    seqs = traced(tmp_path, tiny, "-", "--tokens", 64, "--stride", 8, input=PROMPT)
    assert [s.source for s in seqs] == ["-@0"] and seqs[0].text() == PROMPT


def test_every_window_begins_with_bos_where_the_tokenizer_adds_one(tiny, tmp_path):
    bos = changed(tiny, tmp_path / "bos.gguf", "tokenizer.ggml.add_bos_token", b"\1")
    book = traced(tmp_path, tiny, GENESIS, "--tokens", 200)[0]
    (tmp_path / "book").write_bytes(book.text())
    seqs = traced(tmp_path, bos, tmp_path / "book", "--tokens", 51, "--stride", 50)
    assert len(seqs) == 4
    for s, at in zip(seqs, range(0, 200, 50)):
        assert s.ids == [0, *book.ids[at : at + 50]] and s.pieces[0] == b"" and s.text() == book.text(at, at + 50)
    skipped = traced(tmp_path, bos, tmp_path / "book", "--skip", 150)[0]
    assert skipped.ids == seqs[3].ids and skipped.source == "book@150"


def test_windows_of_lines(tiny, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": GENESIS.read_text()[:900]}) + "\n" + json.dumps({"text": "And God said"}))
    seqs = traced(tmp_path, tiny, tmp_path / "a.jsonl", "--jsonl", "--tokens", 50, "--stride", 50)
    assert [s.source for s in seqs] == [f"a.jsonl:1@{50 * i}" for i in range(len(seqs) - 1)] + ["a.jsonl:2@0"]
    (tmp_path / "b.jsonl").write_text('{"prompt": "And God said, ", "text": "Let there be light"}')
    refused(tmp_path, 2, ["b.jsonl:1: ", "its prompt would be cut"], "trace", tiny, "b.jsonl", "--jsonl", "--skip", 1, "-o", "t.h5")


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_the_most_likely_tokens(tiny, tmp_path):
    trace(tiny, "-", "-o", tmp_path / "a.h5", "--generate", 40, "--threads", 1, input=PROMPT)
    said = trace(tiny, "-", "-o", tmp_path / "b.h5", "--generate", 40, "--threads", 3, input=PROMPT, said=True)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    (s,), command = read(tmp_path / "a.h5")
    n = s.n_prompt
    assert command == "kvlag trace tiny.gguf - --generate 40"
    assert len(s.ids) == n + 40 and s.text(0, n) == PROMPT and s.ids[:n] == ids_of(tiny, tmp_path, PROMPT)
    top, gap = s.top[0][:, 0], s.top[1][:, 0] - s.top[1][:, 1]
    for t in range(n - 1, n + 39):  # steps and passes differ in the last bits
        assert s.ids[t + 1] == top[t] or gap[t] < 1e-4
    assert "40 tokens generated in" in said and "0 of 1 answers ended by themselves" in said
    assert f"{n + 40} tokens (40 of them generated)" in said


def test_answers_are_shown(tiny, tmp_path):
    shown = trace(tiny, "-", GENESIS, "--tokens", 12, "-o", tmp_path / "a.h5", "--generate", 20, "--show", "-q", input=PROMPT)
    seqs, command = read(tmp_path / "a.h5")
    assert "--show" not in command
    assert shown == b"".join(s.text(s.n_prompt) + b"\n" for s in seqs)


@pytest.mark.parametrize("temperature, top_p", [(1, None), (0.7, 0.8), (2.5, 0.3)])
def test_tokens_that_are_drawn(tiny, tmp_path, temperature, top_p):
    """Against the same draw from the trace's own predictions, in f64."""
    more = ["--temperature", temperature, *(["--top-p", top_p] if top_p else [])]
    seqs = traced(tmp_path, tiny, "-", GENESIS, "--tokens", 9, "--generate", 60, "--logits", "topk:1024", "--seed", 5, *more,
                  input=PROMPT)  # fmt: skip
    doubtful = 0
    for number, s in enumerate(seqs):
        for t in range(s.n_prompt - 1, len(s.ids) - 1):
            x = s.top[1][t].astype(float) / temperature
            p = np.exp(x - x.max())
            p /= p.sum()
            order = np.lexsort((s.top[0][t], -p))
            sums = np.cumsum(p[order])
            n = min(np.searchsorted(sums, top_p or 1) + 1, len(sums))
            u = (words(5, t, 0, number, 3)[0] + 0.5) / 2**32 * sums[n - 1]
            want = s.top[0][t][order[np.searchsorted(sums, u, side="right")]]
            near = np.abs(sums[:n] - u).min() < 1e-4 or np.abs(sums - (top_p or 2)).min() < 1e-4
            assert s.ids[t + 1] == want or near
            doubtful += near
    assert doubtful < 30


def test_draws_follow_the_seed(tiny, tmp_path):
    def draw(*more):
        return traced(tmp_path, tiny, "-", "--generate", 30, *more, input=PROMPT)[0].ids

    one = "--temperature", 1
    assert draw(*one) == draw(*one, "--seed", 0) == draw(*one, "--threads", 1) != draw(*one, "--seed", 1)
    most_likely = draw("--temperature", 0)
    assert draw("--temperature", 5, "--top-p", "1e-6") == most_likely != draw("--temperature", 5)


def test_an_answer_ends_with_the_models_eos(tiny, tmp_path):
    ids = traced(tmp_path, tiny, "-", "--generate", 30, input=PROMPT)[0]
    n = ids.n_prompt
    stop = next(t for t in range(n + 3, len(ids.ids)) if ids.ids[t] not in ids.ids[n:t])
    eos = changed(tiny, tmp_path / "eos.gguf", "tokenizer.ggml.eos_token_id", int(ids.ids[stop]).to_bytes(4, "little"))
    done = kvlag("trace", eos, "-", "-o", tmp_path / "a.h5", "--generate", 30, "-v", "--show", input=PROMPT)
    said = done.stderr.decode()
    (s,), _ = read(tmp_path / "a.h5")
    assert s.ids == ids.ids[: stop + 1] and done.stdout == s.text(n, -1) + b"\n"
    assert "standard input: %d tokens generated, the model ended there" % (stop + 1 - n) in said
    assert "1 of 1 answers ended by themselves" in said


def test_an_answer_that_ends_at_once_is_left_out(tiny, tmp_path):
    first = traced(tmp_path, tiny, "-", "--generate", 2, input=PROMPT)[0]
    token = int(first.ids[first.n_prompt])
    eos = changed(tiny, tmp_path / "eos.gguf", "tokenizer.ggml.eos_token_id", token.to_bytes(4, "little"))
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": PROMPT.decode()}) + "\n" + json.dumps({"text": "Tirzah gold. Seth"}))
    said = trace(eos, tmp_path / "a.jsonl", "--jsonl", "-o", tmp_path / "a.h5", "--generate", 5, said=True)
    assert "a.jsonl:1: the model ends its answer at once; the text is left out" in said
    assert [s.source for s in read(tmp_path / "a.h5")[0]] == ["a.jsonl:2"]
    refused(tmp_path, 1, "standard input: the model ends its answer at once", "trace", eos, "-", "-o", "b.h5", "--generate", 5,
            "-q", input=PROMPT)  # fmt: skip


def test_what_a_line_answers_is_left_to_the_model(tiny, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "In the beginning God", "text": " slept"}')
    s = traced(tmp_path, tiny, tmp_path / "a.jsonl", "--jsonl", "--generate", 10)[0]
    assert s.ids == traced(tmp_path, tiny, "-", "--generate", 10, input=PROMPT)[0].ids
    refused(tmp_path, 2, ["a.jsonl:1: ", "would cut its prompt"], "trace", tiny, "a.jsonl", "--jsonl", "--generate", 5, "--tokens", 2,
            "-o", "x.h5")  # fmt: skip


def test_windows_are_continued(tiny, tmp_path):
    seqs = traced(tmp_path, tiny, GENESIS, "--tokens", 32, "--stride", 32, "--windows", 3, "--generate", 8)
    assert [(s.source, s.n_prompt, len(s.ids)) for s in seqs] == [(f"genesis.txt@{32 * i}", 32, 40) for i in range(3)]
    own = traced(tmp_path, tiny, GENESIS, "--tokens", 32, "--generate", 8, "--prompt", 5)[0]
    assert own.n_prompt == 5 and own.ids == seqs[0].ids


def test_an_answer_needs_room(tiny, tmp_path):
    refused(tmp_path, 1, "a prompt of 8 tokens and 2041 generated ones exceed this model's 2048 positions",
            "trace", tiny, "-", "-o", "t.h5", "--generate", 2041, input=PROMPT)  # fmt: skip


PLUGIN = Path(KVLAG).parent / "kvlag-fibers.so"


@pytest.mark.skipif(not PLUGIN.exists(), reason="kvlag-fibers.so is not built (make unit)")
def test_the_cuda_backend_answers_and_is_taken_up(tiny, tmp_path):
    env = {**os.environ, "KVLAG_CUDA_PLUGIN": str(PLUGIN)}
    want = traced(tmp_path, tiny, "-", GENESIS, "--tokens", 8, "--generate", 12, input=PROMPT)
    args = [tiny, "-", GENESIS, "--tokens", 8, "--generate", 12, "--backend", "cuda"]
    trace(*args, "-o", tmp_path / "t.h5", "--force", input=PROMPT, env=env)
    seqs, _ = read(tmp_path / "t.h5")
    assert [s.ids for s in seqs] == [s.ids for s in want]
    (tmp_path / "x.h5.partial").touch()
    os.link(tmp_path / "x.h5.partial", tmp_path / "kept")
    trace(*args, "-o", tmp_path / "x.h5", "--resume", input=PROMPT, env=env)
    os.replace(tmp_path / "kept", tmp_path / "x.h5.partial")
    assert taken_up(kvlag("trace", *args, "-o", tmp_path / "x.h5", "--resume", "--force", input=PROMPT, env=env)) == (2, 2)
    assert (tmp_path / "x.h5").read_bytes() == (tmp_path / "t.h5").read_bytes()


# ---- conversations ---------------------------------------------------------------------------------------------------

ASKED = [{"role": "user", "content": "Who divided the light?"}]
ANSWERED = ASKED + [{"role": "assistant", "content": "God divided the light from the darkness."}]
HEAD = b"<|im_start|>user\nWho divided the light?<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation(chatty, tmp_path):
    (tmp_path / "c.json").write_text(json.dumps(ANSWERED))
    (tmp_path / "m.json").write_text(json.dumps({"messages": ANSWERED}))
    s, m = traced(tmp_path, chatty, "--chat", tmp_path / "c.json", tmp_path / "m.json")
    assert s.text() == HEAD + b"God divided the light from the darkness.<|im_end|>\n" and s.source == "c.json"
    assert len(s.text(0, s.n_prompt - 1)) < len(HEAD) <= len(s.text(0, s.n_prompt))
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": ANSWERED}) + "\n")
    (line,) = traced(tmp_path, chatty, "--jsonl", tmp_path / "c.jsonl")
    assert (m.ids, m.n_prompt) == (line.ids, line.n_prompt) == (s.ids, s.n_prompt)
    assert traced(tmp_path, chatty, "--chat", tmp_path / "c.json", "--prompt", 4)[0].n_prompt == 4


def test_the_model_answers(chatty, tmp_path):
    (tmp_path / "c.json").write_text(json.dumps(ASKED))
    asked = traced(tmp_path, chatty, "--chat", tmp_path / "c.json", "--generate", 12)[0]
    assert asked.text(0, asked.n_prompt) == HEAD and len(asked.ids) == asked.n_prompt + 12
    answered = traced(tmp_path, chatty, "--chat", "-", "--generate", 12, input=json.dumps(ANSWERED).encode())[0]
    assert answered.ids == asked.ids and answered.source == ""
    refused(tmp_path, 1, "c.json: nothing follows the prompt", "trace", chatty, "--chat", "c.json", "-o", "x.h5")


def test_a_template_that_writes_the_day(chatty, tmp_path):
    """The day that was asked for is in the text and the recorded command; without one, Llama 3's own."""
    folder = tmp_path / "dated"
    shutil.copytree(chatty, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": DATED}))
    (tmp_path / "c.json").write_text(json.dumps(ANSWERED))
    (own,) = traced(tmp_path, folder, "--chat", tmp_path / "c.json")
    (given,) = traced(tmp_path, folder, "--chat", tmp_path / "c.json", "--date", "2026-11-05")
    assert b"\nToday Date: 26 Jul 2024\n" in own.text() and b"\nToday Date: 05 Nov 2026\n" in given.text()
    refused(tmp_path, 2, "writes no date: leave out --date", "trace", chatty, "--chat", "c.json", "-o", "x.h5", "--date",
            "2026-11-05")  # fmt: skip


def test_conversations_that_are_refused(tiny, chatty, tmp_path):
    (tmp_path / "c.json").write_text(json.dumps(ANSWERED))
    refused(tmp_path, 1, ["c.json: is a conversation", "tiny.gguf has no chat template"], "trace", tiny, "--chat", "c.json",
            "-o", "x.h5")  # fmt: skip
    for content in "[", "{}", "\0", '[{"role": "user"}]':
        (tmp_path / "c.json").write_text(content)
        refused(tmp_path, 1, "c.json: ", "trace", chatty, "--chat", "c.json", "-o", "x.h5")


# ---- normal forms ----------------------------------------------------------------------------------------------------


def test_a_text_is_composed_where_the_tokenizer_says_so(tiny, tmp_path):
    """Qwen's does: the ids are those of the composed text, the pieces the text's own bytes. In a prompt, too."""
    composing = tmp_path / "q.gguf"
    composing.write_bytes(tiny.read_bytes().replace(b"gpt-2", b"qwen2", 1))
    texts = [f"{e} was, and cafe{e} {u}.".encode() for e, u in (("e\u0301", "u\u0323\u0302"), ("\u00e9", "\u1ee5\u0302"))]
    for i, raw in enumerate(texts):
        (tmp_path / f"{i}.txt").write_bytes(raw)
    apart, whole = traced(tmp_path, composing, tmp_path / "0.txt", tmp_path / "1.txt")
    assert apart.ids == whole.ids and [apart.text(), whole.text()] == texts
    assert kvlag("info", "--check", tmp_path / "t.h5").returncode == 0
    assert ids_of(tiny, tmp_path, texts[0]) != ids_of(tiny, tmp_path, texts[1])
    line = json.dumps({"prompt": "cafe\u0301", "text": " was there"})
    (asked,) = traced(tmp_path, composing, "-", "--jsonl", input=line.encode())
    assert asked.text(0, asked.n_prompt).decode() == "cafe\u0301" and asked.text(asked.n_prompt).decode() == " was there"


# ---- outputs ---------------------------------------------------------------------------------------------------------


def test_a_model_is_not_overwritten(tiny, tmp_path):
    """Neither a file of a folder nor a shard of a set; a trace that lies beside them may be replaced."""
    folder = tmp_path / "m"
    shutil.copytree(ROOT / "tests/tiny", folder)
    for name in "m-00001-of-00002.gguf", "m-00002-of-00002.gguf":
        shutil.copy(tiny, tmp_path / name)
    (tmp_path / "a.txt").write_bytes(PROMPT)
    for name in "model.safetensors", "config.json", "tokenizer.json":
        refused(tmp_path, 2, f"m/{name}: is a file of the model m", "trace", "m", "a.txt", "-o", f"m/{name}", "--force", "-q")
    refused(tmp_path, 2, "is an input", "trace", tiny, "a.txt", "-o", "a.txt", "--force", "-q")
    refused(tmp_path, 2, "m-00002-of-00002.gguf: is a file of the model m-00001-of-00002.gguf", "trace",
            "m-00001-of-00002.gguf", "a.txt", "-o", "m-00002-of-00002.gguf", "--force", "-q")  # fmt: skip
    for _ in range(2):
        assert kvlag("trace", ".", "../a.txt", "-o", "t.h5", "--force", "-q", cwd=folder).returncode == 0


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options, message", [
    (["--jsonl", "--ids"], "--jsonl and --ids"),
    (["--chat", "--ids"], "--chat and --ids"),
    (["--chat", "--jsonl"], "--chat and --jsonl"),
    (["--ids", "--marked"], "--ids and --marked"),
    (["--ids", "--special"], "--ids and --special"),
    (["--marked", "--jsonl"], "--marked and --jsonl"),
    (["--marked", "--chat"], "--marked and --chat"),
    (["--marked", "--skip", 3], "--marked and --skip"),
    (["--marked", "--tokens", 9, "--stride", 3], "--marked and --stride"),
    (["--marked", "--generate", 3], "--marked and --generate"),
    (["--date", "2026-11-05"], "--date is for conversations"),
    (["--chat", "--date", "5 Nov 2026"], "--date: '5 Nov 2026' is no date (want YYYY-MM-DD)"),
    (["--stride", 5], "--stride needs --tokens"),
    (["--stride", 5, "--tokens", 1], "--stride needs --tokens"),
    (["--windows", 5, "--tokens", 4], "--windows needs --stride"),
    (["--stride", 0, "--tokens", 4], "--stride: 0 is out of range"),
    (["--skip", 50], "a.txt: --skip 50 leaves none of its 8 tokens"),
    (["--skip", -1], "--skip: -1 is out of range"),
    (["--generate", 1], "--generate: 1 is out of range (2 to"),
    (["--temperature", 1], "--temperature is for tokens that --generate makes"),
    (["--top-p", 0.5], "--top-p is for tokens that --generate makes"),
    (["--show"], "--show is for tokens that --generate makes"),
    (["--generate", 4, "--top-p", 0.5], "--top-p needs a --temperature above 0"),
    (["--generate", 4, "--temperature", 0, "--top-p", 0.5], "--top-p needs a --temperature above 0"),
    (["--generate", 4, "--temperature", "hot"], "--temperature: 'hot' is not a number"),
    (["--generate", 4, "--temperature", -1], "--temperature: '-1' is not a number from 0"),
    (["--generate", 4, "--temperature", 0.001], "--temperature: '0.001' is not a number from 0.01 to 100"),
    (["--generate", 4, "--temperature", "nan"], "--temperature: 'nan'"),
    (["--generate", 4, "--temperature", 1, "--top-p", 0], "--top-p: '0' is not a number"),
    (["--generate", 4, "--temperature", 1, "--top-p", 1.5], "--top-p: '1.5' is not a number"),
    (["--generate", 4, "--prompt", 40], "--prompt 40 leaves no step to count"),
])  # fmt: skip
def test_options_that_make_no_sense(tiny, tmp_path, options, message):
    (tmp_path / "a.txt").write_bytes(PROMPT)
    refused(tmp_path, 2, message, "trace", tiny, "a.txt", "-o", "t.h5", "-q", *options)


def test_an_output_that_cannot_be_is_found_before_anything_is_generated(tiny, tmp_path):
    (tmp_path / "t.h5").write_bytes(b"mine")
    refused(tmp_path, 2, "--force", "trace", tiny, "-", "-o", "t.h5", "--generate", 5, input=PROMPT)


# ---- taken up --------------------------------------------------------------------------------------------------------

ASK = ["--tokens", "100", "--stride", "90", "--generate", "20", "--temperature", "1", "--gradients", "fisher:2"]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """t.h5 of a run that nothing stopped; journal: all that one with --resume kept."""
    here = tmp_path_factory.mktemp("whole")
    shutil.copy(tiny, here / "tiny.gguf"), (here / "book").write_bytes(GENESIS.read_bytes()[:5000])
    trace("tiny.gguf", "book", *ASK, "-o", "t.h5", cwd=here)
    (here / "x.h5.partial").touch()
    os.link(here / "x.h5.partial", here / "journal")  # the name goes when the run is done, the file stays
    trace("tiny.gguf", "book", *ASK, "-o", "x.h5", "--resume", cwd=here)
    assert not (here / "x.h5.partial").exists()
    assert (here / "x.h5").read_bytes() == (here / "t.h5").read_bytes()
    return here


@pytest.fixture
def here(whole, tmp_path):
    shutil.copy(whole / "tiny.gguf", tmp_path), shutil.copy(whole / "book", tmp_path)
    return tmp_path


def resume(here, *more, **options):
    return kvlag("trace", "tiny.gguf", "book", *ASK, "-o", "x.h5", "--resume", *more, cwd=here, **options)


def taken_up(done):
    assert done.returncode == 0, done.stderr.decode()
    found = re.search(r"(\d+) of (\d+) texts are there already", done.stderr.decode())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def records(journal):
    """(where it ends, what it is: 0 an answer, 1 a call, 2 the end of a sequence) of each record."""
    at = 0
    for _ in range(3):
        at = journal.index(b"\n", at) + 1
    while at < len(journal):
        kind = int.from_bytes(journal[at + 24 : at + 32], "little")
        at += 24 + int.from_bytes(journal[at + 8 : at + 16], "little")
        yield at, kind


def test_a_journal_cut_anywhere(whole, here):
    raw = (whole / "journal").read_bytes()
    found = list(records(raw))
    ends = [at for at, kind in found if kind == 2]
    answers = [at for at, kind in found if kind == 0]
    assert len(ends) == len(answers) > 15
    middle = found[len(found) // 2][0]
    for cut, there in [(10, 0), (answers[3] + 7, 0), (ends[0] - 1, 0), (ends[6] + 30, 7), (middle, None), (len(raw), len(ends))]:
        (here / "x.h5.partial").write_bytes(raw[:cut])
        taken, n = taken_up(resume(here, "--force"))
        assert taken == (sum(at <= cut for at in ends) if there is None else there) and n in (0, len(ends))
        assert (here / "x.h5").read_bytes() == (whole / "t.h5").read_bytes(), cut
        assert sorted(os.listdir(here)) == ["book", "tiny.gguf", "x.h5"]


def test_a_damaged_byte(whole, here):
    raw = (whole / "journal").read_bytes()
    found = list(records(raw))
    ends = [at for at, kind in found if kind == 2]
    for at in ends[4] + 3, ends[4] + 100, ends[5] - 3:
        broken = bytearray(raw)
        broken[at] ^= 4
        (here / "x.h5.partial").write_bytes(broken)
        done = resume(here, "--force")
        assert taken_up(done)[0] == 5 and b"torn or damaged" in done.stderr
        assert (here / "x.h5").read_bytes() == (whole / "t.h5").read_bytes()


def test_killed_again_and_again(whole, here):
    command = ["trace", "tiny.gguf", "book", *ASK, "-o", "x.h5", "--resume"]
    total, killed, taken = (whole / "journal").stat().st_size, 0, []
    for share in 0.002, 0.2, 0.4, 0.6, 0.8:
        if not killed_after(here, "x.h5.partial", total * share, *command):
            break
        killed += 1
        raw = (here / "x.h5.partial").read_bytes()
        taken.append(sum(kind == 2 for _, kind in records(raw)))
    assert killed > 2 and taken == sorted(taken) and taken[-1] > 0
    assert taken_up(resume(here))[0] >= taken[-1]
    assert (here / "x.h5").read_bytes() == (whole / "t.h5").read_bytes()
    assert sorted(os.listdir(here)) == ["book", "tiny.gguf", "x.h5"]


def test_whatever_is_kept_is_taken_up(tiny, tmp_path):
    """Every array that a trace may have."""
    for more in (["--logits", "full", "--attention", "both"], ["--logits", "topk:0", "--gradients", "none", "--attention", "factored"],
                 ["--attention", "dense", "--gradients", "loss"]):  # fmt: skip
        args = [tiny, GENESIS, "--tokens", 300, "--stride", 300, "--windows", 3, *more, "--force"]
        trace(*args, "-o", tmp_path / "t.h5")
        for path in tmp_path.glob("x.h5*"):
            path.unlink()
        (tmp_path / "x.h5.partial").touch()
        os.link(tmp_path / "x.h5.partial", tmp_path / "kept")
        trace(*args, "-o", tmp_path / "x.h5", "--resume")
        os.replace(tmp_path / "kept", tmp_path / "x.h5.partial")
        done = kvlag("trace", *args, "-o", tmp_path / "x.h5", "--resume")
        assert taken_up(done) == (3, 3)
        assert (tmp_path / "x.h5").read_bytes() == (tmp_path / "t.h5").read_bytes()


@pytest.mark.skipif(TSAN, reason="this sanitizer writes files of its own")
def test_a_full_disk(whole, here):
    size = (whole / "journal").stat().st_size
    limit = int(size * 0.6)
    done = resume(here, "-q", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    said = done.stderr.decode()
    assert done.returncode == 1 and said.count("\n") == 1 and "File too large" in said
    assert sorted(os.listdir(here)) == ["book", "tiny.gguf", "x.h5.partial"]
    assert taken_up(resume(here))[0] > 3
    assert (here / "x.h5").read_bytes() == (whole / "t.h5").read_bytes()


def test_journals_of_other_work(whole, here):
    raw = (whole / "journal").read_bytes()
    (here / "x.h5.partial").write_bytes(raw)
    go = ["trace", "tiny.gguf", "book", "-o", "x.h5", "--resume"]
    refused(here, 2, ["x.h5.partial", "another command", "--stride 90"], *go, "--tokens", 30)
    (here / "book").write_text("And it came to pass. " * 200)
    refused(here, 2, ["x.h5.partial", "same command", "texts"], *go, *ASK)
    shutil.copy(whole / "book", here / "book")
    weights = bytearray((here / "tiny.gguf").read_bytes())
    weights[-100] ^= 1
    (here / "tiny.gguf").write_bytes(weights)
    refused(here, 2, ["x.h5.partial", "same command", "weights"], *go, *ASK)
    (here / "x.h5.partial").write_bytes(b"# something else")
    refused(here, 2, "x.h5.partial: is no journal", *go, *ASK)


def test_a_journal_that_is_in_use(here):
    with open(here / "x.h5.partial", "w") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        refused(here, 2, "x.h5.partial: another process is at work on it", "trace", "tiny.gguf", "book", *ASK, "-o", "x.h5",
                "--resume")  # fmt: skip


def test_without_the_option_a_journal_is_mentioned_and_kept(whole, here):
    shutil.copy(whole / "journal", here / "x.h5.partial")
    done = kvlag("trace", "tiny.gguf", "book", *ASK, "-o", "x.h5", cwd=here)
    assert done.returncode == 0 and b"x.h5.partial: unfinished work" in done.stderr and b"--resume" in done.stderr
    assert (here / "x.h5.partial").read_bytes() == (whole / "journal").read_bytes()


def test_a_run_that_fails_at_once_leaves_no_journal(tiny, tmp_path):
    (tmp_path / "a.h5").write_bytes(b"mine")
    refused(tmp_path, 2, "already there", "trace", tiny, "-", "-o", "a.h5", "--resume", input=PROMPT)
