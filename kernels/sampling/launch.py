"""Launches of the Triton kernels: checks, scratch, constants. None synchronises with the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import backend
from kernels.sampling.bins.triton import PLANNED, count
from kernels.sampling.scores.triton import block_scores, row_scores
from kernels.sampling.selection.triton import collect
from kernels.sampling.settings import RowSettings
from kernels.sampling.triton import BINS, MARKS, adjust, best_of_blocks, best_of_row

# Legend: R rows, V vocabulary, B blocks of a row, K length of a top list.

BLOCK, BLOCK_WARPS = 2048, 8
SEARCH_TILE = 1024
# Of a thread, so that several programs fit a multiprocessor; only the last of a row needs as many.
ADJUST_REGISTERS, COUNT_REGISTERS, COLLECT_REGISTERS = 48, 128, 128
PROGRAMS = 264  # about so many share the blocks of all rows
FEW = 256  # counted tokens of a row that are sorted at once
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
    block_sum: torch.Tensor  # fp32 [R, B]
    block_id: torch.Tensor  # int32 [R, B]
    counts: torch.Tensor  # int64 [R, BINS]
    marks: torch.Tensor  # int32 [R, MARKS]
    plan: torch.Tensor  # int64 [R, PLANNED]
    numbers: torch.Tensor  # int32 [R, BINS]
    sums: torch.Tensor  # int64 [R, BINS]
    uniform: torch.Tensor  # fp64 [R]
    ids: torch.Tensor  # int32 [R, CAPACITY]

    @classmethod
    def allocate(cls, rows: int, vocab: int, device: torch.device) -> Scratch:
        """Enough for `rows` rows."""

        def empty(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(rows, width, dtype=dtype, device=device)

        blocks = blocks_of(vocab)
        return cls(
            x=empty(vocab, torch.float32),
            block_best=empty(blocks, torch.float32),
            block_sum=empty(blocks, torch.float32),
            block_id=empty(blocks, torch.int32),
            counts=empty(BINS, torch.int64),
            marks=empty(MARKS, torch.int32),
            plan=empty(PLANNED, torch.int64),
            numbers=empty(BINS, torch.int32),
            sums=empty(BINS, torch.int64),
            uniform=empty(1, torch.float64),
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
    """See `kernels.sampling.choose`: three launches. `uniform_R` fp64 takes the place of seeds."""
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
    assert uniform_R is None or uniform_R.dtype == torch.float64
    _adjust(logits_RV, settings, scratch, seeded=uniform_R is None)
    _draw(rows, vocab, settings, scratch, _or(uniform_R, scratch.uniform), out_R)
    return out_R


def adjust_constants(vocab: int) -> dict[str, int | bool]:
    """The constants of `adjust`."""
    return {"BLOCK": BLOCK, "CLEARED": power_of_two(-(-BINS // blocks_of(vocab)))}


def count_constants(vocab: int) -> dict[str, int | bool]:
    """The constants of `count`."""
    return {"BLOCK": BLOCK, "BLOCKS": power_of_two(blocks_of(vocab)), "F": FEW}


def collect_constants() -> dict[str, int | bool]:
    """The constants of `collect`."""
    return {"BLOCK": BLOCK, "FEW": FEW, "F": MOST_SORTED, "TILE": SEARCH_TILE}


def _adjust(logits_RV: torch.Tensor, s: RowSettings, scratch: Scratch, *, seeded: bool) -> None:
    rows, vocab = logits_RV.shape
    floats, ints = scratch.block_best, scratch.marks  # in the place of what is not read
    adjust[(blocks_of(vocab), rows)](
        logits_RV, s.temperature_R, _or(s.repetition_R, floats), _or(s.presence_R, floats),
        _or(s.frequency_R, floats), _or(s.history_SV, ints), _or(s.bias_SV, floats),
        _or(s.slot_R, ints), _or(s.masks_MW, ints), _or(s.mask_R, ints), _or(s.drafts_RD, ints),
        _or(s.banned_RN, ints), s.seed_R, s.position_R, scratch.x, scratch.block_best,
        scratch.block_sum, scratch.block_id, scratch.counts, scratch.marks, scratch.uniform, vocab,
        logits_RV.stride(0), _extent(s.history_SV, 0), _extent(s.bias_SV, 0),
        _extent(s.masks_MW, 0), _extent(s.drafts_RD, 1), _extent(s.banned_RN, 1), int(seeded),
        **adjust_constants(vocab), num_warps=BLOCK_WARPS, maxnreg=ADJUST_REGISTERS,
    )  # fmt: skip


def _or(x: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if x is None else x


def _extent(x: torch.Tensor | None, axis: int) -> int:
    return 0 if x is None else x.shape[axis]


def _draw(
    rows: int,
    vocab: int,
    s: RowSettings,
    scratch: Scratch,
    uniform_R: torch.Tensor,
    out_R: torch.Tensor,
) -> None:
    blocks = blocks_of(vocab)
    tiles = -(-blocks * rows // PROGRAMS)
    grid = (-(-blocks // tiles), rows)
    ints = scratch.marks  # in the place of what is not read
    parameters = (scratch.x, s.temperature_R, s.top_k_R, s.top_p_R, s.min_p_R, uniform_R)
    row_sums = (scratch.plan, scratch.numbers, scratch.sums, scratch.ids, out_R)
    count[grid](
        *parameters, scratch.block_best, scratch.block_sum, scratch.block_id,
        _or(s.masks_MW, ints), _or(s.mask_R, ints), scratch.counts, scratch.marks, *row_sums,
        vocab, blocks, CAPACITY, _extent(s.masks_MW, 0), tiles, **count_constants(vocab),
        num_warps=BLOCK_WARPS, maxnreg=COUNT_REGISTERS,
    )  # fmt: skip
    collect[grid](
        *parameters, scratch.block_best, scratch.counts, scratch.marks, *row_sums, vocab, blocks,
        CAPACITY, tiles, **collect_constants(), num_warps=BLOCK_WARPS,
        maxnreg=COLLECT_REGISTERS,
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
