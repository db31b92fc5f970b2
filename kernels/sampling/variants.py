"""The variants of the sampling kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kernels.aot.variant import Variant
from kernels.sampling import launch
from kernels.sampling.bins.triton import count
from kernels.sampling.scores.triton import block_scores, row_scores
from kernels.sampling.selection.triton import collect
from kernels.sampling.triton import adjust, best_of_blocks, best_of_row

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
            "history", "slot_of", "masks", "mask_of", "drafts", "banned", "block_id", "marks",
            "numbers",            "top_k", "block_rank", "maxima", "chosen",
        ),
        "*i32",
    ),
    **dict.fromkeys(
        ("seeds", "positions", "counts", "plan", "sums", "tokens", "rank", "out"), "*i64"
    ),
    "uniform": "*fp64",
}  # fmt: skip


def variants(target: int) -> Iterator[Variant]:
    """Of the largest served vocabulary, fp32 logits."""
    blocks = launch.power_of_two(launch.blocks_of(VOCAB))
    tile, wide = {"BLOCK": launch.BLOCK}, launch.BLOCK_WARPS
    constants, few = launch.adjust_constants(VOCAB), launch.ADJUST_REGISTERS
    yield _variant("adjust", adjust, constants, wide, registers=few)
    few = launch.COUNT_REGISTERS
    yield _variant("count", count, launch.count_constants(VOCAB), wide, registers=few)
    constants, few = launch.collect_constants(), launch.COLLECT_REGISTERS
    yield _variant("collect", collect, constants, wide, registers=few)
    yield _variant("best of blocks", best_of_blocks, tile, wide)
    yield _variant("best of row", best_of_row, {"BLOCKS": blocks}, 1)
    yield _variant("block scores", block_scores, tile | {"G": launch.GROUP}, wide)
    lists = launch.row_constants(VOCAB, TOP)
    yield _variant("row scores", row_scores, lists, launch.ROW_WARPS, ids="*i64")


def _variant(
    label: str,
    kernel: Any,
    constants: dict[str, int | bool],
    warps: int,
    *,
    ids: str = "*i32",
    registers: int | None = None,
) -> Variant:
    kinds = KINDS | {"ids": ids}
    names = [name for name in kernel.arg_names if name not in constants]
    aligned = frozenset(n for n in names if n in kinds) | {"vocab", "row_stride", "W"}
    arguments = {name: kinds.get(name, "i32") for name in names}
    return Variant(label, kernel, arguments, constants, aligned, warps, DEFAULT_STAGES, registers)
