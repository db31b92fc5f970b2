"""What the card gives at most: copied bytes, and bf16 products by Triton on the same path."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl

from kernels.bench.timing import time_calls

COPIED_BYTES = 1 << 31
EDGE = 4096
# BM, BN, BK, warps, stages: the best tiles known for mma.sync and for wgmma.
TILES = ((128, 256, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 64, 8, 3))
BAND = 8
MAX_ERROR = 3e-3


@triton.jit
def _product(
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


@dataclass(frozen=True)
class Ceilings:
    """copy: GB/s read and written; mma: bf16 TFLOP/s of Triton's lowering, as overridden."""

    copy_gbs: float
    mma_tflops: float
    library_tflops: float

    def floor_us(self, nbytes: float, flops: float) -> float:
        """The least time that moving `nbytes` and doing `flops` can take."""
        return max(nbytes / self.copy_gbs / 1e3, flops / self.mma_tflops / 1e6)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def measure() -> Ceilings:
    source = torch.randint(0, 255, (COPIED_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copied = time_calls([lambda: target.copy_(source)], rounds=7)
    copy_gbs = 2 * COPIED_BYTES / copied.microseconds / 1e3
    del source, target
    shape = (EDGE, EDGE)
    a, b = ([_normal(shape) for _ in range(3)] for _ in range(2))
    flops = 2.0 * EDGE**3
    library = time_calls([lambda i=i: a[i] @ b[i].t() for i in range(3)], 20_000.0)
    best = min(_product_time(a, b, *tile) for tile in TILES)
    return Ceilings(copy_gbs, flops / best / 1e6, flops / library.microseconds / 1e6)


def _normal(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def _product_time(
    a: list[torch.Tensor], b: list[torch.Tensor], bm: int, bn: int, bk: int, warps: int, stages: int
) -> float:
    c = torch.full((EDGE, EDGE), torch.nan, dtype=torch.bfloat16, device="cuda")
    grid = (EDGE // bm * (EDGE // bn),)

    def call(i: int) -> None:
        _product[grid](
            a[i], b[i], c, EDGE, EDGE, bm, bn, bk, BAND, num_warps=warps, num_stages=stages
        )

    call(0)
    expected = a[0].float() @ b[0].float().t()
    error = (c.float() - expected).norm() / expected.norm()
    if not error < MAX_ERROR:
        raise RuntimeError(f"the ceiling's product is wrong by {float(error)}")
    return time_calls([lambda i=i: call(i) for i in range(3)], 20_000.0).microseconds
