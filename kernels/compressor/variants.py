"""The variants of the compressor's kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from kernels.aot.variant import Variant
from kernels.cache_rows import COMPRESSED_ROWS, INDEX_ROWS, RowFormat, latent_rows
from kernels.compressor import launch
from kernels.compressor.triton import pool_rows, store_entries, write_entries

ANGLES = 32
POOLED = ((4, True), (128, False), (2, False))
POOLED_TOKENS = STORED_TOKENS = (1, 4096)
# Width, ratio, form and rotation of entries and index keys of DeepSeek-V4 and V4.1.
STORED: tuple[tuple[str, int, int, RowFormat | None, bool], ...] = (
    ("V4 entries", 512, 4, latent_rows(512, 64), False),
    ("V4 entries", 512, 128, latent_rows(512, 64), False),
    ("V4 keys", 128, 4, INDEX_ROWS, True),
    ("V4.1 entries", 512, 2, COMPRESSED_ROWS, False),
    ("bf16 entries", 512, 4, None, False),
)
SIZES = ("T", "sequences", "width", "pages", "shift")
PLACES = ("table", "sequence_of", "positions")


def variants(target: int) -> Iterator[Variant]:
    """Pooling at the served ratios, finishing of each kind of entry, and copies of ready rows."""
    for (ratio, overlap), tokens in product(POOLED, POOLED_TOKENS):
        floats = ("rows", "scores", "state")
        numbers = ("starts", "positions", "write_token")
        arguments = dict.fromkeys(floats, "*fp32") | dict.fromkeys(numbers, "*i64")
        arguments |= dict.fromkeys(("entries", "states"), "*fp32")
        arguments |= dict.fromkeys(("T", "B", "D"), "i32")
        constants = launch.pool_constants(tokens, ratio, overlap=overlap)
        yield Variant(
            f"pool_rows {ratio} T={tokens}", pool_rows, arguments, constants,
            frozenset(arguments) - {"T", "B"}, launch.POOL_WARPS,
            launch.STAGES,
        )  # fmt: skip
    for entry, tokens in product(STORED, STORED_TOKENS):
        yield _stored(tokens, *entry)
    for kind, ratio in (("u8", 2), ("bf16", 2)):
        arguments = {"entries": f"*{kind}", "pool": f"*{kind}"} | dict.fromkeys(PLACES, "*i64")
        pointers = frozenset(arguments)
        arguments |= dict.fromkeys((*SIZES, "X"), "i32")
        yield Variant(
            f"write_entries {kind}", write_entries, arguments,
            {"RATIO": ratio, "BX": launch.COPIED}, pointers, launch.WARPS, launch.STAGES,
        )  # fmt: skip


def _stored(
    tokens: int, name: str, width: int, ratio: int, form: RowFormat | None, rotated: bool
) -> Variant:
    pool = "*bf16" if form is None else "*u8"
    tail = "*bf16" if form is None or form.plain else "*u8"
    arguments = {"entries": "*fp32", "weight": "*bf16", "cos": "*fp32", "sin": "*fp32"}
    arguments |= {"pool": pool, "pool_tail": tail} | dict.fromkeys(PLACES, "*i64")
    pointers = frozenset(arguments)
    arguments |= dict.fromkeys(SIZES, "i32") | {"eps": "fp32"}
    constants = launch.store_constants(
        tokens, width, ANGLES, ratio, torch.bfloat16, form, rotated=rotated
    )
    return Variant(
        f"store_entries {name} {ratio} T={tokens}", store_entries, arguments, constants, pointers,
        launch.WARPS, launch.STAGES,
    )  # fmt: skip
