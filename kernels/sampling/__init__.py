"""Choosing tokens from logits.

Every function works on rows; what it gives for a row depends on that row alone, bit for bit, so
that the composition of a batch cannot change a request's tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels import backend
from kernels.sampling import chosen, reference
from kernels.sampling.reference import apply_penalties, philox_uniform
from kernels.sampling.settings import RowSettings

if TYPE_CHECKING:
    from kernels.sampling.launch import Scratch

# Legend: R rows, V vocabulary, K length of a top list.

__all__ = [
    "RowSettings",
    "apply_penalties",
    "choose",
    "greedy",
    "philox_uniform",
    "sample",
    "token_logprobs",
]


def choose(
    logits_RV: torch.Tensor,
    settings: RowSettings,
    *,
    out: torch.Tensor | None = None,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """The token of each row, int64 [R], by its own settings on the device.

    logits [R, V] of any float type, V < 2^18. In this order: bias is added, banned tokens are
    taken out, penalties, the mask (where it leaves nothing, what it allows gets logit 0); then the
    most likely token at temperature 0, or `sample` with the row's top-k, top-p, min-p and random
    number. Of equal logits at the end of top-k the lowest ids stay.

    On a GPU: three launches that can be captured, with `out` and `scratch` (see launch.Scratch)
    given or from the graph's pool. Weights are rounded to 2^-24 of themselves there, and a token
    below e^-32 of the likeliest has none.
    """
    if not backend.uses_triton(logits_RV):
        tokens_R = chosen.choose(logits_RV, settings)
        return tokens_R if out is None else out.copy_(tokens_R)
    from kernels.sampling import launch

    return launch.choose(logits_RV, settings, out_R=out, scratch=scratch)


def greedy(logits_RV: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, int64 [R]; the lowest id among equals."""
    if not backend.uses_triton(logits_RV):
        return reference.greedy(logits_RV)
    from kernels.sampling import launch

    return launch.greedy(logits_RV)


def sample(
    logits_RV: torch.Tensor,
    top_k: int,
    temperature_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    uniform_R: torch.Tensor,
) -> torch.Tensor:
    """A token of each row, int64 [R], by inversion of the distribution at `uniform_R`.

    See `reference.sample`. On a GPU the parameters are rounded to fp32.
    """
    arguments = (logits_RV, top_k, temperature_R, top_p_R, min_p_R, uniform_R)
    if not backend.uses_triton(logits_RV):
        return reference.sample(*arguments)
    from kernels.sampling import launch

    return launch.sample(*arguments)


def token_logprobs(
    logits_RV: torch.Tensor, tokens_R: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities under softmax of unmodified logits.

    Returns of the given tokens: log-probability float32 [R] and rank int64 [R] (1 plus the number
    of more likely tokens); of the `top` most likely: ids int64 [R, K] and log-probabilities
    float32 [R, K], K = min(top, V), ordered as in `sample`. On a GPU lists beyond
    launch.MOST_TOP are sorted by the library.
    """
    if not backend.uses_triton(logits_RV):
        return reference.token_logprobs(logits_RV, tokens_R, top)
    from kernels.sampling import launch

    if top > launch.MOST_TOP:
        return reference.token_logprobs(logits_RV, tokens_R, top)
    return launch.token_logprobs(logits_RV, tokens_R, top)
