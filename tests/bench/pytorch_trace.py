"""The trace that one would write in Python: transformers' LlamaForCausalLM, eager attention, f32, h5py and hdf5plugin.

`pytorch_trace.py MODEL.gguf TRACE.h5 OUT.h5` does again in OUT.h5 what is in TRACE.h5, made by `kvlag trace --attention
dense` or `factored`, and says how long it took. Same weights, token ids, datasets, chunks, shuffle and zstd level. Left
out, which favours PyTorch: attn/lse, attn/row_sum, the text, checksums and the content hash.
"""

import os
import sys
import time
from unittest import mock

import h5py
import hdf5plugin
import numpy as np
import torch
from transformers.models.llama import modeling_llama

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../parity"))
from logits import model_from_gguf  # noqa: E402

TILE, TOPK = 256, 32
LEFT_OUT = {"seq/0000/attn/lse", "seq/0000/attn/row_sum", "seq/0000/pieces", "seq/0000/piece_offset"}


def new_dataset(f, name, dtype, shape, chunks):
    return f.create_dataset(
        name, shape, dtype, chunks=chunks, shuffle=True, compression=hdf5plugin.Zstd(clevel=1), track_times=False
    )


def put(f, name, values, chunks=None):
    new_dataset(f, name, values.dtype, values.shape, chunks or values.shape)[...] = values


def put_heads(f, name, layers):
    """q, k or v of every layer, [heads, T, dim] each."""
    heads, T, dim = layers[0].shape
    out = new_dataset(f, name, np.float16, (len(layers), heads, T, dim), (1, 1, min(TILE, T), dim))
    for n, layer in enumerate(layers):
        out[n] = layer.half().numpy()  # h5py may convert f32 to f16 wrongly: see FORMAT.md


def put_probs(f, name, layers):
    """[heads, T, T] of every layer, without the tiles above the diagonal."""
    heads, T, _ = layers[0].shape
    tile = min(TILE, T)
    out = new_dataset(f, name, np.float16, (len(layers), heads, T, T), (1, 1, tile, tile))
    for n, layer in enumerate(layers):
        values = layer.half().numpy()
        for row in range(0, T, tile):
            end = min(row + tile, T)
            out[n, :, row:end, :end] = values[:, row:end, :end]


def put_logits(f, logits, tokens):
    logprob = torch.log_softmax(logits, -1)
    top = torch.topk(logprob, TOPK)
    put(f, "logits/target_logprob", logprob[:-1].gather(1, tokens[1:, None])[:, 0].numpy())
    put(f, "logits/correct", (top.indices[:-1, 0] == tokens[1:]).to(torch.uint8).numpy())
    put(f, "logits/entropy", -(logprob.exp() * logprob).sum(-1)[:-1].numpy())
    put(f, "logits/topk_id", top.indices.int().numpy())
    put(f, "logits/topk_logprob", top.values.numpy())


def put_model(f, model):
    layers = model.model.layers
    wo = layers[0].self_attn.o_proj.weight.T.shape
    out = new_dataset(f, "model/wo", np.float16, (len(layers), *wo), (1, *wo))
    for n, layer in enumerate(layers):
        out[n] = layer.self_attn.o_proj.weight.T.half().numpy()


def forward(model, tokens, dense):
    """Logits [T, n_vocab], and per layer the attention [heads, T, T], or (q, k, v) after RoPE."""
    eager, kept = modeling_llama.eager_attention_forward, []

    def keep(module, q, k, v, *rest, **more):
        kept.append((q[0], k[0], v[0]))
        return eager(module, q, k, v, *rest, **more)

    with mock.patch.object(modeling_llama, "eager_attention_forward", eager if dense else keep):
        out = model(tokens[None], use_cache=False, output_attentions=dense)
    return out.logits[0], [a[0] for a in out.attentions] if dense else kept


@torch.no_grad()
def write_trace(model, tokens, path, dense):
    """Run the model and write. Returns seconds until the file is synced, and those of processor time."""
    start, used = time.perf_counter(), time.process_time()
    with h5py.File(path, "w") as f:
        put_model(f, model)
        seq = f.create_group("seq/0000")
        put(seq, "tokens", tokens.int().numpy())
        logits, layers = forward(model, tokens, dense)
        if dense:
            put_probs(seq, "attn/probs", layers)
        else:
            for n, name in enumerate("qkv"):
                put_heads(seq, "attn/" + name, [layer[n] for layer in layers])
        put_logits(seq, logits, tokens)
    with open(path, "rb") as f:
        os.fsync(f.fileno())
    return time.perf_counter() - start, time.process_time() - used


def put_gradients(f, name, layers):
    """Of one label set: [heads, T, dim] of every layer, as f16 with a scale a row."""
    heads, T, dim = layers[0].shape
    out = new_dataset(f, name, np.float16, (len(layers), heads, T, dim), (1, 1, min(TILE, T), dim))
    scales = torch.stack([layer.abs().amax(-1) for layer in layers])
    for n, layer in enumerate(layers):
        out[n] = (layer / scales[n].clamp_min(1e-30)[..., None]).half().numpy()
    put(f, name + "_scale", scales.numpy(), (1, 1, T))


def write_gradients(model, tokens, ours, path):
    """What `kvlag trace --gradients fisher:1` writes: q, k, v and the gradients of every head's output, by autograd, for
    the text's labels and for those that ours drew. Costs as write_trace."""
    with h5py.File(ours) as f:
        drawn = torch.from_numpy(f["seq/0000/grad/fisher_label"][0].astype(np.int64))
    start, used = time.perf_counter(), time.process_time()
    outputs, kept = [], []
    eager = modeling_llama.eager_attention_forward

    def keep(module, q, k, v, *rest, **more):
        o, weights = eager(module, q, k, v, *rest, **more)
        kept.append((q.detach()[0], k.detach()[0], v.detach()[0]))
        outputs.append(o)
        return o, weights

    model.requires_grad_(False)
    embedded = model.model.embed_tokens(tokens[None]).requires_grad_()
    with mock.patch.object(modeling_llama, "eager_attention_forward", keep), torch.enable_grad():
        logits = model(inputs_embeds=embedded, use_cache=False).logits[0]
    losses = [torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum") for labels in (tokens[1:], drawn)]
    with h5py.File(path, "w") as f:
        put_model(f, model)
        seq = f.create_group("seq/0000")
        put(seq, "tokens", tokens.int().numpy())
        for n, name in enumerate("qkv"):
            put_heads(seq, "attn/" + name, [layer[n] for layer in kept])
        put_logits(seq, logits.detach(), tokens)
        for name, loss in zip(("grad/loss", "grad/fisher"), losses):
            found = torch.autograd.grad(loss, outputs, retain_graph=name == "grad/loss")
            put_gradients(seq, name, [g[0].transpose(0, 1) for g in found])
    with open(path, "rb") as f:
        os.fsync(f.fileno())
    return time.perf_counter() - start, time.process_time() - used


def last_layer(f, name):
    """A dataset's last layer, or all of it. Where f keeps a RoPE pair as neighbours, as GGUF's Llamas do, it is put as
    transformers has it, in the two halves of the head."""
    values = f[name][-1 if f[name].ndim > 2 else slice(None)].astype(float)
    if name.endswith(("attn/q", "attn/k")) and "interleaved" in f.attrs.get("rope", ""):
        values = np.concatenate([values[..., ::2], values[..., 1::2]], -1)
    return values


def differences(ours, theirs):
    """What makes the two files incomparable, as texts: datasets, shapes, chunks, the values of the last layer."""
    found, names = [], [set(), set()]
    with h5py.File(ours) as a, h5py.File(theirs) as b:
        for f, n in zip((a, b), names):
            f.visititems(lambda name, o: n.add(name) if isinstance(o, h5py.Dataset) else None)
        found += [f"{name} is in one file only" for name in (names[0] ^ names[1]) - LEFT_OUT]
        for name in names[0] & names[1]:
            x, y = a[name], b[name]
            if (x.shape, x.dtype, x.chunks) != (y.shape, y.dtype, y.chunks):
                found.append(f"{name}: {x.shape} {x.dtype} {x.chunks} against {y.shape} {y.dtype} {y.chunks}")
            elif np.mean(~np.isclose(last_layer(a, name), last_layer(b, name), rtol=1e-2, atol=1e-2)) > 1e-2:
                found.append(f"{name}: other values")  # single ones may differ: near ties change places in topk_id
    return found


def tokens_of(trace):
    with h5py.File(trace) as f:
        return torch.from_numpy(f["seq/0000/tokens"][:].astype(np.int64))


def main(model, trace, out):
    with h5py.File(trace) as f:
        dense = "seq/0000/attn/probs" in f
    tokens = tokens_of(trace)
    seconds, _ = write_trace(model_from_gguf(model), tokens, out, dense)
    print(f"{len(tokens)} tokens, {'dense' if dense else 'factored'}: {seconds:.2f} s, forward pass and writing")
    found = differences(trace, out)
    print("\n".join(found) or "same datasets")
    return 1 if found else 0


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
