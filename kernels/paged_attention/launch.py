"""Launches of the Triton kernels: checks, configuration, partial results."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import backend
from kernels.paged_attention import configs
from kernels.paged_attention.configs import Config
from kernels.paged_attention.triton import (
    attend_rows,
    paged_attention,
    resolve_rows,
    write_rows,
)
from kernels.split_keys import COPIES, LOG2_E, Partials, merge_splits

WRITE_ELEMENTS, WRITE_WARPS, WRITE_STAGES = 1024, 4, 1
RESOLVED, RESOLVE_WARPS, RESOLVE_STAGES = 1024, 4, 1
INTERPRETED_TARGET = 80  # where a card cannot be asked


@dataclass(frozen=True, slots=True)
class Place:
    """Where tokens are: tables [B, P], and sequences [T] and positions [T], all int64.

    Numbers out of range are left out, never followed.
    """

    page_table_BP: torch.Tensor
    sequence_T: torch.Tensor
    positions_T: torch.Tensor

    def check(self, tokens: int) -> None:
        for x in (self.page_table_BP, self.sequence_T, self.positions_T):
            assert x.dtype == torch.int64 and x.is_contiguous()
        assert self.sequence_T.shape == self.positions_T.shape == (tokens,)

    def sizes(self, pool_PNX: torch.Tensor) -> tuple[int, int, int, int]:
        """Sequences, columns of the table, pages of the pool, logarithm of a page's entries."""
        pages, per_page = pool_PNX.shape[:2]
        assert per_page & (per_page - 1) == 0, "a page holds a power of two of entries"
        sequences, width = self.page_table_BP.shape
        return sequences, width, pages, per_page.bit_length() - 1


def write(
    rows_TX: torch.Tensor, pool_PNX: torch.Tensor, place: Place, ratio: int = 1
) -> torch.Tensor:
    """pool[entry position // ratio] = rows[t] for tokens that close `ratio`, in one launch.

    Rows are converted to the type of the pool. Returns the pool.
    """
    tokens, elements = len(rows_TX), pool_PNX[0, 0].numel()
    place.check(tokens)
    assert rows_TX.shape[1:] == pool_PNX.shape[2:] and pool_PNX.is_contiguous() and ratio >= 1
    if tokens == 0:
        return pool_PNX
    block = write_block(elements)
    write_rows[(tokens, -(-elements // block))](
        rows_TX.contiguous(), pool_PNX, place.page_table_BP, place.sequence_T, place.positions_T,
        elements, *place.sizes(pool_PNX), RATIO=ratio, BX=block,
        num_warps=WRITE_WARPS, num_stages=WRITE_STAGES,
    )  # fmt: skip
    return pool_PNX


def write_block(elements: int) -> int:
    """Elements of a row that a program writes."""
    return min(WRITE_ELEMENTS, 1 << (elements - 1).bit_length())


def configuration(
    q_THD: torch.Tensor,
    key_heads: int,
    sequences: int,
    splits: int | None = None,
    *,
    selected: bool,
) -> Config:
    """The configuration of the card for the shapes of a step; lengths have no say."""
    tokens, heads, _ = q_THD.shape
    group = heads // key_heads
    target = _target(q_THD)
    per_tile = configs.tile_tokens(target, tokens, sequences, group, selected=selected)
    programs = -(-tokens // per_tile) * key_heads
    splits = splits or configs.splits_for(programs, selected=selected)
    if selected and splits == 1:
        return configs.rows_tile(target, group)
    return configs.tile(per_tile * group, splits, one=per_tile == 1)


def _target(x: torch.Tensor) -> int:
    return backend.target(x.device.index or 0) if x.is_cuda else INTERPRETED_TARGET


def attend(
    q_THD: torch.Tensor,
    k_pool_PNGD: torch.Tensor,
    v_pool_PNGD: torch.Tensor,
    place: Place,
    out_THD: torch.Tensor,
    *,
    gate_THD: torch.Tensor | None = None,
    selected_TS: torch.Tensor | None = None,
    partials: Partials | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Fill `out` [T, H, D]. No host synchronisation; can be captured in a CUDA graph.

    Over a selection without splits its pool rows are found first, by a launch of its own.

    Queries, keys and weights are rounded to bf16, sums are fp32. A token without any key gets 0.
    Without `partials` they are allocated where the keys are split.
    """
    tokens, heads, width = q_THD.shape
    key_heads = k_pool_PNGD.shape[2]
    place.check(tokens)
    assert q_THD.is_contiguous() and out_THD.is_contiguous() and out_THD.shape == q_THD.shape
    assert k_pool_PNGD.is_contiguous() and v_pool_PNGD.is_contiguous()
    assert width >= 16 and width & (width - 1) == 0, "a head dim is a power of two from 16"
    assert gate_THD is None or (gate_THD.shape == q_THD.shape and gate_THD.stride(2) == 1)
    if selected_TS is not None:
        assert selected_TS.dtype == torch.int64 and selected_TS.is_contiguous()
        assert len(selected_TS) == tokens
    if tokens == 0:
        return out_THD
    sequences = len(place.page_table_BP)
    config = configuration(q_THD, key_heads, sequences, splits, selected=selected_TS is not None)
    if selected_TS is not None and config.splits == 1:
        rows = _resolve(selected_TS, place, k_pool_PNGD, config.keys)
        return _launch_rows(q_THD, k_pool_PNGD, v_pool_PNGD, place, out_THD, gate_THD, rows, config)
    if partials is None:
        partials = Partials.allocate(tokens, heads, config.splits, width, q_THD.device)
    assert partials.holds(tokens, heads, config.splits, width)
    _launch(
        q_THD, k_pool_PNGD, v_pool_PNGD, place, out_THD, gate_THD, selected_TS, partials, config
    )
    if config.splits > 1:
        merge_splits(partials, out_THD, config.splits, gate_THD=gate_THD)
    return out_THD


def _launch(
    q_THD: torch.Tensor,
    k_pool_PNGD: torch.Tensor,
    v_pool_PNGD: torch.Tensor,
    place: Place,
    out_THD: torch.Tensor,
    gate_THD: torch.Tensor | None,
    selected_TS: torch.Tensor | None,
    partials: Partials,
    config: Config,
) -> None:
    tokens, heads, width = q_THD.shape
    key_heads, sequences = k_pool_PNGD.shape[2], len(place.page_table_BP)
    group = heads // key_heads
    per_tile = configs.tile_tokens(
        _target(q_THD), tokens, sequences, group, selected=selected_TS is not None
    )
    grid = (
        -(-tokens // per_tile),
        key_heads * config.splits,
        configs.dealt_runs(tokens, sequences, per_tile),
    )
    gate = out_THD if gate_THD is None else gate_THD  # if not read
    selected = place.sequence_T if selected_TS is None else selected_TS
    paged_attention[grid](
        q_THD, k_pool_PNGD, v_pool_PNGD, out_THD, partials.values, partials.stats, gate,
        place.page_table_BP, place.sequence_T, place.positions_T, selected,
        tokens, heads, group, per_tile, 0 if selected_TS is None else selected_TS.shape[1],
        *place.sizes(k_pool_PNGD), gate.stride(0), gate.stride(1), width**-0.5 * LOG2_E.value,
        **constants(width, config, selected=selected_TS is not None, gated=gate_THD is not None),
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip


def _resolve(
    selected_TS: torch.Tensor, place: Place, pool_PNX: torch.Tensor, keys: int
) -> torch.Tensor:
    """Pool rows int32 [T, R] of the selection: whole blocks of `keys`, and one more of -1."""
    tokens, slots = selected_TS.shape
    padded = (-(-slots // keys) + 1) * keys
    rows = torch.empty(tokens, padded, dtype=torch.int32, device=selected_TS.device)
    resolve_rows[(tokens, -(-padded // RESOLVED))](
        selected_TS, place.page_table_BP, place.sequence_T, place.positions_T, rows, slots, padded,
        *place.sizes(pool_PNX), BX=RESOLVED, num_warps=RESOLVE_WARPS, num_stages=RESOLVE_STAGES,
    )  # fmt: skip
    return rows


def _launch_rows(
    q_THD: torch.Tensor,
    k_pool_PNGD: torch.Tensor,
    v_pool_PNGD: torch.Tensor,
    place: Place,
    out_THD: torch.Tensor,
    gate_THD: torch.Tensor | None,
    rows_TR: torch.Tensor,
    config: Config,
) -> torch.Tensor:
    tokens, heads, width = q_THD.shape
    key_heads = k_pool_PNGD.shape[2]
    gate = out_THD if gate_THD is None else gate_THD  # if not read
    attend_rows[(tokens, key_heads)](
        q_THD, k_pool_PNGD, v_pool_PNGD, out_THD, gate, place.positions_T, rows_TR, rows_TR, heads,
        heads // key_heads, rows_TR.shape[1], gate.stride(0), gate.stride(1),
        width**-0.5 * LOG2_E.value, **rows_constants(width, config, gated=gate_THD is not None),
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out_THD


def rows_constants(width: int, config: Config, *, gated: bool) -> dict[str, int | bool]:
    """The constants of `attend_rows`."""
    parts = configs.parts(width, config.rows)
    return {"D": width, "M": config.rows, "BK": config.keys, "GATED": gated, "PARTS": parts}


def constants(width: int, config: Config, *, selected: bool, gated: bool) -> dict[str, int | bool]:
    """The kernel's constants; where keys are split, the merge has the gate."""
    return {
        "D": width,
        "M": config.rows,
        "BK": config.keys,
        "SPLITS": config.splits,
        "ONE": config.one,
        "SELECTED": selected,
        "GATED": gated and config.splits == 1,
        "COPIES": COPIES,
    }
