"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in plain integers."""
import functools
import math

MASK = 0xFFFFFFFF


def philox(counter, key):
    """Four 32-bit words from counter (4 words) and key (2 words)."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ k0, right & MASK, (left >> 32) ^ d ^ k1, left & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return a, b, c, d


@functools.lru_cache(maxsize=None)
def words(seed, a, b, c, d):
    """The block of a 64-bit seed at counter (a, b, c, d)."""
    return philox((a, b, c, d), (seed & MASK, seed >> 32))


def normal(seed, a, b, c, d):
    """Box-Muller, cosine branch, from words 0 and 1."""
    u = [(w + 0.5) / 2**32 for w in words(seed, a, b, c, d)[:2]]
    return math.sqrt(-2 * math.log(u[0])) * math.cos(2 * math.pi * u[1])
