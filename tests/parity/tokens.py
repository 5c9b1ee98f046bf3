#!/usr/bin/env python3
"""Compares tracer/tokenizer*.c with the `tokenizers` and `sentencepiece` libraries.

Usage: .venv-parity/bin/python tests/parity/tokens.py [--check] [--only bytes|pieces|json] [--random N] [--bytes N]
                                                      [--seed N] [--model FILE.gguf] [--gemma FILE.gguf]

Without --check: writes fixtures/cross.json, tokens.txt and tokens_VOCABULARY_PRE.ids, which tests/unit/test_tokenizer.c
reads. With --check: computes the ids anew and compares with the files. Either way every tokenizer is written as GGUF and
as tokenizer.json, as far as these can say it, and N random strings and some mebibytes of text go through both readers
(tokenize_main.c, built here) and through the library. Exit 1 on any difference.
"""
import argparse
import sys
import tempfile
from pathlib import Path

import token_driver
import tokens_bytes
import tokens_json
import tokens_pieces

PARTS = {"bytes": tokens_bytes.run, "pieces": tokens_pieces.run, "json": tokens_json.run}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--check", action="store_true", help="compare with the fixtures instead of writing them")
    p.add_argument("--only", choices=PARTS)
    p.add_argument("--random", type=int, default=2000, metavar="N", help="random strings per combination")
    p.add_argument("--bytes", type=int, default=1 << 20, metavar="N", help="bytes of mixed text per combination")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--model", default=token_driver.ROOT / "models/SmolLM2-135M-Instruct.Q4_1.gguf")
    p.add_argument("--gemma", default=token_driver.ROOT / "models/gemma-3-270m-q4_k_m.gguf")
    args = p.parse_args()
    bad = False
    with tempfile.TemporaryDirectory() as folder:
        driver = token_driver.build(Path(folder))
        for name, run in PARTS.items():
            if args.only in (None, name):
                bad |= run(args, driver, Path(folder))
    return bad


if __name__ == "__main__":
    sys.exit(main())
