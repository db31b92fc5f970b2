"""Attention whose keys are dealt to a fixed number of programs: what they keep, and the merge.

Block j of a token's keys belongs to split j % S, whatever their number. A split keeps the largest
logit (base 2), the sum of its weights and the weighted sum of its values; the merge adds the
splits in one order, so that the result does not depend on which program ends first. A split
without keys keeps a sum of 0, and its values do not count. Imports Triton.

Legend: T tokens, H heads, D width of a value, S splits (a power of two).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.split_keys.triton import (
    LOG2_E,
    NOTHING,
    closing_factor,
    find_numbers,
    find_pages,
    find_rows,
    merge,
    rows_of,
    store_stats,
    weigh,
)

__all__ = [
    "LOG2_E",
    "NOTHING",
    "Partials",
    "closing_factor",
    "find_numbers",
    "find_pages",
    "find_rows",
    "merge",
    "merge_constants",
    "merge_splits",
    "rows_of",
    "store_stats",
    "weigh",
]

# Of the search for rows. With as many as the warps of a program the compiler takes its layout for
# the logits too, and passes them from warp to warp.
COPIES = 2
# A warp has all splits of its columns, so that they are added without exchange; values of 64
# splits fill its registers by half as many columns.
MERGED_COLUMNS, MERGED_VALUES = 128, 4096
MERGE_WARPS, MERGE_STAGES = 1, 1


@dataclass(frozen=True, slots=True)
class Partials:
    """What splits keep: fp32 `values` [T, H, S, D] and `stats` [T, H, 2, S] (top, total), flat.

    Launches that share them must follow each other on one stream.
    """

    values: torch.Tensor
    stats: torch.Tensor

    @classmethod
    def allocate(
        cls, tokens: int, heads: int, splits: int, width: int, device: torch.device
    ) -> Partials:
        """Of any contents: a launch writes what its merge reads. Empty for one split."""
        rows = tokens * heads * splits if splits > 1 else 0
        return cls(
            torch.empty(rows * width, dtype=torch.float32, device=device),
            torch.empty(2 * rows, dtype=torch.float32, device=device),
        )

    def holds(self, tokens: int, heads: int, splits: int, width: int) -> bool:
        """Whether they suffice."""
        rows = tokens * heads * splits if splits > 1 else 0
        return self.values.numel() >= rows * width and self.stats.numel() >= 2 * rows


def merge_constants(
    width: int, splits: int, *, sink: bool, gated: bool = False
) -> dict[str, int | bool]:
    """The constants of `merge`."""
    return {
        "D": width,
        "SPLITS": splits,
        "COLUMNS": min(MERGED_COLUMNS, MERGED_VALUES // splits),
        "SINK": sink,
        "GATED": gated,
    }


def merge_splits(
    partials: Partials,
    out_THD: torch.Tensor,
    splits: int,
    *,
    sinks_H: torch.Tensor | None = None,
    gate_THD: torch.Tensor | None = None,
) -> None:
    """Fill `out` [T, H, D], contiguous, of any float type, from what the splits kept.

    A sink is one more logit (base e) of no value; a head without any key and sink gets 0. Where
    `gate` [T, H, D] is given, its last dimension contiguous, the output is times its sigmoid.
    Not for one split.
    """
    tokens, heads, width = out_THD.shape
    assert splits > 1 and splits & (splits - 1) == 0 and out_THD.is_contiguous()
    assert gate_THD is None or (gate_THD.shape == out_THD.shape and gate_THD.stride(2) == 1)
    if tokens == 0:
        return
    sinks, gate = (out_THD if x is None else x for x in (sinks_H, gate_THD))  # if not read
    constants = merge_constants(width, splits, sink=sinks_H is not None, gated=gate_THD is not None)
    merge[(tokens * heads, -(-width // constants["COLUMNS"]))](
        partials.values, partials.stats, sinks, gate, out_THD, heads, gate.stride(0),
        gate.stride(1), **constants, num_warps=MERGE_WARPS, num_stages=MERGE_STAGES,
    )  # fmt: skip
