"""The Triton kernels against the reference: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import backend
from kernels.moe.configs import MATRIX_TILES
from kernels.quant_linear import (
    Fp8BlockMatrix,
    Int4Matrix,
    Matrix,
    Mxfp4Matrix,
    dequantize,
    launch,
    prepare,
    tuning,
)
from kernels.quant_linear.launch import QuantMatrix, Workspace, quant_linear
from kernels.quant_linear.tuning import Config

DEVICE = "cpu" if backend.interpreted() else "cuda"
# Against fp64 products of the same weights: fp32 sums; bf16 output; scale times weight in bf16.
FP32_ERROR, BF16_ERROR, ROUNDED_ERROR = 1e-5, 2.5e-3, 4e-3

VECTOR = Config("vector", block_n=16, block_bytes=256, warps=1)
MATRIX = Config("matrix", block_n=32, block_bytes=64, warps=4, block_m=16)


def fp8(n: int, k: int, block: int = 128, scale: str = "float32") -> Fp8BlockMatrix:
    codes = torch.randint(0, 255, (n, k), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    shape = (-(-n // block), -(-k // block))
    if scale == "ue8m0":
        return Fp8BlockMatrix(
            codes, torch.randint(110, 122, shape, dtype=torch.uint8), block, block
        )
    values = torch.rand(shape) * 1e-2 + 1e-3
    return Fp8BlockMatrix(codes, values.to(getattr(torch, scale)), block, block)


def int4(
    n: int, k: int, group: int = 128, *, asymmetric: bool = False, scale: str = "bfloat16"
) -> Int4Matrix:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = (torch.rand(n, k // group) * 0.01 + 0.002).to(getattr(torch, scale))
    zero = torch.randint(0, 16, scales.shape, dtype=torch.uint8) if asymmetric else None
    return Int4Matrix(codes, scales, zero, group)


def mxfp4(n: int, k: int) -> Mxfp4Matrix:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    return Mxfp4Matrix(codes, torch.randint(110, 125, (n, k // 32), dtype=torch.uint8))


FORMATS: dict[str, Callable[[int, int], QuantMatrix]] = {
    "fp8": lambda n, k: fp8(n, k),
    "fp8-bf16-scale": lambda n, k: fp8(n, k, scale="bfloat16"),
    "fp8-ue8m0": lambda n, k: fp8(n, k, scale="ue8m0"),
    "fp8-32x32-ue8m0": lambda n, k: fp8(n, k, 32, "ue8m0"),
    "int4-g128": lambda n, k: int4(n, k),
    "int4-g128-fp32-scale": lambda n, k: int4(n, k, scale="float32"),
    "int4-g32": lambda n, k: int4(n, k, 32),
    "int4-g128-zero": lambda n, k: int4(n, k, asymmetric=True),
    "int4-g64-fp16-scale": lambda n, k: int4(n, k, 64, scale="float16"),
    "int4-g32-zero": lambda n, k: int4(n, k, 32, asymmetric=True),
    "mxfp4": mxfp4,
}


def on_device(weight: Matrix) -> QuantMatrix:
    assert isinstance(weight, QuantMatrix)
    moved = {
        name: getattr(weight, name).to(DEVICE)
        for name in ("codes", "scale", "zero")
        if getattr(weight, name, None) is not None
    }
    return replace(weight, **moved)


def error(found: torch.Tensor, x: torch.Tensor, weight: Matrix) -> float:
    exact = x.double() @ dequantize(weight).to(x.device).double().t()
    return float((found.double() - exact).norm() / exact.norm())


def run(
    x: torch.Tensor,
    weight: Matrix,
    config: Config,
    out_dtype: torch.dtype = torch.float32,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    shape = (x.shape[0], weight.out_features)
    out = torch.full(shape, torch.nan, dtype=out_dtype, device=x.device)
    return quant_linear(x, on_device(prepare(weight)), out, workspace, config)


def activations(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k).bfloat16().to(DEVICE)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("n", "k", "split"), [(8, 512, 1), (63, 640, 1), (65, 1024, 3), (1, 128, 2)]
)
def test_vector_kernel_agrees_with_double_precision(name: str, n: int, k: int, split: int) -> None:
    weight, x = FORMATS[name](n, k), activations(1, k)
    found = run(x, weight, replace(VECTOR, split=split))
    assert error(found, x, weight) < FP32_ERROR


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("m", "n", "k", "split"),
    [(1, 16, 128, 1), (17, 63, 256, 1), (3, 65, 384, 3)],
)
@pytest.mark.parametrize("scale_weight", [False, True])
def test_matrix_kernel_agrees_with_double_precision(
    name: str, m: int, n: int, k: int, split: int, scale_weight: bool
) -> None:
    weight, x = FORMATS[name](n, k), activations(m, k)
    found = run(x, weight, replace(MATRIX, split=split, scale_weight=scale_weight))
    assert error(found, x, weight) < ROUNDED_ERROR


@pytest.mark.parametrize(
    "config", [VECTOR, replace(MATRIX, block_bytes=64)], ids=["vector", "matrix"]
)
@pytest.mark.parametrize("k", [1, 4, 60, 63, 130, 1000])
def test_fp8_takes_any_number_of_inputs(config: Config, k: int) -> None:
    weight, x = fp8(5, k), activations(1, k)
    assert error(run(x, weight, config), x, weight) < FP32_ERROR


@pytest.mark.parametrize(
    "config", [VECTOR, replace(MATRIX, block_bytes=64)], ids=["vector", "matrix"]
)
def test_no_scale_is_read_beyond_the_last(config: Config) -> None:
    """An odd number of blocks of 32: the last words hold codes of one."""
    weight, x = fp8(5, 96, 32), activations(1, 96)
    memory = torch.full((8,), torch.nan)
    memory[:3] = weight.scale.flatten()
    weight = replace(weight, scale=memory[:3].view(1, 3))
    ready = prepare(weight)
    assert isinstance(ready, Fp8BlockMatrix)
    scale = memory.to(DEVICE)[:3].view(1, 3)
    out = torch.full((1, 5), torch.nan, device=DEVICE)
    quant_linear(x, replace(on_device(ready), scale=scale), out, None, config)
    assert error(out, x, weight) < ROUNDED_ERROR


@pytest.mark.parametrize("kernel", ["vector", "matrix"])
@pytest.mark.parametrize("name", ["fp8", "int4-g32-zero", "mxfp4"])
def test_every_code_in_every_place_is_exact(kernel: str, name: str) -> None:
    """One-hot rows of x pick single weights: all codes at all positions of a 32-k unit."""
    weight = FORMATS[name](256, 128)
    values = torch.arange(256, dtype=torch.uint8)
    codes = torch.stack([values.roll(place) for place in range(weight.codes.shape[1])], 1)
    if name == "fp8":
        codes[(codes & 0x7F) == 0x7F] = 0x7E
    scale = torch.full_like(weight.scale, 127 if weight.scale.dtype == torch.uint8 else 1.0)
    weight = replace(weight, codes=codes.contiguous(), scale=scale)
    expected = dequantize(weight)
    if kernel == "matrix":
        config = replace(MATRIX, block_n=256, block_bytes=64, block_m=128)
        found = run(torch.eye(128).bfloat16().to(DEVICE), weight, config)
        assert torch.equal(found.cpu(), expected.t())
        return
    config = replace(VECTOR, block_n=256, block_bytes=64)
    for k in (0, 5, 14, 19, 31, 64, 127):
        x = torch.eye(128)[k : k + 1].bfloat16().to(DEVICE)
        assert torch.equal(run(x, weight, config).cpu()[0], expected[:, k])


def launched_tiles() -> list[tuple[str, Config]]:
    """Each shape of tile that a server launches for some rows, and the format it is for."""
    rows = [row for target in backend.TARGETS for row in tuning.rows_for(target)]
    tiles = [(r.weights, replace(r.config, split=1)) for r in rows if r.config.kernel == "matrix"]
    tiles += [(name, tile) for name in ("fp8", "int4", "mxfp4") for tile in MATRIX_TILES[name]]
    return sorted(set(tiles), key=str)


def distinct(name: str, n: int, k: int) -> QuantMatrix:
    """Weights of random codes and powers of two as scales: each is exact in bf16."""
    weight = FORMATS[name](n, k)
    if weight.scale.dtype == torch.uint8:
        return weight
    scale = torch.exp2(torch.randint(-6, 0, weight.scale.shape).float())
    return replace(weight, scale=scale.to(weight.scale.dtype))


def check_each_weight(name: str, config: Config) -> None:
    """One-hot rows of x pick each weight: one that took another's bits or scale shows."""
    weight = distinct(name, config.block_n + 32, 256)
    found = run(torch.eye(256).bfloat16().to(DEVICE), weight, config)
    assert torch.equal(found.cpu(), dequantize(weight).t())


@pytest.mark.parametrize("scale_weight", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_each_weight_is_its_own(name: str, scale_weight: bool) -> None:
    check_each_weight(name, Config("matrix", 64, 64, 4, 256, scale_weight=scale_weight))


@pytest.mark.gpu
@pytest.mark.parametrize(("weights", "config"), launched_tiles(), ids=str)
def test_each_weight_is_its_own_in_every_tile(weights: str, config: Config) -> None:
    """On a card the compiler's layout of a tile decides which weights share a register."""
    for name in FORMATS:
        if name.startswith(weights):
            check_each_weight(name, config)
            check_each_weight(name, replace(config, scale_weight=not config.scale_weight))


def test_decoded_weights_stay_in_registers() -> None:
    """By way of shared memory a step takes 8 to 10 instructions for each of a tensor core."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.decode_probe"],
        env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fp8"] < 6 and found["int4"] < 4 and found["mxfp4"] < 5.6, found


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_types(out_dtype: torch.dtype) -> None:
    weight, x = int4(40, 256), activations(1, 256)
    assert error(run(x, weight, VECTOR, out_dtype), x, weight) < BF16_ERROR


def test_split_sums_are_repeatable_and_leave_the_counters_at_zero() -> None:
    weight, x = mxfp4(48, 512), activations(4, 512)
    config = replace(MATRIX, block_bytes=64, split=3)
    partial, counters = launch.workspace_need(weight, 4, config)
    workspace = Workspace(
        torch.full((partial,), torch.nan, device=DEVICE),
        torch.zeros(counters, dtype=torch.int32, device=DEVICE),
    )
    first = run(x, weight, config, workspace=workspace)
    assert torch.equal(run(x, weight, config, workspace=workspace), first)
    assert not workspace.counters.any()


@pytest.mark.parametrize("target", backend.TARGETS)
@pytest.mark.parametrize("weights", ["fp8", "int4", "mxfp4"])
@pytest.mark.parametrize("rows", [1, 2, 16, 64, 65, 8192])
def test_every_row_count_has_a_configuration(target: int, weights: str, rows: int) -> None:
    config = tuning.select(target, weights, rows, 4096)
    assert config.kernel == ("vector" if rows == 1 else "matrix")


def test_unprepared_weights_are_refused() -> None:
    with pytest.raises(AssertionError, match="prepare"):
        quant_linear(activations(1, 128), on_device(int4(8, 128)), torch.empty(1, 8))


def test_codes_that_kernels_misread_are_refused() -> None:
    bad = fp8(4, 128)
    bad.codes[0, 0] = 0xFF
    with pytest.raises(ValueError, match="NaN"):
        prepare(bad)
    with pytest.raises(ValueError, match="e8m0"):
        prepare(replace(mxfp4(4, 32), scale=torch.full((4, 1), 200, dtype=torch.uint8)))
    with pytest.raises(ValueError, match="scale"):
        prepare(replace(fp8(4, 128), scale=torch.full((1, 1), 128.0)))
    with pytest.raises(ValueError, match="scale"):
        prepare(replace(int4(4, 128), scale=torch.full((4, 1), torch.nan)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("m", [1, 7, 64, 300])
def test_tuned_launch_in_a_replayed_graph(name: str, m: int) -> None:
    weight = FORMATS[name](1000, 2048)
    device_weight = on_device(prepare(weight))
    x = activations(m, 2048)
    out = torch.full((m, 1000), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    workspace = Workspace.allocate([device_weight], [m], x.device)
    quant_linear(x, device_weight, out, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quant_linear(x, device_weight, out, workspace)
    for _ in range(2):
        x.copy_(activations(m, 2048))
        out.fill_(torch.nan)
        graph.replay()
        assert error(out, x, weight) < ROUNDED_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8", "int4-g128-zero", "mxfp4"])
def test_a_row_does_not_depend_on_the_other_rows(name: str) -> None:
    # On a card alone: the interpreter's products come from a library that promises no such thing.
    weight, x = FORMATS[name](40, 256), activations(19, 256)
    config = replace(MATRIX, split=2)
    together = run(x, weight, config)
    assert torch.equal(run(x[17:18], weight, config), together[17:18])
    assert torch.equal(run(x[3:8].contiguous(), weight, config), together[3:8])
