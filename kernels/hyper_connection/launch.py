"""Launches of the Triton kernels. None synchronises with the host."""

from __future__ import annotations

import torch

from kernels.hyper_connection.triton import combine
from kernels.hyper_connection.triton import down as down_kernel
from kernels.hyper_connection.triton import up as up_kernel
from kernels.hyper_connection.triton import write as write_kernel

# Legend: T tokens, C streams of H values, L low rank, S parts of a stream, X = C * H.

FEW_TOKENS, FEW_BLOCK = 64, 16
PARTS = 8  # of a stream, with few tokens
COMBINED = 64  # columns of a program, with few tokens; with many, all
COLUMNS, WARPS = 1024, 4
DOWN_STAGES = UP_STAGES = 3

Constants = dict[str, int | bool]


def down_constants(tokens: int, hidden: int, count: int, low: int, *, split_x: bool) -> Constants:
    """Of the first kernel."""
    few = tokens <= FEW_TOKENS
    parts, block_n, block_k = (PARTS, 64, 64) if few else (1, 128, 32)
    return {
        "H": hidden,
        "C": count,
        "L": low,
        "P": -(-(low + count + 1) // 8) * 8,
        "S": parts,
        "BT": FEW_BLOCK if few else 128,
        "BN": block_n,
        "BK": block_k,
        "STEPS": -(-hidden // (parts * block_k)),
        "SPLIT_X": split_x,
    }


def combine_constants(down: Constants) -> Constants:
    """Of the second kernel, from those of the first."""
    values = down["L"] + down["C"]
    block = COMBINED if down["BT"] == FEW_BLOCK else 1 << (values - 1).bit_length()
    return {name: down[name] for name in ("H", "C", "L", "P", "S")} | {"BP": block}


def up_constants(tokens: int, hidden: int, count: int, low: int, *, split_x: bool) -> Constants:
    """Of the third kernel."""
    few = tokens <= FEW_TOKENS
    block_k = 128 if few else 64
    return {
        "H": hidden,
        "C": count,
        "L": low,
        "BT": FEW_BLOCK if few else 64,
        "BN": 16 if few else 32,
        "BK": block_k,
        "STEPS": -(-low // block_k),
        "SPLIT_X": split_x,
    }


def product_warps(constants: Constants) -> int:
    """Of the first and the third kernel."""
    return WARPS if constants["BT"] == FEW_BLOCK else 2 * WARPS


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
    split_x = down_LX.dtype == torch.bfloat16
    kind = torch.bfloat16 if split_x else torch.float32
    low_STL = torch.empty(1 + split_x, tokens, low, dtype=kind, device=streams_TX.device)
    weights_TC, inverse_TC = streams_TX.new_empty(2, tokens, count)
    x_TH = torch.empty((tokens, hidden), dtype=dtype, device=streams_TX.device)
    if tokens:
        first = down_constants(tokens, hidden, count, low, split_x=split_x)
        sums = streams_TX.new_empty(count * first["S"], tokens, first["P"])
        blocks = -(-(low + count) // first["BN"])
        down_kernel[(-(-tokens // first["BT"]), count * first["S"], blocks)](
            streams_TX, norm_X, down_LX, down_LX if inject_CX is None else inject_CX, sums, tokens,
            **first, num_warps=product_warps(first), num_stages=DOWN_STAGES,
        )  # fmt: skip
        second = combine_constants(first)
        combine[(tokens, -(-(low + count) // second["BP"]))](
            sums, low_STL, weights_TC, inverse_TC, tokens, eps, **second, num_warps=WARPS
        )  # fmt: skip
        last = up_constants(tokens, hidden, count, low, split_x=split_x)
        up_kernel[(-(-tokens // last["BT"]), -(-hidden // last["BN"]))](
            streams_TX, norm_X, low_STL, up_XL, inverse_TC, x_TH, tokens, **last,
            num_warps=product_warps(last), num_stages=UP_STAGES,
        )  # fmt: skip
    return x_TH, None if inject_CX is None else weights_TC


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
