"""The rotation against the Sylvester matrix: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.hadamard import launch, reference

DEVICE = "cpu" if backend.interpreted() else "cuda"
ERROR = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def sylvester(width: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < width:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), matrix)
    return matrix.mul_(width**-0.5)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 2), (63, 64), (5, 7, 128), (1, 4096), (0, 128)], ids=str
)
def test_agrees_with_double_precision(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).to(dtype)
    found = launch.hadamard(x.to(DEVICE))
    exact = x.double() @ sylvester(shape[-1])
    assert found.dtype == dtype and found.shape == x.shape
    assert (found.cpu().double() - exact).norm() <= ERROR[dtype] * exact.norm()


def test_adds_in_the_order_of_the_reference() -> None:
    x = torch.randn(33, 128)
    assert torch.equal(launch.hadamard(x.to(DEVICE)).cpu(), reference.hadamard(x))


@pytest.mark.gpu
def test_a_replayed_graph() -> None:
    x = torch.randn(130, 64, 128, device="cuda").bfloat16()
    launch.hadamard(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch.hadamard(x)
    x.copy_(torch.randn(130, 64, 128))
    graph.replay()
    assert torch.equal(out.cpu(), reference.hadamard(x.cpu()))
