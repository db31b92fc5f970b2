"""Choosing tokens from logits.

Every function works on rows; what it gives for a row depends on that row alone, bit for bit, so
that the composition of a batch cannot change a request's tokens.
"""

from __future__ import annotations

from kernels.sampling.reference import (
    apply_penalties,
    greedy,
    philox_uniform,
    sample,
    token_logprobs,
)

__all__ = ["apply_penalties", "greedy", "philox_uniform", "sample", "token_logprobs"]
