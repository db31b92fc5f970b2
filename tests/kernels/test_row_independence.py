"""One row's result is the same bits alone, among others, and at any place among them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels.activation import sigmoid, silu, softplus
from kernels.hyper_connection import hyper_read, hyper_write
from kernels.moe import ExpertWeights, route, routed_experts
from kernels.ple import ple_gate
from kernels.quant_linear import Fp8BlockMatrix, PlainMatrix, linear
from kernels.rms_norm import rms_norm, rms_norm_gated
from kernels.rotary import apply_rotary, rotary_angles

Op = Callable[[torch.Tensor], torch.Tensor]


def assert_rows_independent(op: Op, x: torch.Tensor) -> None:
    """op maps rows to rows; every subset, in any order, must give the rows of the whole."""
    whole = op(x)
    generator = torch.Generator().manual_seed(1)
    for count in (1, 2, 3, 7, 8, 9, 16, 17, len(x)):
        for _ in range(4):
            rows = torch.randperm(len(x), generator=generator)[:count]
            assert torch.equal(op(x[rows].clone()), whole[rows]), count


def plain(n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> PlainMatrix:
    return PlainMatrix((torch.randn(n, k) / k**0.5).to(dtype))


@pytest.mark.parametrize(
    ("n", "k"),
    # Every matrix of the nano and tiny models, then some of the released widths.
    [
        *[(320, 128), (192, 128), (6, 128), (128, 192), (512, 128), (128, 128), (160, 128)],
        *[(128, 256), (16, 512), (512, 16), (4, 512), (8, 128), (256, 128), (1, 128), (1024, 128)],
        *[(768, 128), (128, 384), (640, 2560), (324, 2048), (2560, 640), (48, 5120), (1023, 129)],
    ],
)
def test_linear(n: int, k: int) -> None:
    weight = plain(n, k)
    assert_rows_independent(lambda x: linear(x, weight), torch.randn(37, k))


def test_linear_of_fp8_blocks() -> None:
    codes = torch.randint(0, 0x7F, (256, 300), dtype=torch.uint8)
    weight = Fp8BlockMatrix(codes, torch.rand(2, 3))
    assert_rows_independent(lambda x: linear(x, weight), torch.randn(33, 300))


def test_linear_with_two_threads() -> None:
    torch.set_num_threads(2)
    weight = plain(1024, 640)
    assert_rows_independent(lambda x: linear(x, weight), torch.randn(33, 640))


@pytest.mark.parametrize("op", [sigmoid, silu, softplus])
@pytest.mark.parametrize("width", [1, 6, 31, 128])
def test_activations(op: Op, width: int) -> None:
    assert_rows_independent(op, torch.randn(70, width) * 4)


@pytest.mark.parametrize("width", [16, 32, 64, 100, 128, 512, 5120])
def test_norms(width: int) -> None:
    weight = torch.randn(width)
    gate = torch.randn(29, width)
    x = torch.randn(29, width)
    assert_rows_independent(lambda x: rms_norm(x, weight, eps=1e-6), x)
    pairs = torch.stack([x, gate], dim=1)
    for kind in ("silu", "sigmoid"):
        assert_rows_independent(
            lambda p, kind=kind: rms_norm_gated(p[:, 0], p[:, 1], weight, eps=1e-6, gate_type=kind),
            pairs,
        )


def test_norm_of_head_slices() -> None:
    """As the attention layer calls it: queries are a strided view of queries and gates."""
    weight = torch.randn(64)
    assert_rows_independent(
        lambda x: rms_norm(x.view(-1, 4, 128)[..., :64], weight, eps=1e-6), torch.randn(23, 512)
    )


def test_rotary() -> None:
    frequencies = 1.0 / 1e7 ** (torch.arange(0, 16, 2).float() / 16)
    positions = torch.randint(0, 4000, (41,))
    x = torch.randn(41, 3, 32)

    def op(rows: torch.Tensor) -> torch.Tensor:
        return apply_rotary(x[rows], *rotary_angles(positions[rows], frequencies))

    assert_rows_independent(op, torch.arange(41))


@pytest.mark.parametrize(("experts", "top_k"), [(8, 3), (8, 2), (512, 10), (5, 5)])
def test_routing(experts: int, top_k: int) -> None:
    logits = torch.randn(39, experts)
    assert_rows_independent(lambda x: route(x, top_k, normalise=True)[0], logits)
    assert_rows_independent(lambda x: route(x, top_k, normalise=True)[1], logits)


def test_experts() -> None:
    weights = ExpertWeights(
        PlainMatrix(torch.randn(6, 64, 48)), PlainMatrix(torch.randn(6, 48, 32)), count=6
    )
    ids, shares = route(torch.randn(31, 6), 3, normalise=True)
    x = torch.randn(31, 48)
    assert_rows_independent(
        lambda rows: routed_experts(x[rows], ids[rows], shares[rows], weights), torch.arange(31)
    )


def test_hyper_connections() -> None:
    norm = torch.randn(256)
    down, up, inject = plain(16, 256), plain(256, 16), plain(4, 256)

    def op(streams: torch.Tensor) -> torch.Tensor:
        x, weights = hyper_read(streams, norm, down, up, inject, count=4, eps=1e-6)
        return hyper_write(streams, x, weights)

    assert_rows_independent(op, torch.randn(35, 256))


def test_ple_gate() -> None:
    packed = torch.randn(26, 3, 256)
    assert_rows_independent(lambda p: ple_gate(p[:, 0], p[:, 1], p[:, 2, :64], 4), packed)
