"""The variants of the sampling kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kernels.aot.variant import Variant
from kernels.sampling import launch
from kernels.sampling.scores.triton import block_scores, row_scores
from kernels.sampling.selection.triton import choose, collect
from kernels.sampling.settings import RowSettings
from kernels.sampling.triton import adjust, best_of_blocks, best_of_row, count

VOCAB = 248320  # with as many blocks, rounded up, as any vocabulary of 131073 to 262143
TOP = 32
DEFAULT_STAGES = 3
KINDS = {
    **dict.fromkeys(
        (
            "x", "temperature", "repetition", "presence", "frequency", "bias", "top_p", "min_p",
            "block_best", "block_sum", "logprob", "logprobs", "logits",
        ),
        "*fp32",
    ),
    **dict.fromkeys(
        (
            "history", "slot_of", "masks", "mask_of", "drafts", "banned", "block_id", "found",
            "top_k", "block_rank", "maxima", "chosen",
        ),
        "*i32",
    ),
    **dict.fromkeys(
        ("uniform", "seeds", "positions", "counts", "tokens", "rank", "out"), "*i64"
    ),
}  # fmt: skip


def variants(target: int) -> Iterator[Variant]:
    """All settings in use, as a server's graph has them, and log-probabilities."""
    blocks = launch.power_of_two(launch.blocks_of(VOCAB))
    row = {"BLOCKS": blocks, "SEEDED": True}
    tile = {"BLOCK": launch.BLOCK}
    wide = launch.BLOCK_WARPS
    yield _variant("adjust", adjust, launch.adjust_constants(_settings(), VOCAB), wide)
    yield _variant("count", count, tile | {"BLOCKS": blocks, "MASK": True}, wide)
    few = {"F": launch.MOST_SORTED, "TILE": launch.CHOOSE_TILE}
    tiles = {"TILES": launch.COLLECT_TILES}
    yield _variant("collect", collect, tile | tiles | row, wide)
    yield _variant("choose", choose, row | few, launch.CHOOSE_WARPS)
    yield _variant("best of blocks", best_of_blocks, tile, wide)
    yield _variant("best of row", best_of_row, {"BLOCKS": blocks}, 1)
    yield _variant("block scores", block_scores, tile | {"G": launch.GROUP}, wide)
    lists = launch.row_constants(VOCAB, TOP)
    yield _variant("row scores", row_scores, lists, launch.ROW_WARPS, ids="*i64")


def _settings() -> RowSettings:
    """With everything there is; only which tensors there are matters."""
    x = torch.empty(1, 4)
    return RowSettings(*[x] * 16)


def _variant(
    label: str, kernel: Any, constants: dict[str, int | bool], warps: int, ids: str = "*i32"
) -> Variant:
    kinds = KINDS | {"ids": ids}
    names = [name for name in kernel.arg_names if name not in constants]
    aligned = frozenset(n for n in names if n in kinds) | {"vocab", "row_stride", "W"}
    arguments = {name: kinds.get(name, "i32") for name in names}
    return Variant(label, kernel, arguments, constants, aligned, warps, DEFAULT_STAGES)
