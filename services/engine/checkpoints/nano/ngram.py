"""Hash constants and table of the n-gram embedding (formulas: the family's public description)."""

from __future__ import annotations

from itertools import count, islice
from math import isqrt

import torch
from torch import nn

from services.engine.checkpoints.nano.config import NanoConfig

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    """The splitmix64 step."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def multipliers(vocab_size: int, ngram_size: int, seed: int) -> list[int]:
    """Return the odd multipliers of the first n-gram layer."""
    half = (((1 << 63) - 1) // vocab_size) // 2
    return [2 * (_mix((seed + _GAMMA * (i + 1)) & _MASK) % half) + 1 for i in range(ngram_size)]


def head_sizes(base: int, heads: int) -> list[int]:
    """Return the `heads` smallest primes that are at least `base`."""
    primes = (n for n in count(base) if n > 1 and all(n % d for d in range(2, isqrt(n) + 1)))
    return list(islice(primes, heads))


class NgramEmbedding(nn.Module):
    """The table and the integer constants that the checkpoint stores beside it."""

    layer_multipliers: torch.Tensor
    ngram_heads_vocab_sizes: torch.Tensor
    ngram_heads_offsets: torch.Tensor

    def __init__(self, cfg: NanoConfig) -> None:
        super().__init__()
        heads = (cfg.ngram_size - 1) * cfg.heads_per_ngram
        sizes = head_sizes(cfg.ngram_vocab_size_base, heads)
        offsets = [sum(sizes[:i]) for i in range(heads)]
        rows = -(-sum(sizes) // cfg.ngram_divisor) * cfg.ngram_divisor
        hashes = multipliers(cfg.vocab_size, cfg.ngram_size, cfg.ngram_seed)
        self.register_buffer("layer_multipliers", torch.tensor(hashes))
        self.register_buffer("ngram_heads_vocab_sizes", torch.tensor(sizes))
        self.register_buffer("ngram_heads_offsets", torch.tensor(offsets))
        self.ngram_embedding = nn.Embedding(rows, cfg.ple_embed_dim // heads)
        nn.init.normal_(self.ngram_embedding.weight, std=0.3)
