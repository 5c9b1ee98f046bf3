"""Write the seeds of fuzz_safetensors into tests/fuzz/corpus/safetensors: small valid files, an index, and a few that
are refused late."""

import json
import os
import struct

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "corpus", "safetensors")
BITS = {"F32": 32, "F16": 16, "BF16": 16, "F64": 64, "I64": 64, "BOOL": 8, "F8_E4M3": 8, "F4": 4}


def file_of(*tensors, metadata=None, pad=0):
    header, at = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for name, dtype, shape in tensors:
        n = 1
        for d in shape:
            n *= d
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n * BITS[dtype] // 8]}
        at += n * BITS[dtype] // 8
    words = json.dumps(header, separators=(",", ":")).encode() + b" " * pad
    return struct.pack("<Q", len(words)) + words + bytes(i * 7 % 256 for i in range(at))


def index_of(weight_map):
    return json.dumps({"metadata": {"total_size": 4}, "weight_map": weight_map}).encode()


def main():
    os.makedirs(FOLDER, exist_ok=True)
    files = {
        "plain": file_of(("a.weight", "F32", [2, 3]), ("b", "F16", [4]), ("c", "BF16", [2, 1, 1, 2]),
                         metadata={"format": "pt"}, pad=3),
        "others": file_of(("mask", "BOOL", [2, 2]), ("n", "I64", [1]), ("x", "F4", [2, 2]), ("y", "F8_E4M3", [3]),
                          ("z", "F64", [])),
        "deep": file_of(("conv", "F16", [2, 1, 3, 1, 2])),
        "empty": file_of(),
        "escaped": file_of(("a\\u0041\n\u00e9", "F16", [1])),
        "twice": file_of(("a", "F16", [1]), ("b", "F16", [1])).replace(b'"b"', b'"a"'),
        "gap": file_of(("a", "F16", [2]), ("b", "F16", [2])).replace(b"[4,8]", b"[5,8]"),
        "index": index_of({"a": "a.safetensors", "b": "b.safetensors"}),
        "index_outside": index_of({"a": "../a.safetensors"}),
        "index_other": index_of({"a": "a.safetensors", "c": "b.safetensors"}),
    }  # fmt: skip
    for name, data in files.items():
        with open(os.path.join(FOLDER, name), "wb") as f:
            f.write(data)


if __name__ == "__main__":
    main()
