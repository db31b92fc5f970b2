"""Tile sizes of the experts' kernels.

As in kernels/quant_linear/tuned.json for as many rows, without a split of K: many experts fill a
card. They fit 99 KB of shared memory, so one table serves all cards.
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
# Rows of an MXFP4 matrix from which on one warp of a program with less of each is faster.
MANY_OUTPUTS = 2048
VECTOR_LOADS = 8  # of 16 bytes, by a thread at a time
# Rows of a program at most: more of INT4 with zero points do not fit a thread's registers.
VECTOR_ROWS = {"mxfp4": 32, "int4": 16, "fp8": 32}
# Programs of the second vector kernel that fill a card with one token.
ENOUGH_PROGRAMS = 2048
# Mean rows of an expert up to which the first, second and third tile of a format are taken.
FEW_ROWS, SOME_ROWS, MANY_ROWS = 12, 24, 128
FEW = 16  # rows of the first tile


def _tile(rows: int, outputs: int, block_bytes: int, stages: int = 3, warps: int = 4) -> Config:
    # Few rows cost little to scale in fp32, which is exact.
    return Config(
        "matrix", outputs, block_bytes, warps, rows, stages=stages, scale_weight=rows > FEW
    )


# Wider than high: each warp then decodes weights of its own.
LARGE = _tile(128, 256, 64, 3, 8)
MATRIX_TILES = {
    "mxfp4": (_tile(16, 128, 64), _tile(32, 128, 64), _tile(64, 128, 64), LARGE),
    "int4": (_tile(16, 128, 64), _tile(32, 128, 64), _tile(64, 128, 64), _tile(64, 256, 64, 3, 8)),
    "fp8": (_tile(16, 64, 128), _tile(32, 128, 64), _tile(64, 128, 64), LARGE),
    "plain": (_tile(16, 64, 64), _tile(32, 64, 64), _tile(64, 128, 32), _tile(64, 128, 32)),
}


def vector_tile(weights: str, row_bytes: int, outputs: int) -> Config:
    """The blocks that waste least of `outputs` rows of `row_bytes`; the largest of such."""
    largest = 512 if weights == "mxfp4" and outputs >= MANY_OUTPUTS else VECTOR_BLOCKS[weights][0]
    blocks = (size for size in VECTOR_BLOCKS[weights] if size <= largest)
    block = min(blocks, key=lambda size: (-row_bytes % size, -size))
    warps = max(1, block // 512)
    rows = min(VECTOR_ROWS[weights], VECTOR_LOADS * 512 * warps // block)
    return Config("vector", rows, block, warps, stages=1)


def expert_splits(tiles: int, top_k: int) -> int:
    """Programs that share the experts of a token: so many that one token fills a card.

    The same for more tokens, whose sums then have the same order.
    """
    wanted = min(top_k, -(-ENOUGH_PROGRAMS // tiles))
    each = -(-top_k // wanted)
    return -(-top_k // each)


def matrix_tile(weights: str, pairs: int, experts: int) -> Config:
    """For `pairs` rows over `experts` experts, about as many to each."""
    limits = (FEW_ROWS, SOME_ROWS, MANY_ROWS)
    return MATRIX_TILES[weights][sum(pairs > limit * experts for limit in limits)]
