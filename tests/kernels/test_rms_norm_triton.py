"""Norm kernels against fp64 formulas: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.rms_norm import bench, launch

DEVICE = "cpu" if backend.interpreted() else "cuda"
ERROR = {torch.float32: 1e-5, torch.bfloat16: 3e-3}
GATES = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}


def exact(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, group: int | None, zero_centred: bool
) -> torch.Tensor:
    parts = x.double().unflatten(-1, (-1, group or x.shape[-1]))
    y = (parts / (parts.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)
    if weight is None:
        return y
    return y * (weight.double() + 1 if zero_centred else weight.double())


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    error = (found.cpu().double() - expected).norm()
    return bool(error <= ERROR[found.dtype] * expected.norm())


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(
    ("shape", "group"),
    [((0, 64), None), ((1,), None), ((63, 65), None), ((2, 3, 5, 128), None), ((1, 1000), None),
     ((3, 4096), None), ((65, 24), 8), ((5, 3, 40), 20), ((2, 10240), 2560)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("weighted", ["none", "plain", "zero_centred"])
def test_norm(dtype: torch.dtype, shape: tuple[int, ...], group: int | None, weighted: str) -> None:
    x = (torch.randn(shape) * 3).to(dtype)
    weight = None if weighted == "none" else torch.randn(shape[-1]).bfloat16()
    on_device = None if weight is None else weight.to(DEVICE)
    centred = weighted == "zero_centred"
    found = launch.rms_norm(x.to(DEVICE), on_device, 1e-6, group, centred, dtype)
    assert found.dtype == dtype and found.shape == x.shape
    assert near(found, exact(x, weight, 1e-6, group, centred))


def test_rows_that_lie_apart_and_another_type() -> None:
    wide = torch.randn(7, 3, 2 * 65).bfloat16()
    weight = torch.randn(65)
    on_device = wide.to(DEVICE)[..., :65]
    found = launch.rms_norm(on_device, weight.to(DEVICE), 1e-5, None, True, torch.float32)
    assert found.dtype == torch.float32
    assert near(found, exact(wide[..., :65], weight, 1e-5, None, True))


@pytest.mark.parametrize("eps", [1e-20, 1e-6])
def test_small_and_zero_rows(eps: float) -> None:
    x = torch.cat([torch.zeros(1, 96), torch.randn(1, 96) * 1e-8])
    found = launch.rms_norm(x.to(DEVICE), None, eps, None, False, torch.float32)
    assert near(found, exact(x, None, eps, None, False))
    assert not found[0].any()


@pytest.mark.parametrize("gate_type", GATES)
@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("shape", [(0, 2, 64), (1, 1, 65), (13, 5, 128)], ids=str)
def test_gated(gate_type: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[-1]).bfloat16()
    gate = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., shape[-1] :]
    width = shape[-1]
    wide = torch.cat([gate, gate], dim=-1).to(DEVICE)[..., width:]
    found = launch.rms_norm_gated(x.to(DEVICE), wide, weight.to(DEVICE), 1e-5, gate_type)
    expected = exact(x, weight, 1e-5, None, False) * GATES[gate_type](gate.double())
    assert found.dtype == dtype and near(found, expected)


def test_a_row_has_the_same_bits_alone() -> None:
    x = torch.randn(9, 200).bfloat16().to(DEVICE)
    whole = launch.rms_norm(x, None, 1e-6, None, False, torch.float32)
    alone = launch.rms_norm(x[8:], None, 1e-6, None, False, torch.float32)
    assert torch.equal(whole[8:], alone)


@pytest.mark.parametrize("make", [bench._plain, bench._gated])
def test_the_benchmark_measures_its_error(make) -> None:  # type: ignore[no-untyped-def]
    work = make((3, 2, 64), DEVICE)
    assert work.error() < work.bound
    assert bench.error(torch.ones(3), lambda: torch.zeros(3)) > work.bound


@pytest.mark.gpu
def test_a_replayed_graph() -> None:
    x = torch.randn(33, 4096, device="cuda").bfloat16()
    launch.rms_norm(x, None, 1e-6, None, False, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch.rms_norm(x, None, 1e-6, None, False, torch.bfloat16)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert near(out, exact(x.cpu(), None, 1e-6, None, False))
