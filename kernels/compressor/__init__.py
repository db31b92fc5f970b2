"""Compressed entries: softmax-weighted sums of `ratio` consecutive rows, per channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import backend
from kernels.cache_rows import RowFormat
from kernels.compressor import reference

# Legend: T packed tokens, B sequences, W state writes, D width of an entry, X = D, or 2 D where
# windows overlap, Y = rows of a pooling state, P pages of a table, N entries of a page.

STATE_ROWS = 3  # largest score, sum of weights, weighted sum of rows
OVERLAP_STATE_ROWS = 9  # the same of: last window's A half, open window's A half, its B half


@dataclass(frozen=True, slots=True)
class Finish:
    """What is done with a pooled entry before it is stored, each step rounded to `dtype`.

    RMS norm with `weight` [D] and `eps`, rotation of the last 2 F values by the angles of the
    token (fp32 [T, F], as `kernels.rotary.rotate_tail_pairs`), the Hadamard rotation if `rotated`;
    then the entry is stored as `form` says, or in the type of the pool.
    """

    weight_D: torch.Tensor
    eps: float
    cos_TF: torch.Tensor
    sin_TF: torch.Tensor
    dtype: torch.dtype
    form: RowFormat | None = None
    rotated: bool = False


def pool_rows(
    rows_TX: torch.Tensor,
    scores_TX: torch.Tensor,
    state_BYD: torch.Tensor,
    starts_B1: torch.Tensor,
    positions_T: torch.Tensor,
    write_token_W: torch.Tensor,
    *,
    ratio: int,
    overlap: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pool windows of `ratio` tokens: entries fp32 [T, D] and the states [W, Y, D] after W tokens.

    Window g is the tokens g * ratio to (g + 1) * ratio - 1 of a sequence. The token that closes
    one ((position + 1) % ratio == 0) gets u = sum_j softmax_j(scores_j) rows_j, per channel over
    the tokens j of the window; other tokens get zeros. With `overlap` X = 2 D: channels 0..D are
    series A, the others series B, and window g pools A of window g - 1 (nothing for g = 0)
    together with B of window g. rows and scores fp32 [T, X], the scores with every bias in them.

    `state` fp32 [B, Y, D] holds what a sequence has pooled of its open window (and of the last
    one, with `overlap`) before its first token, as running softmax sums; zeros are an empty one.
    Y is STATE_ROWS or OVERLAP_STATE_ROWS. `starts` int64 [B + 1]; packed tokens `write_token`
    int64 [W] name where states are wanted. Tokens are added one by one, in fp32, so a cut between
    steps changes no bit. Source: compressors of DeepSeek-V4 (ratio 4 with overlap, ratio 128) and
    V4.1 (ratio 2).
    """
    rows = OVERLAP_STATE_ROWS if overlap else STATE_ROWS
    width = rows_TX.shape[1] // (2 if overlap else 1)
    assert rows_TX.shape == scores_TX.shape and state_BYD.shape[1:] == (rows, width)
    assert rows_TX.dtype == scores_TX.dtype == state_BYD.dtype == torch.float32
    if backend.uses_triton(rows_TX):
        from kernels.compressor import launch

        at = (starts_B1, positions_T, write_token_W)
        rows_TX, scores_TX = rows_TX.contiguous(), scores_TX.contiguous()
        return launch.pool_rows(rows_TX, scores_TX, state_BYD.contiguous(), *at, ratio, overlap)
    return reference.pool_rows(
        rows_TX, scores_TX, state_BYD, starts_B1, positions_T, write_token_W, ratio, overlap
    )


def write_entries(
    entries_TD: torch.Tensor,
    pool_PND: torch.Tensor,
    pages_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    ratio: int,
) -> None:
    """Store the entries of the tokens that close a window, in place.

    Token t with (positions[t] + 1) % ratio == 0 closes window g = positions[t] // ratio; its
    entry becomes entry g of its sequence's pages. Other rows are ignored.
    """
    assert entries_TD.shape[1:] == pool_PND.shape[2:]
    at = (pages_BP, sequence_T, positions_T)
    if backend.uses_triton(entries_TD):
        from kernels.compressor import launch

        return launch.write_entries(entries_TD.contiguous(), pool_PND, *at, ratio)
    return reference.write_entries(entries_TD, pool_PND, *at, ratio)


def store_entries(
    entries_TD: torch.Tensor,
    finish: Finish,
    pool_PND: torch.Tensor,
    pages_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    ratio: int,
) -> None:
    """`write_entries` of pooled entries fp32 [T, D] after the steps of `finish`, in one launch."""
    at = (pages_BP, sequence_T, positions_T)
    if backend.uses_triton(entries_TD):
        from kernels.compressor import launch

        return launch.store_entries(entries_TD.contiguous(), finish, pool_PND, *at, ratio)
    rows_TX = reference.finished(entries_TD, finish)
    return reference.write_entries(rows_TX, pool_PND, *at, ratio)
