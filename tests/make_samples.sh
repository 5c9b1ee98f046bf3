#!/bin/sh
# Rewrite traces/samples: small traces of the tiny trained model (tests/tiny), for tests, goldens and `make demo` without
# weights. `scripture` holds both forms of attention, `recall` the factored one.
set -eu
cd "$(dirname "$0")/.."
python3 tests/tiny/make_recall.py 2600 >traces/samples/recall.txt
./kvlag trace build/tiny.gguf demo/genesis.txt -o traces/samples/tiny-scripture.h5 --tokens 192 --attention both --force -q
./kvlag trace build/tiny.gguf traces/samples/recall.txt -o traces/samples/tiny-recall.h5 --tokens 384 --attention factored --force -q
ls -l traces/samples
