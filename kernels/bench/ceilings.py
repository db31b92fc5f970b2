"""What the card gives at most: copied bytes, and bf16 products by Triton on the same path."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from functools import partial

import torch

from kernels.bench.case import Work
from kernels.bench.timing import elapsed, time_calls
from kernels.bench.triton import product

COPIED_BYTES = 1 << 31
HOST_BYTES = 1 << 28
COPIES = 9
EDGE = 4096
# BM, BN, BK, warps, stages: the best tiles known for mma.sync and for wgmma.
TILES = ((128, 256, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 64, 8, 3))
BAND = 8
MAX_ERROR = 3e-3


@dataclass(frozen=True)
class Ceilings:
    """copy: GB/s read and written; host: GB/s of a copy from page-locked memory to the card;
    mma: bf16 TFLOP/s of Triton's lowering, as overridden.
    """

    copy_gbs: float
    host_gbs: float
    mma_tflops: float
    library_tflops: float

    def floor_us(self, work: Work) -> float:
        """The least time that moving the bytes of `work` and doing its operations can take."""
        memory, host = work.nbytes / self.copy_gbs, work.host_nbytes / self.host_gbs
        return max(memory / 1e3, host / 1e3, work.flops / self.mma_tflops / 1e6)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def _copy_rate() -> float:
    """GB/s read and written, outside a graph, where a copy would go to the slower copy engines."""
    source = torch.randint(0, 255, (COPIED_BYTES,), dtype=torch.uint8, device="cuda")
    return 2 * COPIED_BYTES / _copy_us(source, torch.empty_like(source)) / 1e3


def _host_rate() -> float:
    source = torch.zeros(HOST_BYTES, dtype=torch.uint8).pin_memory()
    return HOST_BYTES / _copy_us(source, torch.empty_like(source, device="cuda")) / 1e3


def _copy_us(source: torch.Tensor, target: torch.Tensor) -> float:
    target.copy_(source)
    copies = (elapsed(lambda: target.copy_(source, non_blocking=True)) for _ in range(COPIES))
    return statistics.median(copies)


def measure() -> Ceilings:
    shape = (EDGE, EDGE)
    a, b = ([_normal(shape) for _ in range(3)] for _ in range(2))
    flops = 2.0 * EDGE**3
    library = time_calls([partial(torch.mm, a[i], b[i].t()) for i in range(3)], 20_000.0)
    best = min(_product_time(a, b, *tile) for tile in TILES)
    mma, by_library = flops / best / 1e6, flops / library.microseconds / 1e6
    return Ceilings(_copy_rate(), _host_rate(), mma, by_library)


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
