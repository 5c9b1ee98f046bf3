"""The tokenizer under test: tokenize_main.c, fed with GGUF files and tokenizer.json that are written here."""
import os
import subprocess
from pathlib import Path

import gguf

ROOT = Path(__file__).resolve().parent.parent.parent
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def build(folder, what="tokenize"):
    """tokenize_main or chat_main."""
    driver = folder / f"{what}_main"
    own = [str(p.relative_to(ROOT)) for p in ROOT.glob("tracer/*.c") if p.name.startswith(("tokenizer", "chat"))]
    sources = [f"tests/parity/{what}_main.c", *sorted(own),
               *(f"tracer/{name}.c" for name in ("gguf", "tensor", "dequant", "mapped", "json", "nfc")),
               *(f"base/{name}.c" for name in ("err", "mem", "text", "utf8"))]
    subprocess.run([os.environ.get("CC", "gcc"), "-std=c17", "-O2", "-D_GNU_SOURCE", "-I.", "-o", driver, *sources,
                    "-lpcre2-8", "-lxxhash", "-lcjson", "-lutf8proc", "-lm"], cwd=ROOT, check=True)
    return driver


def write_gguf(path, tokens, types, *, model="gpt2", pre=None, merges=None, scores=None, **flags):
    w = gguf.GGUFWriter(path, "llama")
    w.add_tokenizer_model(model)
    if pre:
        w.add_tokenizer_pre(pre)
    w.add_token_list(tokens)
    w.add_token_types(types)
    if merges is not None:
        w.add_token_merges([" ".join(m) for m in merges])
    if scores is not None:
        w.add_token_scores(scores)
    for key, value in flags.items():
        (w.add_bool if isinstance(value, bool) else w.add_uint32)("tokenizer.ggml." + key, value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def encode(driver, files, cases):
    records = b"".join(b"%d %d\n%s" % (len(text.encode()), special, text.encode()) for text, special in cases)
    done = subprocess.run([driver, *files], input=records, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{files}: {done.stderr.decode()}")
    lines = done.stdout.decode().split("\n")
    if len(lines) != len(cases) + 1:
        raise SystemExit(f"{files}: {len(lines) - 1} answers to {len(cases)} strings")
    return lines[:-1]


def compare(name, driver, files, cases, reference):
    """`reference(text, special)` gives the ids. Returns whether anything differs, and says how much."""
    bad = 0
    for (text, special), line in zip(cases, encode(driver, files, cases), strict=True):
        want = " ".join(map(str, reference(text, special)))
        if line == want:
            continue
        bad += 1
        if bad <= 3:
            at = next((i for i, (a, b) in enumerate(zip(want.split(), line.split())) if a != b), 0)
            shown = lambda s: " ".join(s.split()[max(0, at - 3):at + 9])
            print(f"{name}: {text[:200]!a} special={special}, from token {at - 3}\n  library {shown(want)}\n"
                  f"  ours    {shown(line)}")
    print(f"{name:32} {len(cases)} texts, {sum(len(t.encode()) for t, _ in cases)} bytes, {bad} differ", flush=True)
    return bad > 0
