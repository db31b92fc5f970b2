"""Launches of the Triton kernels. None synchronises with the host."""

from __future__ import annotations

import torch

from kernels.cards import Card, card_of
from kernels.hyper_connection.triton import combine, down_many, up_many
from kernels.hyper_connection.triton import down as down_few
from kernels.hyper_connection.triton import up as up_few
from kernels.hyper_connection.triton import write as write_kernel

# Legend: T tokens, C streams of H values, L low rank, S parts of a stream, X = C * H.

FEW_TOKENS, FEW_BLOCK, MANY_BLOCK = 64, 16, 64
MOST_PARTS = 8  # of a stream
COMBINED = 64  # columns of a program, with few tokens; with many, all
COLUMNS, WARPS = 1024, 4
FEW_STAGES = UP_STAGES = 3
MANY_OUTPUTS, MOST_TILES, MANY_DEPTH = 64, 5, 16  # of `down_many`: those of a tile, tiles, inputs

Constants = dict[str, int | bool]


def is_few(tokens: int) -> bool:
    """Whether there is less work in the tokens than in the matrices."""
    return tokens <= FEW_TOKENS


def parts(tokens: int, count: int, card: Card) -> int:
    """Of a stream: with many tokens as many programs as the card holds, two a multiprocessor."""
    if is_few(tokens):
        return MOST_PARTS
    fit = 2 * card.multiprocessors // (-(-tokens // MANY_BLOCK) * count)
    return min(MOST_PARTS, 1 << max(0, fit.bit_length() - 1))


def sum_columns(low: int, count: int) -> int:
    """Columns of the sums: products with both matrices and squares, filled up to whole eights."""
    return -(-(low + count + 1) // 8) * 8


def down_constants(tokens: int, hidden: int, count: int, low: int, *, split_x: bool) -> Constants:
    """Of the first kernel: `down` with few tokens, else `down_many`."""
    sizes = {"H": hidden, "C": count, "L": low, "P": sum_columns(low, count)}
    if is_few(tokens):
        steps = -(-hidden // (MOST_PARTS * 64))
        tile = {"S": MOST_PARTS, "BT": FEW_BLOCK, "BN": 64, "BK": 64, "STEPS": steps}
    else:
        tiles = min(MOST_TILES, -(-low // MANY_OUTPUTS))
        rows = {"BN": MANY_OUTPUTS, "NB": tiles, "BC": max(8, count)}
        tile = rows | {"BT": MANY_BLOCK, "BK": MANY_DEPTH}
    return sizes | tile | {"SPLIT_X": split_x}


def down_stages(tokens: int, card: Card) -> int:
    """Of the first kernel: with many tokens as many as leave room for two programs."""
    return FEW_STAGES if is_few(tokens) else 5 if card.shared_bytes >= 128 << 10 else 4


def combine_constants(tokens: int, hidden: int, count: int, low: int, parts: int) -> Constants:
    """Of the second kernel."""
    values = low + count
    block = COMBINED if is_few(tokens) else 1 << (values - 1).bit_length()
    sizes = {"H": hidden, "C": count, "L": low, "P": sum_columns(low, count)}
    return sizes | {"S": parts, "BP": block}


def up_constants(tokens: int, hidden: int, count: int, low: int, *, split_x: bool) -> Constants:
    """Of the third kernel: `up` with few tokens, else `up_many`."""
    block_t, block_n, block_k = (FEW_BLOCK, 16, 128) if is_few(tokens) else (MANY_BLOCK, 32, 32)
    sizes = {"H": hidden, "C": count, "L": low}
    tile = {"BT": block_t, "BN": block_n, "BK": block_k, "STEPS": -(-low // block_k)}
    return sizes | tile | {"SPLIT_X": split_x}


def read(
    streams_TX: torch.Tensor,
    norm_X: torch.Tensor,
    down_LX: torch.Tensor,
    up_XL: torch.Tensor,
    inject_CX: torch.Tensor | None,
    count: int,
    eps: float,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [T, H] in `dtype` and fp32 weights [T, C]: three launches. See `hyper_read`.

    The matrices are of one type, contiguous; products with bf16 matrices take the fp32 values as
    sums of two bf16 values, whose relative error is 2^-18.
    """
    tokens, hidden, low = len(streams_TX), norm_X.shape[0] // count, down_LX.shape[0]
    streams_TX = streams_TX.contiguous()
    matrices = [down_LX, up_XL] + ([] if inject_CX is None else [inject_CX])
    assert all(m.is_contiguous() and m.dtype == down_LX.dtype for m in matrices)
    assert streams_TX.dtype == torch.float32 and count & (count - 1) == 0
    assert inject_CX is not None or low >= count, "rows of `down` are read in place of `inject`"
    split_x = down_LX.dtype == torch.bfloat16
    kind = torch.bfloat16 if split_x else torch.float32
    low_STL = torch.empty(1 + split_x, tokens, low, dtype=kind, device=streams_TX.device)
    weights_TC, inverse_TC = streams_TX.new_empty(2, tokens, count)
    x_TH = torch.empty((tokens, hidden), dtype=dtype, device=streams_TX.device)
    if tokens:
        pieces = parts(tokens, count, card_of(streams_TX.device))
        sums = streams_TX.new_empty(count * pieces, tokens, sum_columns(low, count))
        injected = down_LX if inject_CX is None else inject_CX
        _down(streams_TX, norm_X, down_LX, injected, sums, pieces)
        second = combine_constants(tokens, hidden, count, low, pieces)
        combine[(tokens, -(-(low + count) // second["BP"]))](
            sums, low_STL, weights_TC, inverse_TC, tokens, eps, **second, num_warps=WARPS
        )  # fmt: skip
        last = up_constants(tokens, hidden, count, low, split_x=split_x)
        kernel = up_few if is_few(tokens) else up_many
        kernel[(-(-tokens // last["BT"]), -(-hidden // last["BN"]))](
            streams_TX, norm_X, low_STL, up_XL, inverse_TC, x_TH, tokens, **last,
            num_warps=WARPS, num_stages=UP_STAGES,
        )  # fmt: skip
    return x_TH, None if inject_CX is None else weights_TC


def _down(
    streams_TX: torch.Tensor,
    norm_X: torch.Tensor,
    down_LX: torch.Tensor,
    inject_CX: torch.Tensor,
    sums: torch.Tensor,
    pieces: int,
) -> None:
    """Sums [C S, T, P] of every part."""
    tokens, low = len(streams_TX), len(down_LX)
    count = len(sums) // pieces
    hidden = norm_X.shape[0] // count
    split_x = down_LX.dtype == torch.bfloat16
    first = down_constants(tokens, hidden, count, low, split_x=split_x)
    options = {"num_warps": WARPS, "num_stages": down_stages(tokens, card_of(norm_X.device))}
    arguments = (streams_TX, norm_X, down_LX, inject_CX, sums, tokens)
    blocks_t = -(-tokens // first["BT"])
    if is_few(tokens):
        grid = (blocks_t, count * pieces, -(-(low + count) // first["BN"]))
        down_few[grid](*arguments, **first, **options)
    else:
        steps = -(-hidden // (pieces * first["BK"]))
        grid = (blocks_t, count * pieces, -(-low // (first["BN"] * first["NB"])))
        down_many[grid](*arguments, pieces, steps, **first, **options)


def write(streams_TX: torch.Tensor, y_TH: torch.Tensor, inject_TC: torch.Tensor) -> torch.Tensor:
    """fp32 [T, X]: one launch."""
    streams_TX, y_TH, inject_TC = (t.contiguous() for t in (streams_TX, y_TH, inject_TC))
    tokens, hidden = y_TH.shape
    out = torch.empty(streams_TX.shape, dtype=torch.float32, device=streams_TX.device)
    if tokens:
        write_kernel[(tokens, -(-hidden // COLUMNS))](
            streams_TX, y_TH, inject_TC, out, hidden, C=inject_TC.shape[1], BLOCK=COLUMNS,
            num_warps=WARPS,
        )  # fmt: skip
    return out
