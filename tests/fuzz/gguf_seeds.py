"""Write the seeds of fuzz_gguf into tests/fuzz/corpus/gguf: small valid files that between them hold every value kind
and every supported tensor type."""

import os
import struct
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tiny"))
import make_gguf as g  # noqa: E402

g.NUMBER.update({0: "<B", 3: "<h", 11: "<q", 12: "<d"})
UINT8, INT16, INT64, FLOAT64 = 0, 3, 11, 12

KEYS = [
    ("general.architecture", g.STRING, "llama"),
    ("u8", UINT8, 7),
    ("i16", INT16, -3),
    ("i64", INT64, 2**40),
    ("f32", g.FLOAT32, 0.5),
    ("f64", FLOAT64, 1e-5),
    ("yes", g.BOOL, True),
    ("words", g.ARRAY, (g.STRING, ["one", "", "three"])),
    ("kinds", g.ARRAY, (UINT8, [1, 3])),
    ("scores", g.ARRAY, (g.FLOAT32, [1.5, -2.0])),
    ("nested", g.ARRAY, (g.ARRAY, [(UINT8, [1, 2]), (g.STRING, ["x"])])),
]

# Number, values and bytes of a block; what is in them does not matter.
RAW = {
    "q5_0": (6, 32, 22), "q5_1": (7, 32, 24), "q2_k": (10, 256, 84), "q3_k": (11, 256, 110), "q4_k": (12, 256, 144),
    "q5_k": (13, 256, 176), "q6_k": (14, 256, 210), "iq4_nl": (20, 32, 18), "iq4_xs": (23, 256, 136),
    "mxfp4": (39, 32, 17),
}  # fmt: skip


def values(n):
    return struct.pack(f"<{n}e", *((i * 7 % 32 - 16) / 8 for i in range(n)))


def tensor(name, kind, dims):
    n = 1
    for d in dims:
        n *= d
    return name, g.TYPES[kind][0], dims, g.TYPES[kind][2](values(n))


def raw_tensor(kind):
    number, block, size = RAW[kind]
    return kind, number, [block, 2], bytes(i * 37 % 256 for i in range(2 * size))


def main():
    folder = os.path.join(HERE, "corpus", "gguf")
    os.makedirs(folder, exist_ok=True)
    files = {
        "keys.gguf": g.gguf_bytes(KEYS, [], 3),
        "plain.gguf": g.gguf_bytes(
            [("general.alignment", g.UINT32, 32)],
            [tensor("a", "f32", [4, 2]), tensor("b", "f16", [3, 2, 2]), tensor("c", "bf16", [2, 1, 1, 2])],
            2,
        ),
        "blocks.gguf": g.gguf_bytes(
            KEYS[:1], [tensor(kind, kind, [32, 2]) for kind in ("q8_0", "q4_0", "q4_1")], 3
        ),
        "raw.gguf": g.gguf_bytes([], [raw_tensor(kind) for kind in RAW], 3),
        "shard.gguf": g.gguf_bytes([("split.no", g.UINT16, 0), ("split.count", g.UINT16, 2)], [], 3),
    }
    for name, data in files.items():
        g.write(os.path.join(folder, name), data)


if __name__ == "__main__":
    main()
