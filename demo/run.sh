#!/bin/sh
# The whole road once: trace a text with a real model, replay the default sweep, draw. Nothing that is there and newer
# than ./kvlag is made again.
set -eu
out=out/demo
model=models/SmolLM2-135M-Instruct.Q4_1.gguf
mkdir -p "$out"

stale() { [ ! -e "$1" ] || [ kvlag -nt "$1" ]; }

if [ ! -e "$model" ] && ! make --no-print-directory model >"$out/model.log" 2>&1; then
    echo "The model's weights cannot be had here (see $out/model.log): running from the bundled sample trace."
fi
if [ -e "$model" ]; then
    trace=$out/trace.h5
    if stale "$trace"; then
        ./kvlag trace "$model" demo/genesis.txt -o "$trace" --tokens 1024 --attention factored --force
    fi
else
    trace=traces/samples/tiny-recall.h5
fi
if stale "$out/results.csv"; then
    ./kvlag sim "$trace" -o "$out/results.csv" --lifetimes "$out/lifetimes.h5" --force
fi
if stale "$out/table.txt"; then
    ./kvlag analyze "$out/results.csv" -o "$out" --lifetimes "$out/lifetimes.h5" --trace "$trace" --format png,svg --force \
        >"$out/table.tmp"
    mv "$out/table.tmp" "$out/table.txt"
fi
cat "$out/table.txt"
echo
echo "Report: $out/report.html   Results: $out/results.csv   Figures: $(ls "$out"/*.png | tr '\n' ' ')"
