"""Every block type of weights against the gguf package, bit by bit, on random bytes: once with scales of ordinary size,
once with whatever the bytes say, infinities and NaN included (a NaN is a NaN, whatever its payload). Then every tensor of
the GGUF files that are named."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

DUMP = Path(os.environ.get("BUILD", "build/gcc-release")) / "tests/parity/dump_blocks"
N_BLOCKS = 4096
# Where the f16 scales of a block lie.
HALVES = {
    "F16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip


def ordinary(name, blocks, rng):
    """Blocks whose scales are of at most 1 or so, subnormal ones among them."""
    blocks = blocks.copy()
    n = len(blocks)
    for at in HALVES.get(name, []):
        scale = rng.uniform(-1, 1, n) * 2.0 ** rng.integers(-20, 1, n)
        blocks[:, at : at + 2] = scale.astype("<f2").view(np.uint8).reshape(n, 2)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(0, 140, n)
    if name in ("F32", "BF16"):
        value = rng.uniform(-1, 1, n).astype("<f4").view(np.uint8).reshape(n, 4)
        blocks[:] = value[:, 4 - blocks.shape[1] :]
    return blocks


def ours(name, blocks, folder):
    source, result = folder / "in", folder / "out"
    source.write_bytes(blocks.tobytes())
    subprocess.run([DUMP, name, source, result], check=True)
    return np.fromfile(result, "<f4")


def theirs(name, blocks):
    kind = gguf.GGMLQuantizationType[name]
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, kind).astype(np.float32).ravel()


def differing(got, want):
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    return int((~same).sum())


def compare(name, folder, rng):
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    any_bytes = rng.integers(0, 256, (N_BLOCKS * 32 // min(block, 32), size), dtype=np.uint8)
    some = ordinary(name, any_bytes, rng)
    got, want = ours(name, some, folder), theirs(name, some)
    assert got.size == want.size == len(some) * block and np.isfinite(want).all()
    assert np.unique(want).size > 100, f"{name}: the blocks say too little"
    bad = differing(got, want)
    worst = differing(ours(name, any_bytes, folder), theirs(name, any_bytes))
    print(f"{name:7} {got.size} values: {bad} differ; of any bytes {worst}")
    return bad + worst


def compare_file(path, folder):
    sizes, bad = {}, 0
    for t in gguf.GGUFReader(path).tensors:
        name = t.tensor_type.name
        got, want = ours(name, t.data, folder), theirs(name, t.data)
        assert got.size == want.size == t.n_elements
        sizes[name] = sizes.get(name, 0) + got.size
        bad += differing(got, want)
    listed = ", ".join(f"{n / 1e6:.1f} M of {name}" for name, n in sizes.items())
    print(f"{os.path.basename(path)}: {listed}: {bad} values differ")
    return bad


def main():
    names = subprocess.run([DUMP], check=True, capture_output=True, text=True).stdout.strip().split(", ")
    rng = np.random.default_rng(9)
    with tempfile.TemporaryDirectory() as folder:
        bad = sum(compare(name, Path(folder), rng) for name in names)
        bad += sum(compare_file(path, Path(folder)) for path in sys.argv[1:])
    print(f"blocks: {len(names)} types, {bad} values differ from gguf's")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
