"""Every stored form of a matrix against decoders of other packages, exactly."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from kernels.quant_linear import (
    Fp8BlockMatrix,
    Int4Matrix,
    Matrix,
    Mxfp4Matrix,
    dequantize,
    from_auto_awq,
    from_compressed_tensors,
    linear,
    prepare,
    scale_values,
    zeros_of_compressed_tensors,
)
from tests.kernels.test_quant_linear_triton import (
    FP32_ERROR,
    MATRIX,
    VECTOR,
    activations,
    error,
    run,
)
from tests.kernels.test_quant_linear_triton import ROUNDED_ERROR as ROUNDED

pytest.importorskip("compressed_tensors")  # for tests alone: a machine with a card may lack it

from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

from tests.models.int4 import unpack_awq

GROUPS = [32, 64, 128]


def bytes_of(*shape: int, seed: int = 0, low: int = 0, high: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def words_of(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random int32 words, negative ones among them."""
    return bytes_of(*shape[:-1], 4 * shape[-1], seed=seed).view(torch.int32)


def e4m3_of(*shape: int) -> torch.Tensor:
    """Random finite codes."""
    codes = bytes_of(*shape)
    return codes.masked_fill_((codes & 0x7F) == 0x7F, 0x7E)


def test_every_e8m0_code_equals_torchs_own_type() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e8m0fnu).float()
    torch.testing.assert_close(scale_values(codes), expected, rtol=0, atol=0, equal_nan=True)
    assert scale_values(codes)[0] == 2.0**-127 and expected[255].isnan()


@pytest.mark.parametrize("rows", [1, 8, 251])
def test_mxfp4_equals_transformers(rows: int) -> None:
    codes, scale = bytes_of(rows, 256), bytes_of(rows, 16, seed=1, high=253)
    expected = Fp8Dequantize(None)._dequantize_one(
        codes.view(torch.int8), scale.view(torch.float8_e8m0fnu), torch.float32
    )
    assert expected.isfinite().all()
    assert torch.equal(dequantize(Mxfp4Matrix(codes, scale)), expected)


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("shape", [(256, 384), (200, 333)])
def test_fp8_with_e8m0_scales_equals_transformers(block: int, shape: tuple[int, int]) -> None:
    rows, columns = -(-shape[0] // block), -(-shape[1] // block)
    codes, scale = e4m3_of(*shape), bytes_of(rows, columns, seed=1, low=90, high=150)
    whole = torch.zeros(rows * block, columns * block, dtype=torch.uint8)
    whole[: shape[0], : shape[1]] = codes
    expected = Fp8Dequantize(None)._dequantize_one(
        whole.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu), torch.float32
    )
    found = dequantize(Fp8BlockMatrix(codes, scale, block, block))
    assert torch.equal(found, expected[: shape[0], : shape[1]])


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", [1, 13, 64])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_compressed_tensors_words_hold_what_its_packer_took(
    group: int, rows: int, asymmetric: bool
) -> None:
    codes = bytes_of(rows, 256, high=16).to(torch.int8) - 8
    scale = torch.rand(rows, 256 // group).bfloat16()
    points = bytes_of(rows, 256 // group, seed=1, high=16).to(torch.int8) - 8
    points = points if asymmetric else torch.zeros_like(points)
    packed = pack_to_int32(points, 4, packed_dim=0).contiguous()
    zero = zeros_of_compressed_tensors(packed, rows) if asymmetric else None
    found = dequantize(from_compressed_tensors(pack_to_int32(codes, 4), scale, zero, group))
    spread = [t.float().repeat_interleave(group, 1) for t in (points, scale)]
    assert torch.equal(found, (codes.float() - spread[0]) * spread[1])


def test_auto_awq_words_hold_columns_in_their_documented_places() -> None:
    words = torch.tensor([[0x75316420, 0xFDB9ECA8]], dtype=torch.int64).to(torch.int32)
    matrix = from_auto_awq(words.expand(32, 2), torch.ones(1, 16), words, 32)
    assert matrix.zero is not None and matrix.zero[:, 0].tolist() == list(range(16))
    symmetric = from_auto_awq(words.expand(32, 2), torch.ones(1, 16), None, 32)
    assert dequantize(symmetric)[:, 5].tolist() == [float(n - 8) for n in range(16)]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("outputs", [8, 72])
def test_auto_awq_equals_the_converter_of_compressed_tensors(group: int, outputs: int) -> None:
    qweight, qzeros = words_of(256, outputs // 8), words_of(256 // group, outputs // 8, seed=1)
    scales = torch.rand(256 // group, outputs).half()
    codes, scale, zero = AutoAWQConverter(group_size=group)._convert_gemm_module(
        qweight, scales, qzeros
    )
    spread = [t.float().repeat_interleave(group, 1) for t in (zero, scale)]
    found = from_auto_awq(qweight, scales, qzeros, group)
    assert torch.equal(dequantize(found), (codes.float() - spread[0]) * spread[1])
    assert torch.equal(dequantize(found), awq_by_its_documents(qweight, qzeros, scales))


def awq_by_its_documents(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """fp32 [N, K]: w[k, n] = (u - zero) * s, without an offset on zero."""
    group = qweight.shape[0] // scales.shape[0]
    u = unpack_awq(qweight) - unpack_awq(qzeros).repeat_interleave(group, 0)
    return (u.float() * scales.float().repeat_interleave(group, 0)).t()


@pytest.mark.parametrize("group", GROUPS)
def test_four_bits_take_no_more_memory_than_stored(group: int) -> None:
    qweight, qzeros = words_of(512, 8), words_of(512 // group, 8)
    scales = torch.rand(512 // group, 64).half()
    stored = qweight.nbytes + qzeros.nbytes + scales.nbytes
    assert from_auto_awq(qweight, scales, qzeros, group).nbytes <= 1.05 * stored


def matrices() -> dict[str, Matrix]:
    """One matrix [72, 256] of each form."""
    scale = torch.rand(72, 8).bfloat16()
    return {
        "fp8 e8m0 32x32": Fp8BlockMatrix(
            e4m3_of(72, 256), bytes_of(3, 8, low=115, high=122), 32, 32
        ),
        "mxfp4": Mxfp4Matrix(bytes_of(72, 128), bytes_of(72, 8, low=120, high=128)),
        "int4": Int4Matrix(bytes_of(72, 128), scale, None, 32),
        "int4 zero": Int4Matrix(bytes_of(72, 128), scale, bytes_of(72, 8, high=16), 32),
    }


@pytest.mark.parametrize("form", matrices())
def test_a_row_is_the_same_bits_in_any_company(form: str) -> None:
    weight, x = matrices()[form], torch.randn(33, 256)
    whole = linear(x, weight)
    torch.testing.assert_close(
        whole.double(), x.double() @ dequantize(weight).double().t(), rtol=1e-5, atol=1e-4
    )
    for rows in ([0], [32, 5], [*range(7, 16)], [*range(33)][::-1]):
        assert torch.equal(linear(x[rows], weight), whole[rows]), rows


@pytest.mark.parametrize("form", matrices())
def test_preparing_changes_no_bit_of_a_product(form: str) -> None:
    weight, x = matrices()[form], torch.randn(9, 256)
    ready = prepare(weight)
    assert torch.equal(linear(x, ready), linear(x, weight))
    assert ready.nbytes <= 1.01 * weight.nbytes


@pytest.mark.parametrize("form", matrices())
def test_a_stack_holds_its_members(form: str) -> None:
    weight = matrices()[form]
    stack = type(weight)(
        **{
            field: value.expand(3, *value.shape).contiguous()
            if isinstance(value := getattr(weight, field), torch.Tensor)
            else value
            for field in weight.__dataclass_fields__
        }
    )
    assert torch.equal(dequantize(stack)[2], dequantize(weight))
    assert torch.equal(dequantize(prepare(stack).expert(1)), dequantize(weight))


@pytest.mark.parametrize("kernel", ["vector", "matrix"])
def test_the_gpu_kernels_take_the_half_precision_scales_of_auto_awq(kernel: str) -> None:
    """Small scales too: below 2^-14 they are subnormal in fp16."""
    scales = (torch.rand(8, 24) * 2.0**-12 + 2.0**-16).half()
    weight = from_auto_awq(words_of(256, 3), scales, words_of(8, 3, seed=1), 32)
    rows, config, bound = (1, VECTOR, FP32_ERROR) if kernel == "vector" else (3, MATRIX, ROUNDED)
    x = activations(rows, 256)
    assert error(run(x, weight, config), x, weight) < bound
