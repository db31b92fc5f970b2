"""The variants of the indexer's kernel that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.aot.variant import Variant
from kernels.cache_rows import INDEX_ROWS, RowFormat
from kernels.lightning_index import launch
from kernels.lightning_index.triton import BLOCKS, ENTRIES, MEMBERS, scores

HEADS, POOLED_HEADS, WIDTH = 64, 32, 128  # DeepSeek-V4, GLM-5.3
BEST = 8  # columns of a group of the selection, of most lengths, where tokens are few


def variants(target: int) -> Iterator[Variant]:
    """DeepSeek-V4 and V4.1 (entries, blocks, entries of named blocks) and pooled keys of GLM, with
    each number of tokens of a program, and in short rows, where the selection has no groups.
    """
    coded, plain, codes = _coded(INDEX_ROWS), _plain(torch.bfloat16), _plain(torch.uint8)
    for each, best in ((1, BEST), (launch.SOME, BEST), (launch.BLOCK_TOKENS, 0)):
        yield _variant("e2m1", coded, each, best)
        yield _variant("e2m1", coded, each, best, BLOCKS, 8)
        yield _variant("e4m3", codes, each, best, ENTRIES, 4, pooled=True)
        yield _variant("bf16", plain, each, best, ENTRIES, 4, pooled=True)
    yield _variant("e2m1", coded, 1, BEST, MEMBERS, 8)
    yield _variant("e2m1", coded, 1, 0)
    yield _variant("bf16", plain, launch.BLOCK_TOKENS, 0)


def _coded(form: RowFormat) -> launch.Keys:
    pool = torch.empty(0, 64, form.row_bytes(WIDTH), dtype=torch.uint8)
    return launch.Keys(pool, torch.empty(0, 0), form)


def _plain(dtype: torch.dtype) -> launch.Keys:
    scale = torch.empty(0, 64, 1) if dtype == torch.uint8 else None
    return launch.Keys(torch.empty(0, 64, WIDTH, dtype=dtype), torch.empty(0, 0), None, scale)


def _variant(
    name: str,
    keys: launch.Keys,
    each: int,
    best: int,
    mode: int = ENTRIES,
    unit: int = 1,
    *,
    pooled: bool = False,
) -> Variant:
    pool = "*bf16" if keys.pool.dtype == torch.bfloat16 else "*u8"
    numbers = ("table", "sequence_of", "lengths", "names")
    sizes = ("T", "H", "N", "W", "blocks", "sequences", "width", "pages", "shift", "least")
    arguments = (
        {"q": "*bf16", "weights": "*fp32", "pool": pool, "key_scale": "*fp32"}
        | dict.fromkeys(numbers, "*i64")
        | {"out": "*fp32", "maxima": "*i32" if best else "*i64"}
        | dict.fromkeys(sizes, "i32")
        | {"factor": "fp32"}
    )
    stored = keys.constants(WIDTH)
    heads = POOLED_HEADS if pooled else HEADS
    constants = launch.constants(stored, WIDTH, heads, each, mode, unit, best, pooled=pooled)
    aligned = frozenset(arguments) - (frozenset(sizes) - {"N", "W"}) - {"factor"}
    return Variant(
        f"index {name} {each} tokens mode {mode}/{unit} best {best}{' pooled' if pooled else ''}",
        scores,
        arguments, constants, aligned, launch.WARPS, launch.STAGES,
    )  # fmt: skip
