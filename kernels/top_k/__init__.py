"""The k largest scores of each row, exactly, with one rule for ties."""

from __future__ import annotations

import torch

from kernels import backend
from kernels.top_k import reference

# Legend: T rows, N columns, k numbers that are kept of a row, R tokens of a pool.


def top_k(scores_TN: torch.Tensor, visible_T: torch.Tensor, k: int) -> torch.Tensor:
    """Columns of the `k` largest scores of each row: int64 [T, k], ascending, -1 behind the last.

    Of row t the columns below visible_T[t] (int64 [T], clamped to 0..N) compete. The lower column
    wins among equals; -0 equals 0. A score of NaN or -inf is never taken, whatever else there is.
    scores fp32 [T, N], k up to 2048. Exact; a row depends on itself alone.
    """
    assert scores_TN.dtype == torch.float32 and visible_T.shape == scores_TN.shape[:1] and k >= 1
    if not backend.uses_triton(scores_TN):
        return reference.top_k(scores_TN, visible_T, k)
    from kernels.top_k import launch

    return launch.top_k(scores_TN, visible_T, k)


def top_pools(
    scores_TN: torch.Tensor, positions_T: torch.Tensor, *, ratio: int, budget: int
) -> torch.Tensor:
    """Tokens of the best pools and the tail: int64 [T, budget + ratio - 1], ascending, then -1.

    Pool g is the tokens g * ratio to (g + 1) * ratio - 1. Of the (position + 1) // ratio complete
    ones the budget // ratio best are taken whole, as `top_k` chooses, all of them where there are
    no more (their scores are not read); and always the 0 to ratio - 1 tokens behind them, up to
    positions_T[t] (int64 [T]). On a GPU `ratio` is a power of two.
    """
    assert scores_TN.dtype == torch.float32 and positions_T.shape == scores_TN.shape[:1]
    assert budget >= ratio >= 1 and budget % ratio == 0
    if not backend.uses_triton(scores_TN):
        return reference.top_pools(scores_TN, positions_T, ratio, budget)
    from kernels.top_k import launch

    return launch.top_pools(scores_TN, positions_T, ratio, budget)
