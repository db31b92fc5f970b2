"""The product that sets the compute ceiling."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(
    a, b, c, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BAND: tl.constexpr
):
    """c[M, N] = a[M, K] b[N, K]^T in bf16; whole tiles only."""
    across = N // BN
    tile = tl.program_id(0)
    band, within = tile // (BAND * across), tile % (BAND * across)
    row = (band * BAND + within % BAND) * BM + tl.arange(0, BM)
    column = (within // BAND) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        left = tl.load(a + row[:, None] * K + (start + k)[None, :])
        right = tl.load(b + column[None, :] * K + (start + k)[:, None])
        acc = tl.dot(left, right, acc)
    tl.store(c + row[:, None] * N + column[None, :], acc.to(tl.bfloat16))
