"""Which models are known: what refusals say, `kvlag help models` and docs/models.md are the same lists."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from simcli import ROOT, kvlag, refused

CHAT = json.dumps([{"role": "user", "content": "x"}])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    subprocess.run([sys.executable, ROOT / "tests/tiny/make_gguf.py", path], check=True, capture_output=True)
    return path


def changed(tiny, old, new):
    """Makes a copy of the GGUF file in which some bytes stand for others."""

    def make(folder):
        raw = tiny.read_bytes()
        assert len(old) == len(new) and raw.count(old) >= 1
        (folder / "m.gguf").write_bytes(raw.replace(old, new, 1))
        return "m.gguf"

    return make


def folder_with(name, **facts):
    """Makes the tiny model's folder with facts of a JSON file replaced."""

    def make(folder):
        shutil.copytree(ROOT / "tests/tiny", folder / "m", ignore=shutil.ignore_patterns("__pycache__", "*.py"))
        path = folder / "m" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | facts))
        return "m"

    return make


def with_type(tiny, name, number):
    """Makes a copy of the GGUF file in which a matrix has another type: it stands behind name and dimensions."""

    def make(folder):
        raw = bytearray(tiny.read_bytes())
        at = raw.index(len(name).to_bytes(8, "little") + name) + 8 + len(name) + 4 + 2 * 8
        raw[at : at + 4] = number.to_bytes(4, "little")
        (folder / "m.gguf").write_bytes(raw)
        return "m.gguf"

    return make


def with_integers(folder):
    """The tiny model's folder, whose weights call themselves integers."""
    shutil.copytree(ROOT / "tests/tiny", folder / "m", ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    path = folder / "m/model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"dtype":"F16"', b'"dtype":"I16"'))
    return "m"


def key_and_text(key, text):
    return key + (8).to_bytes(4, "little") + len(text).to_bytes(8, "little") + text


@pytest.fixture
def kinds(tiny):
    """What is not known of each kind: how to make it, what names it, and where the list stands on the topic's page."""
    arch, pre, model = b"general.architecture", b"tokenizer.ggml.pre", b"tokenizer.ggml.model"
    return {
        "architectures": (changed(tiny, key_and_text(arch, b"llama"), key_and_text(arch, b"bloom")), "architecture 'bloom'"),
        "model_type of folders": (folder_with("config.json", model_type="bloom"), "model_type 'bloom'"),
        "RoPE scaling": (folder_with("config.json", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}), "RoPE type 'dynamic'"),
        "weights in GGUF": (with_type(tiny, b"blk.0.attn_q.weight", 25), "type I16"),
        "weights in safetensors": (with_integers, "type I16"),
        "tokenizers in GGUF": (changed(tiny, key_and_text(model, b"gpt2"), key_and_text(model, b"bert")), "tokenizer 'bert'"),
        "pre-tokenizers in GGUF": (changed(tiny, key_and_text(pre, b"gpt-2"), key_and_text(pre, b"falco")), "pre-tokenizer 'falco'"),
        "tokenizer.json": (folder_with("tokenizer.json", model={"type": "Unigram"}), "tokenizer model 'Unigram'"),
        "chat templates": (folder_with("tokenizer_config.json", chat_template="{{ messages }}"), "template '{{ messages }}...'"),
    }  # fmt: skip


def topic():
    """What `kvlag help models` sets off: the list of each kind."""
    lists, kind = {}, None
    for line in kvlag("help", "models").stdout.decode().splitlines():
        if found := re.match(r"  (\S.*?) {2,}(\S.*)", line):
            kind = found[1]
            lists[kind] = found[2]
        elif re.match(r" {20,}\S", line):
            lists[kind] += " " + line.strip()
    return {kind: words.split(", ") for kind, words in lists.items()}


def words_of(message):
    """The list in a refusal: in parentheses, with commas or "and" between."""
    inside = re.search(r"\((?:supported: |these are: |those of type )?([^()]*?)(?: are)?\)$", message.strip())[1]
    return inside.replace(" and ", ", ").split(", ")


KINDS = ["architectures", "model_type of folders", "RoPE scaling", "weights in GGUF", "weights in safetensors",
         "tokenizers in GGUF", "pre-tokenizers in GGUF", "tokenizer.json", "chat templates"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_known_is_refused_with_what_is(kinds, tmp_path, kind):
    make, names = kinds[kind]
    model = make(tmp_path)
    (tmp_path / "t.txt").write_text(CHAT)
    options = ["--chat"] if kind == "chat templates" else []
    refused(tmp_path, 1, names, "trace", model, "t.txt", "-o", "x.h5", "-q", *options)
    message = kvlag("trace", model, "t.txt", "-o", "x.h5", "-q", *options, cwd=tmp_path).stderr.decode()
    listed = words_of(message)
    assert sorted(topic()[kind]) == sorted(word for word in listed if word != "default"), message


def test_weights_that_a_config_promises(tmp_path):
    """The tiny model's logits are tied to its embedding: a config that says otherwise wants weights that are not there."""
    model = folder_with("config.json", tie_word_embeddings=False)(tmp_path)
    (tmp_path / "t.txt").write_text(CHAT)
    refused(tmp_path, 1, "m: tensor 'lm_head.weight' is missing (m/config.json says that it is not tied", "trace", model, "t.txt",
            "-o", "x.h5", "-q")  # fmt: skip


def test_the_document_has_every_word_of_the_topic():
    text = re.sub(r"\s+", " ", (ROOT / "docs/models.md").read_text())
    lists = topic()
    assert set(lists) == set(KINDS)
    missing = [word for words in lists.values() for word in words if not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text)]
    assert not missing
