"""The variants of the QSA indexer's kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.aot.variant import Variant
from kernels.paged_attention.variants import write_variant
from kernels.qsa_index import launch
from kernels.qsa_index.launch import Tile
from kernels.qsa_index.triton import mean_rows, score_blocks

# Flash-Next.
HEADS, WIDTH, RATIO = 4, 128, 4
BEST = 8  # blocks of a group of the selection, in tables of more than 32768 tokens


def variants(target: int) -> Iterator[Variant]:
    """Few and many tokens of a sequence, block means, and writes of closed blocks."""
    yield _scores(launch.FEW, 0)
    yield _scores(launch.FEW, BEST)
    yield _scores(launch.MANY, 0)
    yield _mean()
    yield write_variant("bf16", WIDTH, RATIO)


def _scores(tile: Tile, best: int) -> Variant:
    q = torch.empty(0, HEADS, WIDTH, dtype=torch.bfloat16)
    constants = launch.constants(q, q, tile, RATIO, best)
    pointers = {"q": "*bf16", "pool": "*bf16", "scores": "*fp32"}
    pointers["maxima"] = "*i32" if best else "*i64"
    pointers |= dict.fromkeys(("table", "sequence_of", "position_of"), "*i64")
    names = [name for name in score_blocks.arg_names if name not in constants]
    arguments = {name: pointers.get(name, "i32") for name in names} | {"scale": "fp32"}
    return Variant(
        f"scores {tile.tokens}x{tile.keys} of {HEADS}x{WIDTH} best {best} w{tile.warps}",
        score_blocks, arguments, constants, frozenset((*pointers, "columns", "W")), tile.warps,
        tile.stages,
    )  # fmt: skip


def _mean() -> Variant:
    return Variant(
        f"mean of {RATIO}", mean_rows, {"keys": "*bf16", "out": "*bf16", "X": "i32"},
        {"R": RATIO, "D": WIDTH, "BX": launch.MEAN_ELEMENTS}, frozenset(("keys", "out", "X")),
        launch.MEAN_WARPS, launch.STAGES,
    )  # fmt: skip
