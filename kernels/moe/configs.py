"""Tile sizes of the experts' kernels.

The matrix tiles are those that quant_linear's measurements found on one H200 with Ampere's
instructions for as many rows (kernels/quant_linear/tuned.json), without a split of K: many experts
fill a card. They fit 99 KB of shared memory, so one table serves all cards.
"""

from __future__ import annotations

from kernels.quant_linear.tuning import Config

# At most so many tokens go through the matrix-vector kernels: few of them share an expert.
VECTOR_TOKENS = 8
# Bytes of a row at a time.
VECTOR_BLOCKS = {
    "mxfp4": (1024, 512, 256, 128),
    "int4": (512, 256, 128),
    "fp8": (2048, 1024, 512, 256, 128),
}
VECTOR_LOADS = 8  # of 16 bytes, by a thread at a time
# Programs of the second vector kernel that fill a card.
ENOUGH_PROGRAMS = 2048
# Mean rows of an expert up to which the first and the second tile of a format are taken.
FEW_ROWS, SOME_ROWS = 12, 24


def _tile(
    rows: int, outputs: int, block_bytes: int, stages: int = 3, *, scale_weight: bool = False
) -> Config:
    return Config("matrix", outputs, block_bytes, 4, rows, stages=stages, scale_weight=scale_weight)


MATRIX_TILES = {
    "mxfp4": (_tile(16, 128, 64), _tile(32, 128, 64), _tile(64, 128, 32)),
    "int4": (
        _tile(16, 128, 64),
        _tile(32, 128, 32, 4, scale_weight=True),
        _tile(64, 128, 32, scale_weight=True),
    ),
    "fp8": (
        _tile(16, 64, 128),
        _tile(32, 128, 64, scale_weight=True),
        _tile(64, 128, 64, scale_weight=True),
    ),
    "plain": (_tile(16, 64, 64), _tile(32, 64, 64), _tile(64, 128, 32)),
}


def vector_tile(weights: str, row_bytes: int) -> Config:
    """The blocks that waste least of a row of `row_bytes`; the largest of such."""
    block = min(VECTOR_BLOCKS[weights], key=lambda size: (-row_bytes % size, -size))
    warps = max(1, block // 512)
    rows = VECTOR_LOADS * 512 * warps // block
    return Config("vector", rows, block, warps, stages=1)


def expert_splits(tokens: int, tiles: int, top_k: int) -> int:
    """Programs that share the experts of a token: more than one only where a card is not full."""
    if tokens > 1:
        return 1
    wanted = min(top_k, -(-ENOUGH_PROGRAMS // tiles))
    each = -(-top_k // wanted)
    return -(-top_k // each)


def matrix_tile(weights: str, pairs: int, experts: int) -> Config:
    """For `pairs` rows over `experts` experts, about as many to each."""
    few, some, many = MATRIX_TILES[weights]
    if pairs <= FEW_ROWS * experts:
        return few
    return some if pairs <= SOME_ROWS * experts else many
