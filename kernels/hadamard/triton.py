"""Triton kernel of the Hadamard rotation, and the rotation for other kernels.

Legend: N rows, D values of a row, R rows of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sums_and_differences(x, R: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """[R, D] to the sums and differences of values HALF apart."""
    pairs = tl.permute(tl.reshape(x, (R, D // (2 * HALF), 2, HALF)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (R, D))


@triton.jit
def rotate(x, R: tl.constexpr, D: tl.constexpr, LOG: tl.constexpr):
    """fp32 x [R, D = 2^LOG] H / sqrt(D), in the order of the reference's sums."""
    for step in tl.static_range(LOG):
        x = _sums_and_differences(x, R, D, 2**step)
    return x * D**-0.5


@triton.jit(do_not_specialize=["N"])
def hadamard(x, out, N, D: tl.constexpr, LOG: tl.constexpr, R: tl.constexpr):
    """out [N, D] of R rows."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    mask = (row < N)[:, None]
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    turned = rotate(values, R, D, LOG)
    tl.store(out + at, turned.to(out.dtype.element_ty), mask=mask)
