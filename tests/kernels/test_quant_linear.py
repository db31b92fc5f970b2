"""Stored formats against independent decoders, and products against double precision."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from kernels.quant_linear import Fp8BlockMatrix, PlainMatrix, decode_e4m3, dequantize, linear
from kernels.quant_linear.reference import COLUMN_TILE

FINITE = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
# Byte to value, from the definition of the format.
VECTORS = {
    0x00: 0.0,
    0x01: 0.001953125,
    0x07: 0.013671875,
    0x08: 0.015625,
    0x38: 1.0,
    0x3C: 1.5,
    0x40: 2.0,
    0x7E: 448.0,
    0xB8: -1.0,
    0xFE: -448.0,
}


def random_codes(*shape: int) -> torch.Tensor:
    return FINITE[torch.randint(0, len(FINITE), shape)]


@pytest.mark.parametrize(("code", "value"), VECTORS.items())
def test_e4m3_unit_vectors(code: int, value: float) -> None:
    assert decode_e4m3(torch.tensor([code], dtype=torch.uint8)).item() == value


def test_every_finite_code_decodes_as_torch_does() -> None:
    assert torch.equal(decode_e4m3(FINITE), FINITE.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (640, 2560)])
def test_fp8_blocks_equal_the_transformers_dequantiser(
    shape: tuple[int, int], scale_type: torch.dtype
) -> None:
    codes = random_codes(*shape)
    scale = (torch.rand(shape[0] // 128, shape[1] // 128) * 1e-3).to(scale_type)
    oracle = Fp8Dequantize(None)._dequantize_one(
        codes.view(torch.float8_e4m3fn), scale, torch.float32
    )
    assert torch.equal(dequantize(Fp8BlockMatrix(codes, scale)), oracle)


@pytest.mark.parametrize("shape", [(1, 1), (100, 60), (129, 128), (200, 300)])
def test_partial_blocks_use_their_own_scale(shape: tuple[int, int]) -> None:
    n, k = shape
    codes = random_codes(n, k)
    scale = torch.rand(-(-n // 128), -(-k // 128))
    values = codes.view(torch.float8_e4m3fn).float()
    found = dequantize(Fp8BlockMatrix(codes, scale))
    for i in {0, n // 2, n - 1}:
        for j in {0, k // 2, k - 1}:
            assert found[i, j] == values[i, j] * scale[i // 128, j // 128]


def test_a_stack_of_experts_decodes_like_its_members() -> None:
    stack = Fp8BlockMatrix(random_codes(3, 256, 130), torch.rand(3, 2, 2))
    whole = dequantize(stack)
    for e in range(3):
        assert torch.equal(whole[e], dequantize(stack.expert(e)))


def test_scale_grid_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Fp8BlockMatrix(random_codes(129, 128), torch.rand(1, 1))


@pytest.mark.parametrize("rows", [1, 7, 8, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_equals_double_precision(rows: int, dtype: torch.dtype) -> None:
    x, w = torch.randn(rows, 200), torch.randn(33, 200).to(dtype)
    expected = x.double() @ w.double().t()
    torch.testing.assert_close(linear(x, PlainMatrix(w)).double(), expected, rtol=0, atol=1e-4)


def test_linear_of_a_head_wider_than_the_column_tile() -> None:
    weight = torch.randn(COLUMN_TILE + 130, 16)
    x = torch.randn(3, 16)
    torch.testing.assert_close(linear(x, PlainMatrix(weight)), x @ weight.t(), rtol=0, atol=1e-4)


def test_wide_fp8_heads_are_cut_at_blocks() -> None:
    codes, scale = random_codes(COLUMN_TILE + 130, 140), torch.rand(COLUMN_TILE // 128 + 2, 2)
    weight = Fp8BlockMatrix(codes, scale)
    x = torch.randn(2, 140)
    expected = (x.double() @ dequantize(weight).double().t()).float()
    torch.testing.assert_close(linear(x, weight), expected, rtol=1e-4, atol=0.2)


def test_output_type_follows_the_input() -> None:
    weight = PlainMatrix(torch.randn(4, 8))
    assert linear(torch.randn(2, 8).bfloat16(), weight).dtype == torch.bfloat16
    assert linear(torch.randn(2, 8).bfloat16(), weight, torch.float32).dtype == torch.float32
