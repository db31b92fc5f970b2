"""Rotary kernels against complex multiplication in fp64: in the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.rotary import bench, launch

DEVICE = "cpu" if backend.interpreted() else "cuda"
ERROR = {torch.float32: 1e-6, torch.bfloat16: 3e-3}
SHAPES = [
    ((0, 2, 64), 16), ((1, 1, 2), 1), ((63, 3, 64), 32), ((5, 7, 256), 32), ((3, 16, 72), 36),
    ((65, 1, 24), 5),
]  # fmt: skip


@pytest.mark.parametrize("own", [False, True], ids=["one_position", "own_positions"])
@pytest.mark.parametrize(("tokens", "count"), [(0, 32), (1, 32), (63, 18), (65, 1)])
@pytest.mark.parametrize("scaling", [1.0, 1.138629])
def test_angles(own: bool, tokens: int, count: int, scaling: float) -> None:
    positions = torch.randint(0, 1_048_576, (tokens, count if own else 1))
    frequencies = 1e4 ** -(torch.arange(count) / count)
    found = launch.rotary_angles(positions.to(DEVICE), frequencies.to(DEVICE), scaling)
    angles = (positions.float() * frequencies).double()
    for table, exact in zip(found, (angles.cos(), angles.sin()), strict=True):
        assert table.shape == (tokens, count) and table.dtype == torch.float32
        torch.testing.assert_close(table.cpu().double(), exact * scaling, rtol=0, atol=1e-6)


def tables(tokens: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(tokens, count) * 6.3
    return angles.cos() * 1.1, angles.sin() * 1.1


def near(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool((found.cpu().double() - exact).norm() <= ERROR[found.dtype] * exact.norm())


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(("shape", "count"), SHAPES, ids=str)
def test_halves(dtype: torch.dtype, shape: tuple[int, int, int], count: int) -> None:
    wide = torch.randn(*shape[:2], 2 * shape[2]).to(dtype)
    x, (cos, sin) = wide[..., : shape[2]], tables(shape[0], count)
    found = launch.apply_rotary(wide.to(DEVICE)[..., : shape[2]], cos.to(DEVICE), sin.to(DEVICE))
    assert found.dtype == dtype and near(found, bench.exact(x, cos, sin, pairs=False))
    assert torch.equal(found[..., 2 * count :].cpu(), x[..., 2 * count :])


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(("shape", "count"), SHAPES, ids=str)
def test_tail_pairs(
    inverse: bool, dtype: torch.dtype, shape: tuple[int, int, int], count: int
) -> None:
    x, (cos, sin) = torch.randn(shape).to(dtype), tables(shape[0], count)
    on_device = (x.to(DEVICE), cos.to(DEVICE), sin.to(DEVICE))
    found = launch.rotate_tail_pairs(*on_device, inverse=inverse)
    exact = bench.exact(x, cos, -sin if inverse else sin, pairs=True)
    assert found.dtype == dtype and near(found, exact)
    plain = shape[2] - 2 * count
    assert torch.equal(found[..., :plain].cpu(), x[..., :plain])


@pytest.mark.parametrize("pairs", [False, True])
def test_the_benchmark_measures_its_error(pairs: bool) -> None:
    work = bench._work((3, 2, 64), DEVICE, pairs=pairs)
    assert work.error() < work.bound
    assert bench.error(torch.ones(3), lambda: torch.zeros(3)) > work.bound


@pytest.mark.gpu
def test_a_replayed_graph() -> None:
    x = torch.randn(9, 4, 512, device="cuda").bfloat16()
    positions = torch.arange(9, device="cuda")[:, None]
    frequencies = 1e4 ** -(torch.arange(32, device="cuda") / 32)

    def call() -> torch.Tensor:
        angles = launch.rotary_angles(positions, frequencies, 1.0)
        return launch.rotate_tail_pairs(x, *angles, inverse=False)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    x.copy_(torch.randn_like(x))
    positions.add_(100_000)
    graph.replay()
    assert torch.equal(out, call())
