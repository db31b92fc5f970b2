"""The Engram kernels against double precision: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.engram import launch

DEVICE = "cpu" if backend.interpreted() else "cuda"
EPS = 1e-20
FP32_ERROR, BF16_ERROR = 2e-6, 4e-3


def e4m3(codes: torch.Tensor) -> torch.Tensor:
    """fp64, by torch's own type."""
    return codes.view(torch.float8_e4m3fn).double()


def table(rows: int, values: int) -> torch.Tensor:
    codes = torch.randint(0, 0x7F, (rows, values)) | torch.randint(0, 2, (rows, values)) << 7
    scales = torch.randint(0, 240, (rows, values // 32))
    made = torch.cat([codes, scales], dim=1).to(torch.uint8)
    return made if DEVICE == "cpu" else made.pin_memory()


def exact(table_RB: torch.Tensor, ids_Th: torch.Tensor) -> torch.Tensor:
    """fp64 [T, h * values]; zeros for ids out of range."""
    groups = table_RB.shape[1] // 33
    rows = table_RB[ids_Th.clamp(0, len(table_RB) - 1)]
    values = e4m3(rows[..., : 32 * groups].contiguous()).unflatten(-1, (groups, 32))
    factor = 2.0 ** (rows[..., 32 * groups :].double() - 127)
    values = (values * factor[..., None]).flatten(2)
    known = (ids_Th >= 0) & (ids_Th < len(table_RB))
    return torch.where(known[..., None], values, 0.0).flatten(1)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


# 256 is the released width; 32 and 96 are not whole words of scales, 768 has three such words.
@pytest.mark.parametrize("values", [32, 96, 256, 768])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 24), (5, 3), (0, 4)])
def test_rows_are_read_by_id(values: int, tokens: int, heads: int) -> None:
    rows = table(50, values)
    ids = torch.randint(0, 50, (tokens, heads))
    if tokens > 1:
        ids[1, 1], ids[0, 2], ids[2, 0] = -1, 50, 1 << 40
    out = poisoned(tokens, heads * values)
    launch.gather_rows(rows, ids.to(DEVICE), out, scaled=True)
    assert torch.equal(out.cpu().double(), exact(rows, ids))


def test_every_code_with_small_and_large_scales() -> None:
    rows = torch.zeros(4, 264, dtype=torch.uint8)
    rows[:, :256] = torch.arange(256)
    rows[:, [0x7F, 0xFF]] = 0
    rows[:, 256:] = torch.tensor([[0], [1], [127], [240]])
    rows = rows if DEVICE == "cpu" else rows.pin_memory()
    ids = torch.arange(4)[:, None]
    out = poisoned(4, 256)
    launch.gather_rows(rows, ids.to(DEVICE), out, scaled=True)
    assert torch.equal(out.cpu().double(), exact(rows, ids))


@pytest.mark.parametrize("values", [64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_came_from_elsewhere(values: int, dtype: torch.dtype) -> None:
    rows = table(12, values)
    rows[:, values:] = rows[:, values:] // 8 + 112
    stored = rows.view(3, -1).to(DEVICE)
    out = poisoned(3, 4 * values, dtype=dtype)
    launch.decode_rows(stored, 4, out)
    wanted = exact(rows, torch.arange(12).view(3, 4))
    assert torch.equal(out.cpu(), wanted.to(dtype))


@pytest.mark.parametrize("columns", [slice(0, 264), slice(1, 265)])
def test_a_table_at_an_odd_address(columns: slice) -> None:
    rows = table(10, 256)
    memory = torch.zeros(10 * 264 + 1, dtype=torch.uint8)
    memory = memory if DEVICE == "cpu" else memory.pin_memory()
    moved = memory[columns.start : columns.start + 2640].view(10, 264).copy_(rows)
    ids = torch.tensor([[9, 0], [4, 4]])
    out = poisoned(2, 512)
    launch.gather_rows(moved, ids.to(DEVICE), out, scaled=True)
    assert torch.equal(out.cpu().double(), exact(rows, ids))


def gate_inputs(tokens: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Streams, keys and value as slices of one product, q, k."""
    streams = torch.randn(tokens, 4, width).to(dtype)
    product = torch.randn(tokens, 5 * width).to(dtype)
    weights = torch.randn(2, 4, width).to(dtype)
    keys, value = product[:, : 4 * width].unflatten(1, (4, width)), product[:, 4 * width :]
    return [x.to(DEVICE) for x in (streams, keys, value, *weights)]


def run_gate(inputs: list[torch.Tensor], closed: torch.Tensor | None, out: torch.Tensor) -> None:
    x, key, value, q, k = inputs
    launch.engram_gate(x, key, value, q, k, closed, out, EPS)


def exact_gate(inputs: list[torch.Tensor], closed: torch.Tensor | None) -> torch.Tensor:
    x, key, value, q, k = (each.double() for each in inputs)
    norms = [(each.square().mean(-1) + EPS).sqrt() for each in (x, key)]
    dot = (x * q * key * k).sum(-1) / (norms[0] * norms[1] * x.shape[-1] ** 0.5)
    opening = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))
    if closed is not None:
        opening[closed] = 0.0
    return x + opening[..., None] * value[:, None]


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 5120), (3, 65), (7, 1000), (0, 64)])
def test_gate_agrees_with_double_precision(tokens: int, width: int, dtype: torch.dtype) -> None:
    inputs = gate_inputs(tokens, width, dtype)
    out = poisoned(tokens, 4, width)
    run_gate(inputs, None, out)
    assert tokens == 0 or error(out, exact_gate(inputs, None)) < FP32_ERROR


def test_closed_tokens_and_keys_of_zero() -> None:
    inputs = gate_inputs(5, 96, torch.float32)
    inputs[1] = inputs[1].clone()
    inputs[1][2] = 0.0
    closed = torch.tensor([False, True, False, False, True], device=DEVICE)
    out = poisoned(5, 4, 96)
    run_gate(inputs, closed, out)
    assert torch.equal(out[closed], inputs[0][closed])
    assert error(out, exact_gate(inputs, closed)) < FP32_ERROR


def test_gate_in_place_rounds_once() -> None:
    inputs = gate_inputs(3, 128, torch.bfloat16)
    wanted = exact_gate(inputs, None)
    run_gate(inputs, None, inputs[0])
    assert error(inputs[0], wanted) < BF16_ERROR


@pytest.mark.gpu
def test_replays_of_a_graph_follow_their_inputs() -> None:
    rows, ids = table(1000, 256), torch.zeros(7, 24, dtype=torch.int64, device=DEVICE)
    inputs = gate_inputs(7, 5120, torch.bfloat16)
    closed = torch.zeros(7, dtype=torch.bool, device=DEVICE)
    values = poisoned(7, 24 * 256)
    out = poisoned(7, 4, 5120)

    def step() -> None:
        launch.gather_rows(rows, ids, values, scaled=True)
        run_gate(inputs, closed, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(2):
        fresh = torch.randint(-2, 1002, ids.shape)
        ids.copy_(fresh)
        inputs[0].copy_(torch.randn_like(inputs[0]))
        closed.copy_(torch.rand(7) < 0.5)
        values.fill_(torch.nan)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(values.cpu().double(), exact(rows, fresh))
        assert error(out, exact_gate(inputs, closed)) < FP32_ERROR
