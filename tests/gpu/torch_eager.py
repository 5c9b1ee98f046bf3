"""A Llama in plain PyTorch modules, eager, its attention probabilities materialised and brought to the host as f16:
`torch_eager.py [--tokens N,N] [--precision f32,bf16] ...` prints a line "PRECISION TOKENS SECONDS SECONDS_WITHOUT_COPY"
for each: the least of some runs. Weights are random: only time is of interest. f32 means f32, without TF32.

It does what output_attentions does and less than a trace: nothing is compressed and no file is written, and a layer's
probabilities leave the device before the next layer's are made."""

import argparse
import time

import torch
from torch import nn

TOPK = 32


class Norm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def turn(x, cosine, sine):
    """RoPE on the two halves of each head."""
    a, b = x.chunk(2, -1)
    return x * cosine + torch.cat((-b, a), -1) * sine


class Layer(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.heads, self.kv_heads, self.dim = o.heads, o.kv_heads, o.embd // o.heads
        self.attention_norm, self.feed_norm = Norm(o.embd), Norm(o.embd)
        self.q = nn.Linear(o.embd, o.heads * self.dim, bias=False)
        self.k = nn.Linear(o.embd, o.kv_heads * self.dim, bias=False)
        self.v = nn.Linear(o.embd, o.kv_heads * self.dim, bias=False)
        self.o = nn.Linear(o.heads * self.dim, o.embd, bias=False)
        self.gate = nn.Linear(o.embd, o.ff, bias=False)
        self.up = nn.Linear(o.embd, o.ff, bias=False)
        self.down = nn.Linear(o.ff, o.embd, bias=False)

    def attend(self, x, cosine, sine, mask):
        T, group = x.shape[0], self.heads // self.kv_heads
        q = turn(self.q(x).view(T, self.heads, self.dim).transpose(0, 1), cosine, sine)
        k = turn(self.k(x).view(T, self.kv_heads, self.dim).transpose(0, 1), cosine, sine)
        v = self.v(x).view(T, self.kv_heads, self.dim).transpose(0, 1)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) * self.dim**-0.5 + mask
        p = torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype)
        return self.o((p @ v).transpose(0, 1).reshape(T, -1)), p

    def forward(self, x, cosine, sine, mask):
        mix, p = self.attend(self.attention_norm(x), cosine, sine, mask)
        x = x + mix
        y = self.feed_norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y)), p


class Model(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.dim = o.embd // o.heads
        self.embedding = nn.Embedding(o.vocab, o.embd)
        self.layers = nn.ModuleList(Layer(o) for _ in range(o.layers))
        self.norm = Norm(o.embd)

    def forward(self, tokens, take):
        """Predictions as a trace keeps them, on the host; take(probabilities [heads, T, T]) of every layer."""
        x, T = self.embedding(tokens), len(tokens)
        turns = 500000.0 ** (-torch.arange(0, self.dim, 2, device=x.device) / self.dim)
        angle = torch.arange(T, device=x.device)[:, None] * turns.repeat(2)
        cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        mask = torch.full((T, T), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
        for layer in self.layers:
            x, p = layer(x, cosine, sine, mask)
            take(p)
        logprob = torch.log_softmax((self.norm(x) @ self.embedding.weight.T).float(), -1)
        top = torch.topk(logprob, min(TOPK, logprob.shape[1]))
        entropy = -(logprob.exp() * logprob).sum(-1)
        return [y.cpu() for y in (logprob[:-1].gather(1, tokens[1:, None]), entropy, *top)]


def seconds_of(model, tokens, take, repeats):
    model(tokens, take)  # warms up
    least = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        model(tokens, take)  # its predictions are on the host when it returns, so the device is done
        least = min(least, time.perf_counter() - start)
    return least


def model_of(options, device):
    with torch.device(device):
        model = Model(options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        if "norm" not in name:
            parameter.normal_(0, 0.02)
    return model


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="f32,bf16")
    parser.add_argument("--tokens", default="1024,2048")
    for name, default in [("layers", 16), ("embd", 2048), ("heads", 32), ("kv-heads", 8), ("ff", 8192), ("vocab", 1024),
                          ("repeats", 2)]:  # fmt: skip
        parser.add_argument("--" + name, type=int, default=default)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = model_of(options, options.device)
    for precision in options.precision.split(","):
        model.to(torch.bfloat16 if precision == "bf16" else torch.float32)
        for n in map(int, options.tokens.split(",")):
            tokens = torch.randint(options.vocab, (n,), device=options.device)
            copied = seconds_of(model, tokens, lambda p: p.half().cpu(), options.repeats)
            kept = seconds_of(model, tokens, lambda p: None, options.repeats)
            print(precision, n, f"{copied:.4f} {kept:.4f}", flush=True)


main()
