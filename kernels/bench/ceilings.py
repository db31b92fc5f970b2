"""What the card gives at most: copied bytes, and bf16 products by Triton on the same path."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from functools import partial

import torch

from kernels.bench.timing import elapsed, time_calls
from kernels.bench.triton import product

COPIED_BYTES = 1 << 31
COPIES = 9
EDGE = 4096
# BM, BN, BK, warps, stages: the best tiles known for mma.sync and for wgmma.
TILES = ((128, 256, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 64, 8, 3))
BAND = 8
MAX_ERROR = 3e-3


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


def _copy_rate() -> float:
    """GB/s read and written, outside a graph, where a copy would go to the slower copy engines."""
    source = torch.randint(0, 255, (COPIED_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    copied = statistics.median(elapsed(lambda: target.copy_(source)) for _ in range(COPIES))
    return 2 * COPIED_BYTES / copied / 1e3


def measure() -> Ceilings:
    shape = (EDGE, EDGE)
    a, b = ([_normal(shape) for _ in range(3)] for _ in range(2))
    flops = 2.0 * EDGE**3
    library = time_calls([partial(torch.mm, a[i], b[i].t()) for i in range(3)], 20_000.0)
    best = min(_product_time(a, b, *tile) for tile in TILES)
    return Ceilings(_copy_rate(), flops / best / 1e6, flops / library.microseconds / 1e6)


def _normal(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def _product_time(
    a: list[torch.Tensor], b: list[torch.Tensor], bm: int, bn: int, bk: int, warps: int, stages: int
) -> float:
    c = torch.full((EDGE, EDGE), torch.nan, dtype=torch.bfloat16, device="cuda")
    grid = (EDGE // bm * (EDGE // bn),)

    def call(i: int) -> None:
        product[grid](
            a[i], b[i], c, EDGE, EDGE, bm, bn, bk, BAND, num_warps=warps, num_stages=stages
        )

    call(0)
    expected = a[0].float() @ b[0].float().t()
    error = (c.float() - expected).norm() / expected.norm()
    if not error < MAX_ERROR:
        raise RuntimeError(f"the ceiling's product is wrong by {float(error)}")
    return time_calls([partial(call, i) for i in range(3)], 20_000.0).microseconds
