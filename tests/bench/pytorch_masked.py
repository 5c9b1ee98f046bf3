"""What one would do without kvlag: rerun a model in PyTorch with a mask for every configuration.

transformers' LlamaForCausalLM in f32 on the same weights and tokens, with masks [kv heads, T, T] a layer made from
lifetimes that `kvlag sim --lifetimes` wrote. Left out, which favours PyTorch: finding the lifetimes, making the masks,
and what the logits are then used for.
"""

import os
import sys
import time

import h5py
import hdf5plugin  # noqa: F401  (registers the zstd filter)
import numpy as np
import torch
from transformers import AttentionInterface

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../parity"))
from masked import lifetimes, masked_attention  # noqa: E402


def prepare(model):
    AttentionInterface.register("kvlag_masked", masked_attention)
    model.set_attn_implementation("kvlag_masked")


def masks(path):
    """Of each configuration in a lifetimes file, one after another: bool [n_layer][n_kv_head][T][T]."""
    for _, evict_at in lifetimes(path):
        step, entry = np.arange(evict_at.shape[2])[:, None], np.arange(evict_at.shape[2])[None]
        yield torch.from_numpy((entry <= step) & (step < evict_at[:, :, None, :]))


def tokens_of(trace):
    with h5py.File(trace) as f:
        return torch.from_numpy(f["seq/0000/tokens"][:].astype(np.int64))


@torch.no_grad()
def rerun(model, tokens, visible):
    """Seconds of one pass, and of processor time."""
    start, used = time.perf_counter(), time.process_time()
    model(tokens[None], use_cache=False, visible=visible)
    return time.perf_counter() - start, time.process_time() - used
