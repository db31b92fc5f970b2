"""Pointwise kernels against fp64 formulas: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import backend
from kernels.activation import bench, launch

DEVICE = "cpu" if backend.interpreted() else "cuda"
EXACT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "softplus": lambda x: x.clamp_min(0.0) + torch.log1p((-x.abs()).exp()),
}
ERROR = {torch.float32: 1e-5, torch.bfloat16: 3e-3}


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("shape", [(0,), (1,), (63, 65), (3, 1000)], ids=str)
def test_pointwise(kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape) * 6).to(dtype)
    found = launch.pointwise(x.to(DEVICE), kind).cpu()
    assert found.dtype == torch.float32 and found.shape == x.shape
    torch.testing.assert_close(found.double(), EXACT[kind](x.double()), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("kind", EXACT)
def test_limits_and_nan(kind: str) -> None:
    x = torch.tensor([-1e4, -200.0, -88.0, 0.0, 88.0, 1e4, torch.nan])
    found = launch.pointwise(x.to(DEVICE), kind).cpu().double()
    exact = EXACT[kind](x.double())
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("limit", [None, 2.5])
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (3, 65), (2, 1000), (2, 1030)], ids=str)
def test_product(dtype: torch.dtype, limit: float | None, shape: tuple[int, int]) -> None:
    both = (torch.randn(shape[0], 2 * shape[1]) * 4).to(dtype)
    gate, up = both.chunk(2, dim=1)
    on_device = both.to(DEVICE).chunk(2, dim=1)
    found = launch.silu_and_mul(*on_device, limit).cpu()
    g, u = gate.double(), up.double()
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    exact = torch.nn.functional.silu(g) * u
    assert found.dtype == dtype and found.shape == exact.shape
    assert (found.double() - exact).norm() <= ERROR[dtype] * exact.norm()


def test_product_keeps_nan() -> None:
    nan, one = torch.full((1, 3), torch.nan, device=DEVICE), torch.ones(1, 3, device=DEVICE)
    assert launch.silu_and_mul(nan, one, 1.0).isnan().all()
    assert launch.silu_and_mul(one, nan, 1.0).isnan().all()


def test_the_benchmark_measures_its_error() -> None:
    work = bench._work(2, 64, DEVICE)
    assert work.error() < work.bound
    gate, up = bench._pair(2, 64, DEVICE)
    assert bench.error(gate, up, lambda: torch.zeros_like(gate)) > work.bound


@pytest.mark.gpu
def test_a_replayed_graph() -> None:
    gate, up = torch.randn(2, 33, 2048, device="cuda").bfloat16()
    launch.silu_and_mul(gate, up, 10.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch.silu_and_mul(gate, up, 10.0)
    gate.copy_(torch.randn_like(gate))
    graph.replay()
    assert torch.equal(out, launch.silu_and_mul(gate, up, 10.0))
