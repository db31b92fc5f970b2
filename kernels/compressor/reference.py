from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from kernels.cache_rows import encode_rows
from kernels.hadamard.reference import hadamard
from kernels.paged_attention.reference import entry_numbers
from kernels.rms_norm.reference import rms_norm
from kernels.rotary.reference import rotate_tail_pairs

if TYPE_CHECKING:
    from kernels.compressor import Finish


def pool_rows(
    rows_TX: torch.Tensor,
    scores_TX: torch.Tensor,
    state_BYD: torch.Tensor,
    starts_B1: torch.Tensor,
    positions_T: torch.Tensor,
    write_token_W: torch.Tensor,
    ratio: int,
    overlap: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    width = state_BYD.shape[2]
    entries_TD = rows_TX.new_zeros(len(rows_TX), width)
    states_WYD = state_BYD.new_empty(len(write_token_W), *state_BYD.shape[1:])
    writes: dict[int, list[int]] = {}
    for write, token in enumerate(write_token_W.tolist()):
        writes.setdefault(token, []).append(write)
    positions = positions_T.tolist()
    for b, (start, stop) in enumerate(pairwise(starts_B1.tolist())):
        state = state_BYD[b].view(-1, 3, width).clone()  # series, then (max, sum, weighted sum)
        for t in range(start, stop):
            place = positions[t] % ratio
            _add(state, rows_TX[t], scores_TX[t], first=place == 0, overlap=overlap)
            if place == ratio - 1:
                entries_TD[t] = _pooled(state, overlap)
            for write in writes.get(t, ()):
                states_WYD[write] = state.flatten(0, 1)
    return entries_TD, states_WYD


def _add(
    state: torch.Tensor, row_X: torch.Tensor, score_X: torch.Tensor, *, first: bool, overlap: bool
) -> None:
    """One more token in the open window, which it opens where it is the `first`."""
    if first and overlap:
        state[0] = state[1]
    open_ = state[1:] if overlap else state
    score = score_X.view(open_.shape[0], -1)
    row = row_X.view(open_.shape[0], -1)
    if first:
        open_[:, 0], open_[:, 1], open_[:, 2] = score, 1.0, row
        return
    top = torch.maximum(open_[:, 0], score)
    kept, new = (open_[:, 0] - top).exp_(), (score - top).exp_()
    open_[:, 1].mul_(kept).add_(new)
    open_[:, 2].mul_(kept).add_(new.mul_(row))
    open_[:, 0] = top


def _pooled(state: torch.Tensor, overlap: bool) -> torch.Tensor:
    """The entry of the window that the last token has closed."""
    if not overlap:
        return state[0, 2] / state[0, 1]
    last, closed = state[0], state[2]
    top = torch.maximum(torch.where(last[1] > 0, last[0], -torch.inf), closed[0])
    a = torch.where(last[1] > 0, (last[0] - top).exp(), 0.0)
    b = (closed[0] - top).exp()
    return (last[2] * a + closed[2] * b) / (last[1] * a + closed[1] * b)


def write_entries(
    entries_TD: torch.Tensor,
    pool_PND: torch.Tensor,
    pages_BP: torch.Tensor,
    sequence_T: torch.Tensor,
    positions_T: torch.Tensor,
    ratio: int,
) -> None:
    closing = (positions_T + 1) % ratio == 0
    windows = positions_T[closing] // ratio
    numbers = entry_numbers(pages_BP, sequence_T[closing], windows, pool_PND.shape[1])
    pool_PND.flatten(0, 1).index_copy_(0, numbers, entries_TD[closing].to(pool_PND.dtype))


def finished(entries_TD: torch.Tensor, finish: Finish) -> torch.Tensor:
    """Rows as they are stored."""
    x_TD = entries_TD.to(finish.dtype)
    x_TD = rms_norm(x_TD, finish.weight_D, finish.eps, None, False).to(finish.dtype)
    x_TD = rotate_tail_pairs(x_TD[:, None], finish.cos_TF, finish.sin_TF)[:, 0]
    if finish.rotated:
        x_TD = hadamard(x_TD)
    return x_TD if finish.form is None else encode_rows(x_TD, finish.form)
