"""Plain torch definition of the sampling operations.

Legend: R rows, V vocabulary, K length of a top list.

Rows are independent: operations on several rows at once are exact (comparisons, sorting, one
multiplication or addition per value) or run along a row in order (running sums). Exponentials and
logarithms, of which a CPU computes the ends of an array by other instructions than the rest, take
one row at a time there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox_uniform(seeds_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64 [R], a pure function of seed and position.

    Seeds (all 64 bits) and positions are int64 [R]. Philox4x32-10 (Salmon et al., "Parallel random
    numbers: as easy as 1, 2, 3", 2011): key = seed, counter = position; the first two output words
    give 53 bits.
    """
    words = philox(_halves(seeds_R), (*_halves(positions_R), *(torch.zeros_like(seeds_R),) * 2))
    return ((words[0] >> 5) * (1 << 26) + (words[1] >> 6)).double() * 2.0**-53


def philox(
    key: tuple[torch.Tensor, torch.Tensor], counter: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Ten rounds of Philox4x32 over int64 tensors that hold 32-bit words."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x & _MASK, (x >> 32) & _MASK


def _multiply(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a 32 x 32 bit product, by halves so that int64 never overflows."""
    low = word * (factor & 0xFFFF)
    middle = word * (factor >> 16) + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def apply_penalties(
    logits_RV: torch.Tensor,
    seen_RV: torch.Tensor,
    counts_RV: torch.Tensor,
    presence_R: torch.Tensor,
    frequency_R: torch.Tensor,
    repetition_R: torch.Tensor,
) -> torch.Tensor:
    """Logits [R, V] with penalties, a new tensor of the same dtype.

    `seen_RV` bool: tokens of prompt or output, for the repetition penalty (Keskar et al., "CTRL",
    2019: positive logits are divided, negative ones multiplied). `counts_RV`: occurrences in the
    output, for presence and frequency, which are subtracted as the OpenAI API defines them.
    """
    repetition_RV = repetition_R[:, None].to(logits_RV.dtype)
    repeated_RV = torch.where(logits_RV > 0, logits_RV / repetition_RV, logits_RV * repetition_RV)
    out_RV = torch.where(seen_RV, repeated_RV, logits_RV)
    counts_RV = counts_RV.to(logits_RV.dtype)
    out_RV = out_RV - frequency_R[:, None].to(logits_RV.dtype) * counts_RV
    return out_RV - presence_R[:, None].to(logits_RV.dtype) * (counts_RV > 0)


def greedy(logits_RV: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, int64 [R]; the lowest id among equals."""
    ids_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    is_best_RV = logits_RV == logits_RV.amax(dim=1, keepdim=True)
    return torch.where(is_best_RV, ids_V, logits_RV.shape[1]).amin(dim=1)


def sample(
    logits_RV: torch.Tensor,
    top_k: int,
    temperature_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    uniform_R: torch.Tensor,
) -> torch.Tensor:
    """A token of each row, int64 [R], by inversion of the distribution at `uniform_R`.

    Order: temperature (> 0), top-k (0 is off; one for all rows, so that the work follows it), top-p
    over what top-k left, min-p relative to the most likely token. All of them keep a prefix of the
    tokens sorted by logit. Equal logits are ordered by id; which of them stay where top-k cuts
    between them is not specified. `uniform_R` float64 in [0, 1). Minus infinity bans a token; each
    row has a finite logit.
    """
    scaled_RV = logits_RV.float() / temperature_R[:, None].float()
    sorted_RC, ids_RC = _candidates(scaled_RV, top_k)  # C candidates
    weights_RC = _row_by_row(torch.exp, sorted_RC.double() - sorted_RC[:, :1].double())
    sums_RC = weights_RC.cumsum(dim=1)
    # A token is in the top-p set while those before it have not reached p.
    before_RC = sums_RC - weights_RC
    in_top_p_RC = before_RC < top_p_R[:, None].double() * sums_RC[:, -1:]
    in_min_p_RC = weights_RC >= min_p_R[:, None].double()  # the first weight is 1
    passes_RC = in_top_p_RC & in_min_p_RC & (weights_RC > 0)
    passes_RC[:, 0] = True
    count_R1 = passes_RC.to(torch.int64).cumprod(dim=1).sum(dim=1, keepdim=True)
    target_R1 = uniform_R[:, None] * sums_RC.gather(1, count_R1 - 1)
    index_R1 = torch.searchsorted(sums_RC, target_R1, right=True)
    return ids_RC.gather(1, torch.minimum(index_R1, count_R1 - 1))[:, 0]


def _candidates(x_RV: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` largest values of each row (0: all), descending, and their ids."""
    if not 0 < top_k < x_RV.shape[1]:
        return torch.sort(x_RV, dim=1, descending=True, stable=True)
    ids_RK = torch.topk(x_RV, top_k, dim=1).indices.sort(dim=1).values
    sorted_RK, order_RK = torch.sort(x_RV.gather(1, ids_RK), dim=1, descending=True, stable=True)
    return sorted_RK, ids_RK.gather(1, order_RK)


def token_logprobs(
    logits_RV: torch.Tensor, tokens_R: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities under softmax of unmodified logits.

    Returns of the given tokens: log-probability float32 [R] and rank int64 [R] (1 plus the number
    of more likely tokens); of the `top` most likely: ids int64 [R, K] and log-probabilities
    float32 [R, K], K = min(top, V), ordered as in `sample`.
    """
    logits_RV = logits_RV.float()
    best_R1 = logits_RV.amax(dim=1, keepdim=True).double()
    weights_RV = _row_by_row(torch.exp, logits_RV.double() - best_R1)
    norm_R1 = best_R1 + _row_by_row(torch.log, weights_RV.cumsum(dim=1)[:, -1:])
    chosen_R1 = logits_RV.gather(1, tokens_R[:, None])
    rank_R = (logits_RV > chosen_R1).sum(dim=1) + 1
    sorted_RK, ids_RK = _candidates(logits_RV, min(max(1, top), logits_RV.shape[1]))
    top_RK = (sorted_RK[:, :top].double() - norm_R1).float()
    return (chosen_R1.double() - norm_R1)[:, 0].float(), rank_R, ids_RK[:, :top], top_RK


def _row_by_row(
    function: Callable[[torch.Tensor], torch.Tensor], x_RV: torch.Tensor
) -> torch.Tensor:
    """An elementwise function on each row by itself, in memory of its own, if on a CPU."""
    if x_RV.device.type != "cpu":
        return function(x_RV)
    return torch.stack([function(row_V.clone()) for row_V in x_RV.unbind(0)])
