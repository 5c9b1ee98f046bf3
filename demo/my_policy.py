"""A policy of your own: keep the first four entries and, of the others, every second one after it is 32 steps old.

Usage: my_policy.py TRACE.h5 LIFETIMES.h5
"""
import sys

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np

with h5py.File(sys.argv[1]) as trace:
    layers, kv_heads = int(trace.attrs["n_layer"]), int(trace.attrs["n_kv_head"])
    tokens = int(trace["seq/0000"].attrs["n_tokens"])

i = np.arange(tokens)
evict_at = np.where((i < 4) | (i % 2 == 0), tokens + 1, np.minimum(i + 32, tokens + 1))

with h5py.File(sys.argv[2], "w") as f:
    f.attrs.update(format="kvlag-lifetimes", version=1)
    config = f.create_group("config/0000")
    config.attrs.update(policy="mine", spec="every-second")
    config.create_group("seq/0000")["evict_at"] = np.broadcast_to(evict_at, (layers, kv_heads, tokens)).astype("i4")
