"""Stored four-bit formats against vectors of their definitions, and the kernels' order of codes."""

from __future__ import annotations

import pytest
import torch

from kernels.quant_linear import (
    Fp8BlockMatrix,
    Int4Matrix,
    Mxfp4Matrix,
    dequantize,
    from_compressed_tensors,
    linear,
    prepare,
    zeros_of_compressed_tensors,
)


def words(*values: int) -> torch.Tensor:
    """int32 words of unsigned values."""
    return torch.tensor(values, dtype=torch.int64).to(torch.int32)


def test_packed_int4_words_hold_k_from_the_lowest_bits() -> None:
    packed = words(0xFEA98710, 0, 0, 0).view(1, 4)
    matrix = from_compressed_tensors(packed, torch.full((1, 1), 0.5), None, 32)
    assert dequantize(matrix)[0, :8].tolist() == [-4.0, -3.5, -0.5, 0.0, 0.5, 1.0, 3.0, 3.5]


def test_packed_zero_points_lie_along_the_rows() -> None:
    packed = torch.zeros(16, 4, dtype=torch.int32)
    zero_points = words(0x76543210, 0xFEDCBA98).view(2, 1)
    zero = zeros_of_compressed_tensors(zero_points, 16)
    matrix = from_compressed_tensors(packed, torch.ones(16, 1), zero, 32)
    assert matrix.zero is not None
    assert matrix.zero[:, 0].tolist() == list(range(16))
    assert dequantize(matrix)[:, 0].tolist() == [-float(zero) for zero in range(16)]


def test_packed_zero_points_of_a_partial_last_word() -> None:
    zero_points = words(0x76543210, 0x00000098).view(2, 1)
    packed = torch.zeros(10, 4, dtype=torch.int32)
    zero = zeros_of_compressed_tensors(zero_points, 10)
    matrix = from_compressed_tensors(packed, torch.ones(10, 1), zero, 32)
    assert dequantize(matrix)[9, 0] == -9.0


def test_mxfp4_takes_the_low_nibble_first_and_a_power_of_two() -> None:
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, 0] = 0x7A
    matrix = Mxfp4Matrix(codes, torch.tensor([[0x7D]], dtype=torch.uint8))
    assert dequantize(matrix)[0, :2].tolist() == [-0.25, 1.5]


def test_every_e2m1_code() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    matrix = Mxfp4Matrix(codes[None], torch.tensor([[127]], dtype=torch.uint8))
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert dequantize(matrix)[0, ::2].tolist() == magnitudes + [-value for value in magnitudes]


def test_fp8_scales_may_be_powers_of_two() -> None:
    codes = torch.full((1, 4), 0x38, dtype=torch.uint8)  # 1.0
    scale = torch.tensor([[121]], dtype=torch.uint8)
    assert dequantize(Fp8BlockMatrix(codes, scale)).tolist() == [[0.015625] * 4]


@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (3, 7, 64)])
def test_preparing_changes_the_order_of_codes_but_no_value(shape: tuple[int, ...]) -> None:
    *lead, k = shape
    codes = torch.randint(0, 256, (*lead, k // 2), dtype=torch.uint8)
    scale = torch.randint(110, 125, (*lead, k // 32), dtype=torch.uint8)
    matrix = Mxfp4Matrix(codes, scale)
    ready = prepare(matrix)
    assert isinstance(ready, Mxfp4Matrix) and ready.order == "fragments"
    assert not torch.equal(ready.codes, codes)
    assert torch.equal(dequantize(ready), dequantize(matrix))
    assert torch.equal(prepare(ready).codes, ready.codes)  # type: ignore[union-attr]


def test_an_expert_of_a_stack_keeps_its_zero_points() -> None:
    stack = Int4Matrix(
        torch.randint(0, 256, (3, 4, 32), dtype=torch.uint8),
        torch.rand(3, 4, 2),
        torch.randint(0, 16, (3, 4, 2), dtype=torch.uint8),
        32,
    )
    assert torch.equal(dequantize(stack.expert(1)), dequantize(stack)[1])


def test_linear_multiplies_four_bit_matrices_and_fills_a_given_output() -> None:
    matrix = Int4Matrix(torch.randint(0, 256, (40, 64), dtype=torch.uint8), torch.rand(40, 1))
    x = torch.randn(3, 128)
    out = torch.full((3, 40), torch.nan)
    assert linear(x, matrix, out=out) is out
    torch.testing.assert_close(out, x @ dequantize(matrix).t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("group", [48, 256])
def test_groups_that_do_not_fit_are_refused(group: int) -> None:
    with pytest.raises(ValueError):
        Int4Matrix(torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 1), None, group)
