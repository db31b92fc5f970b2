"""Latent attention (K == V, one key head) over a window of tokens and compressed entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels import backend
from kernels.cache_rows import RowFormat
from kernels.sparse_attention import reference

if TYPE_CHECKING:
    from kernels.split_keys import Partials

# Legend: T packed tokens, B sequences, P pages of a table, N rows of a page, H query heads,
# D head dim, S selected entries.


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a paged pool: row r of sequence b lies at entry r % N of page `pages[b, r // N]`.

    `pool` [pages, N, D] of any float type, `pages` int64 [B, P]. With `form` the pool is uint8
    and its rows are stored as `kernels.cache_rows` defines.
    """

    pool: torch.Tensor
    pages: torch.Tensor
    form: RowFormat | None = None

    @property
    def width(self) -> int:
        """Values of a row."""
        stored = self.pool.shape[2]
        return stored if self.form is None else self.form.row_values(stored)


@dataclass(frozen=True, slots=True)
class Entries:
    """Compressed entries that each token attends to.

    Entries 0 to `visible_T` - 1 (int64 [T]) of the token's sequence, or, where `selected_TS`
    (int64 [T, S]) is given, the entries that its row names, those of -1 left out.
    """

    rows: Rows
    visible_T: torch.Tensor
    selected_TS: torch.Tensor | None = None


def sparse_attention(
    q_THD: torch.Tensor,
    window: Rows,
    first_T: torch.Tensor,
    last_T: torch.Tensor,
    sequence_T: torch.Tensor,
    sinks_H: torch.Tensor,
    *,
    scale: float,
    entries: Entries | None = None,
    partials: Partials | None = None,
) -> torch.Tensor:
    """softmax with a sink over window rows and entries, all of them keys and values: [T, H, D].

    The keys of token t are the window rows at positions first_T[t] to last_T[t] (int64 [T],
    inclusive) of its sequence and its `entries`. With logits l = scale * q . key:
    out = sum exp(l - m) key / (exp(sink - m) + sum exp(l - m)), m the largest of all. `sinks`
    fp32 [H] are not scaled. fp32 inside; returned in the type of q. Rows and entries of the
    step's own tokens must be in the pools. The pools of the two key sets may belong to any layer.
    Source: DeepSeek-V4 sparse attention.

    On a GPU queries, rows and weights are rounded to bf16, numbers out of range are left out, and
    a token's result depends on its own keys and, through the number of splits, on T; equal calls
    give equal bits. `partials` hold what splits keep; without them a split launch allocates.
    """
    assert q_THD.shape[2] == window.width and sinks_H.shape == q_THD.shape[1:2]
    assert first_T.shape == last_T.shape == sequence_T.shape == q_THD.shape[:1]
    if not backend.uses_triton(q_THD):
        return reference.sparse_attention(
            q_THD, window, first_T, last_T, sequence_T, sinks_H, scale, entries
        )
    from kernels.sparse_attention import launch

    q_THD = q_THD.contiguous()
    asked = launch.Question(q_THD, sequence_T, scale, sinks_H, first_T, last_T)
    return launch.attend(asked, window, entries, torch.empty_like(q_THD), partials)
