"""Launches of the Triton kernels: checks, scratch, constants. None synchronises with the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import backend
from kernels.sampling.scores.triton import block_scores, row_scores
from kernels.sampling.selection.triton import choose as choose_kernel
from kernels.sampling.selection.triton import collect
from kernels.sampling.settings import RowSettings
from kernels.sampling.triton import BINS, adjust, best_of_blocks, best_of_row, count

# Legend: R rows, V vocabulary, B blocks of a row, K length of a top list.

BLOCK, BLOCK_WARPS = 2048, 8
COLLECT_TILES = 4  # blocks of a program of `collect`, which adds up the bins once for them
CHOOSE_TILE, CHOOSE_WARPS = 1024, 8
MOST_SORTED = 512  # collected ids of a row that are sorted; in longer lists one searches
CAPACITY = 16384  # collected ids of a row; a longer list is replaced by the row itself
ROW_WARPS = 8
GROUP = 64  # tokens whose best decides which are looked at for a top list
MOST_TOP = 32  # the longest top list of the kernels


def blocks_of(vocab: int) -> int:
    return -(-vocab // BLOCK)


def power_of_two(value: int) -> int:
    """The least power of two that is not below `value` >= 1."""
    return 1 << (value - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Scratch:
    """Device memory of one launch at a time; any contents will do."""

    x: torch.Tensor  # fp32 [R, V]
    block_best: torch.Tensor  # fp32 [R, B]
    block_id: torch.Tensor  # int32 [R, B]
    counts: torch.Tensor  # int64 [R, BINS]
    found: torch.Tensor  # int32 [R]
    ids: torch.Tensor  # int32 [R, CAPACITY]

    @classmethod
    def allocate(cls, rows: int, vocab: int, device: torch.device) -> Scratch:
        """Enough for `rows` rows."""

        def empty(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(rows, width, dtype=dtype, device=device)

        return cls(
            x=empty(vocab, torch.float32),
            block_best=empty(blocks_of(vocab), torch.float32),
            block_id=empty(blocks_of(vocab), torch.int32),
            counts=empty(BINS, torch.int64),
            found=empty(1, torch.int32),
            ids=empty(CAPACITY, torch.int32),
        )


def choose(
    logits_RV: torch.Tensor,
    settings: RowSettings,
    *,
    out_R: torch.Tensor | None = None,
    scratch: Scratch | None = None,
    uniform_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kernels.sampling.choose`: four launches. `uniform_R` fp64 takes the place of seeds."""
    rows, vocab = logits_RV.shape
    settings.check(rows, vocab)
    assert logits_RV.stride(1) == 1 and vocab < 1 << 18  # the range of the packed sums
    if out_R is None:
        out_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    assert out_R.shape == (rows,) and out_R.dtype == torch.int64 and out_R.is_contiguous()
    if rows == 0:
        return out_R
    scratch = scratch or Scratch.allocate(rows, vocab, logits_RV.device)
    assert scratch.x.shape[0] >= rows and scratch.x.shape[1] == vocab
    _adjust(logits_RV, settings, scratch)
    _draw(rows, vocab, settings, scratch, uniform_R, out_R)
    return out_R


def adjust_constants(s: RowSettings, vocab: int) -> dict[str, int | bool]:
    return {
        "BLOCK": BLOCK,
        "CLEARED": power_of_two(-(-BINS // blocks_of(vocab))),
        "HISTORY": s.history_SV is not None,
        "BIAS": s.bias_SV is not None,
        "MASK": s.masks_MW is not None,
        "DRAFTS": 0 if s.drafts_RD is None else s.drafts_RD.shape[1],
        "BANNED": 0 if s.banned_RN is None else s.banned_RN.shape[1],
    }


def _adjust(logits_RV: torch.Tensor, s: RowSettings, scratch: Scratch) -> None:
    rows, vocab = logits_RV.shape
    pool = s.bias_SV if s.history_SV is None else s.history_SV
    floats, ints = scratch.block_best, scratch.found  # in the place of what is not read
    adjust[(blocks_of(vocab), rows)](
        logits_RV, s.temperature_R, _or(s.repetition_R, floats), _or(s.presence_R, floats),
        _or(s.frequency_R, floats), _or(s.history_SV, ints), _or(s.bias_SV, floats),
        _or(s.slot_R, ints), _or(s.masks_MW, ints), _or(s.mask_R, ints), _or(s.drafts_RD, ints),
        _or(s.banned_RN, ints), scratch.x, scratch.block_best, scratch.block_id, scratch.counts,
        scratch.found, vocab, logits_RV.stride(0), 0 if pool is None else pool.shape[0],
        mask_rows(s), **adjust_constants(s, vocab), num_warps=BLOCK_WARPS,
    )  # fmt: skip


def _or(x: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if x is None else x


def mask_rows(s: RowSettings) -> int:
    return 0 if s.masks_MW is None else s.masks_MW.shape[0]


def _draw(
    rows: int,
    vocab: int,
    s: RowSettings,
    scratch: Scratch,
    uniform_R: torch.Tensor | None,
    out_R: torch.Tensor,
) -> None:
    blocks = blocks_of(vocab)
    padded = power_of_two(blocks)
    count[(blocks, rows)](
        scratch.x, s.temperature_R, s.top_k_R, scratch.block_best, _or(s.masks_MW, scratch.found),
        _or(s.mask_R, scratch.found), scratch.counts, vocab, blocks, mask_rows(s), BLOCK=BLOCK,
        BLOCKS=padded, MASK=s.masks_MW is not None, num_warps=BLOCK_WARPS,
    )  # fmt: skip
    seeds, positions = s.seed_R, s.position_R
    uniform = seeds if uniform_R is None else uniform_R  # seeds: not read
    assert uniform_R is None or uniform_R.dtype == torch.float64
    parameters = (
        scratch.x, s.temperature_R, s.top_k_R, s.top_p_R, s.min_p_R, uniform, seeds, positions,
        scratch.block_best,
    )  # fmt: skip
    constants = {"BLOCKS": padded, "SEEDED": uniform_R is None}
    collect[(-(-blocks // COLLECT_TILES), rows)](
        *parameters, scratch.counts, scratch.found, scratch.ids, vocab, blocks, CAPACITY,
        BLOCK=BLOCK, TILES=COLLECT_TILES, **constants, num_warps=BLOCK_WARPS,
    )  # fmt: skip
    choose_kernel[(rows,)](
        *parameters, scratch.block_id, scratch.counts, scratch.found, scratch.ids, out_R, vocab,
        blocks, CAPACITY, F=MOST_SORTED, TILE=CHOOSE_TILE, **constants, num_warps=CHOOSE_WARPS,
    )  # fmt: skip


def sample(
    logits_RV: torch.Tensor,
    top_k: int,
    temperature_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    uniform_R: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.sampling.sample`."""
    nothing = torch.zeros_like(uniform_R, dtype=torch.int64)
    settings = RowSettings(
        temperature_R=temperature_R.float(),
        top_k_R=torch.full_like(nothing, top_k, dtype=torch.int32),
        top_p_R=top_p_R.float(),
        min_p_R=min_p_R.float(),
        seed_R=nothing,
        position_R=nothing,
    )
    return choose(logits_RV, settings, uniform_R=uniform_R)


def greedy(logits_RV: torch.Tensor, out_R: torch.Tensor | None = None) -> torch.Tensor:
    """See `kernels.sampling.greedy`: two launches."""
    rows, vocab = logits_RV.shape
    assert logits_RV.stride(1) == 1
    blocks, device = blocks_of(vocab), logits_RV.device
    if out_R is None:
        out_R = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return out_R
    best = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    ids = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    best_of_blocks[(blocks, rows)](
        logits_RV, best, ids, vocab, logits_RV.stride(0), BLOCK=BLOCK, num_warps=BLOCK_WARPS
    )
    best_of_row[(rows,)](best, ids, out_R, vocab, blocks, BLOCKS=power_of_two(blocks), num_warps=1)
    return out_R


def token_logprobs(
    logits_RV: torch.Tensor, tokens_R: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.sampling.token_logprobs`: two launches. `top` is at most MOST_TOP."""
    rows, vocab = logits_RV.shape
    assert logits_RV.stride(1) == 1 and 0 <= top <= MOST_TOP
    assert tokens_R.shape == (rows,) and tokens_R.dtype == torch.int64 and tokens_R.is_contiguous()
    blocks, top, device = blocks_of(vocab), min(top, vocab), logits_RV.device

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=device)

    results = (
        empty(torch.float32), empty(torch.int64), empty(torch.int64, top),
        empty(torch.float32, top),
    )  # fmt: skip
    if rows == 0:
        return results
    width = blocks * (BLOCK // GROUP)
    parts = (
        empty(torch.float32, blocks), empty(torch.float32, blocks), empty(torch.int32, blocks),
        empty(torch.int32, width),
    )  # fmt: skip
    sizes = (vocab, logits_RV.stride(0), width)
    block_scores[(blocks, rows)](
        logits_RV, tokens_R, *parts, *sizes, BLOCK=BLOCK, G=GROUP, num_warps=BLOCK_WARPS
    )
    row_scores[(rows,)](
        logits_RV, tokens_R, *parts, empty(torch.int32, power_of_two(max(1, top))), *results,
        *sizes, blocks, top, **row_constants(vocab, top), num_warps=ROW_WARPS,
    )  # fmt: skip
    return results


def row_constants(vocab: int, top: int) -> dict[str, int | bool]:
    """The constants of `row_scores`."""
    blocks = power_of_two(blocks_of(vocab))
    return {
        "BLOCKS": blocks,
        "G": GROUP,
        "M": blocks * (BLOCK // GROUP),
        "TOP": power_of_two(max(1, top)),
        "PTX": not backend.interpreted(),
    }
