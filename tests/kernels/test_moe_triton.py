"""The experts' kernels against double precision: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels import backend
from kernels.moe import ExpertWeights, configs
from kernels.moe.launch import Plan, Scratch, routed_experts
from kernels.moe.triton import align_pairs
from kernels.quant_linear import (
    Fp8BlockMatrix,
    Int4Matrix,
    Matrix,
    Mxfp4Matrix,
    PlainMatrix,
    dequantize,
    prepare,
)

DEVICE = "cpu" if backend.interpreted() else "cuda"
# Against fp64 of the same weights: bf16 between the matrices, before the sum, and for scales.
ERROR = 6e-3
FAR = 2**40


def fp8(e: int, n: int, k: int, block: int = 128) -> Fp8BlockMatrix:
    codes = torch.randint(0, 255, (e, n, k), dtype=torch.uint8)
    codes[(codes & 0x7F) >= 0x78] = 0x30  # none is NaN, none so large that it hides the others
    shape = (e, -(-n // block), -(-k // block))
    if block == 32:
        return Fp8BlockMatrix(codes, torch.randint(118, 122, shape, dtype=torch.uint8), 32, 32)
    return Fp8BlockMatrix(codes, torch.rand(shape) * 4e-3 + 1e-3)


def int4(e: int, n: int, k: int, group: int, *, zeros: bool = False) -> Int4Matrix:
    codes = torch.randint(0, 256, (e, n, k // 2), dtype=torch.uint8)
    scale = (torch.rand(e, n, k // group) * 0.01 + 0.002).bfloat16()
    zero = torch.randint(6, 11, scale.shape, dtype=torch.uint8) if zeros else None
    return Int4Matrix(codes, scale, zero, group)


def mxfp4(e: int, n: int, k: int) -> Mxfp4Matrix:
    codes = torch.randint(0, 256, (e, n, k // 2), dtype=torch.uint8)
    return Mxfp4Matrix(codes, torch.randint(119, 123, (e, n, k // 32), dtype=torch.uint8))


def plain(e: int, n: int, k: int) -> PlainMatrix:
    return PlainMatrix((torch.randn(e, n, k) / k**0.5).bfloat16())


FORMATS: dict[str, Callable[[int, int, int], Matrix]] = {
    "fp8": fp8,
    "fp8-32x32-ue8m0": lambda e, n, k: fp8(e, n, k, 32),
    "int4-g128": lambda e, n, k: int4(e, n, k, 128),
    "int4-g32": lambda e, n, k: int4(e, n, k, 32),
    "int4-g128-zero": lambda e, n, k: int4(e, n, k, 128, zeros=True),
    "int4-g32-zero": lambda e, n, k: int4(e, n, k, 32, zeros=True),
    "mxfp4": mxfp4,
    "plain": plain,
}


def on_device(weight: Matrix) -> Matrix:
    return weight.to(torch.device(DEVICE))


def experts_of(
    name: str, count: int, hidden: int, inner: int, first: int = 0
) -> tuple[ExpertWeights, ExpertWeights]:
    """As the checkpoint has them, and as the kernels read them."""
    gate_up, down = FORMATS[name](count, 2 * inner, hidden), FORMATS[name](count, hidden, inner)
    stored = ExpertWeights(gate_up, down, count, first)
    return stored, replace(
        stored, gate_up=on_device(prepare(gate_up)), down=on_device(prepare(down))
    )


def exact(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertWeights,
    limit: float | None,
) -> torch.Tensor:
    """fp64, pair by pair."""
    gate_up, down = dequantize(experts.gate_up).double(), dequantize(experts.down).double()
    x, out = x.double().cpu(), torch.zeros(x.shape, dtype=torch.float64)
    for t, row in enumerate(ids.tolist()):
        for j, expert in enumerate(row):
            e = expert - experts.first_expert
            if not 0 <= e < experts.count:
                continue
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            out[t] += weights[t, j].item() * (down[e] @ (gate / (1 + torch.exp(-gate)) * up))
    return out


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double().cpu() - expected).norm() / expected.norm())


def routing(tokens: int, top_k: int, count: int, first: int = 0) -> torch.Tensor:
    """Distinct experts of each token; of some tokens one is another rank's."""
    chosen = [torch.randperm(count + 1)[:top_k] for _ in range(tokens)]
    return torch.stack(chosen) + first if chosen else torch.zeros(0, top_k, dtype=torch.int64)


def poisoned(experts: ExpertWeights, tokens: int, top_k: int) -> Scratch:
    scratch = Scratch.allocate(experts, tokens, top_k, torch.device(DEVICE))
    scratch.hidden.fill_(torch.nan)
    scratch.products.fill_(torch.nan)
    scratch.integers.fill_(-(2**30))
    return scratch


def run(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertWeights,
    limit: float | None = None,
) -> torch.Tensor:
    out = torch.full(x.shape, torch.nan, device=DEVICE)
    scratch = poisoned(experts, *ids.shape)
    x, ids, weights = x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)
    return routed_experts(x, ids, weights, experts, limit, out, scratch)


def check(
    name: str,
    tokens: int,
    top_k: int,
    sizes: tuple[int, int, int],
    *,
    limit: float | None = None,
    first: int = 0,
) -> None:
    count, hidden, inner = sizes
    stored, ready = experts_of(name, count, hidden, inner, first)
    x, ids = torch.randn(tokens, hidden).bfloat16(), routing(tokens, top_k, count, first)
    weights = torch.rand(tokens, top_k) + 0.1
    found = run(x, ids, weights, ready, limit)
    assert relative(found, exact(x, ids, weights, stored, limit)) < ERROR


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("tokens", "limit"), [(1, 1.0), (2, None), (13, 1.0)])
def test_every_format_agrees_with_double_precision(
    name: str, tokens: int, limit: float | None
) -> None:
    check(name, tokens, 2, (3, 256, 128), limit=limit, first=3)


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_widths_that_no_tile_divides(name: str, tokens: int) -> None:
    check(name, tokens, 3, (3, 160, 96))


def test_plain_weights_of_odd_widths() -> None:
    check("plain", 5, 3, (3, 45, 23))


@pytest.mark.parametrize("rows", [10, 20, 40])
@pytest.mark.parametrize("name", ["fp8", "int4-g32-zero", "mxfp4", "plain"])
def test_every_tile_of_many_rows(name: str, rows: int) -> None:
    """Two experts of about `rows` rows each, as many tokens as that takes."""
    stored, ready = experts_of(name, 2, 128, 128)
    tile = Plan.of(ready, rows, 2).down.block_m
    assert tile == {10: 16, 20: 32, 40: 64}[rows]
    x, ids = torch.randn(rows, 128).bfloat16(), torch.tensor([[1, 0]] * rows)
    ids[: rows // 2] = torch.tensor([0, 5])
    weights = torch.rand(rows, 2) + 0.1
    assert relative(run(x, ids, weights, ready), exact(x, ids, weights, stored, None)) < ERROR


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_programs_that_share_a_token_add_up(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "expert_splits", lambda tiles, top_k: splits)
    check("mxfp4", 1, 3, (3, 64, 64))
    check("mxfp4", 2, 3, (3, 64, 32))


def test_ids_out_of_range_contribute_nothing() -> None:
    stored, ready = experts_of("mxfp4", 2, 64, 64, 1)
    for tokens in (1, 9):
        x, weights = torch.randn(tokens, 64).bfloat16(), torch.full((tokens, 3), torch.nan)
        ids = torch.tensor([[0, FAR, -FAR]] * tokens)
        assert not run(x, ids, weights, ready).any()
        weights[:, 1], ids[:, 1] = 0.5, 2
        assert relative(run(x, ids, weights, ready), exact(x, ids, weights, stored, None)) < ERROR


@pytest.mark.parametrize(
    ("pairs", "experts", "block"),
    [(1, 1, 16), (63, 7, 16), (65, 3, 64), (1000, 5, 32), (6, 40, 16)],
)
def test_pairs_are_listed_by_expert_in_order(pairs: int, experts: int, block: int) -> None:
    ids = torch.randint(2, experts + 6, (pairs,))
    ids[::7] = FAR
    ids[ids == 5] = 4  # one expert has none
    slots = pairs // block + experts
    order = torch.full((pairs,), -7, dtype=torch.int32, device=DEVICE)
    tiles = torch.full((3, slots), -7, dtype=torch.int32, device=DEVICE)
    align_pairs[(experts,)](
        ids.to(DEVICE), order, tiles, pairs, 3, experts, slots, BM=block, BP=256, num_warps=4
    )
    rows: dict[int, list[int]] = {}
    for expert, first, stop in tiles.t().tolist():
        assert -1 <= expert < experts
        if expert >= 0:
            assert first < stop
            rows.setdefault(expert, []).extend(order[first : min(first + block, stop)].tolist())
    local = ids - 3
    expected = {e: (local == e).nonzero().flatten().tolist() for e in range(experts)}
    assert rows == {e: found for e, found in expected.items() if found}


@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_no_expert_of_this_rank(tokens: int) -> None:
    _, ready = experts_of("int4-g32", 2, 64, 64)
    ids = torch.full((tokens, 2), 9)
    assert not run(torch.randn(tokens, 64), ids, torch.ones(tokens, 2), ready).any()


def test_unprepared_weights_are_refused() -> None:
    stored, _ = experts_of("mxfp4", 2, 64, 64)
    with pytest.raises(AssertionError, match="prepare"):
        Plan.of(stored, 1, 2)


@pytest.mark.parametrize(
    ("weights", "row_bytes", "outputs", "block", "rows"),
    [
        ("int4", 320, 2560, 128, 16),
        ("int4", 1280, 1280, 256, 16),
        ("mxfp4", 1024, 4096, 512, 8),
        ("mxfp4", 2048, 512, 1024, 8),
        ("mxfp4", 1152, 5120, 128, 32),
        ("fp8", 4096, 4096, 2048, 8),
    ],
)
def test_blocks_of_served_rows(
    weights: str, row_bytes: int, outputs: int, block: int, rows: int
) -> None:
    found = configs.vector_tile(weights, row_bytes, outputs)
    assert (found.block_bytes, found.block_n) == (block, rows)


def test_programs_share_the_experts_of_a_token() -> None:
    found = [configs.expert_splits(*sizes) for sizes in ((512, 6), (80, 10), (2048, 6))]
    assert found == [3, 10, 1]


def test_memory_of_a_call_serves_fewer_tokens() -> None:
    stored, ready = experts_of("mxfp4", 3, 64, 64)
    scratch = poisoned(ready, 30, 2)
    for tokens in (30, 11):
        x, ids = torch.randn(tokens, 64).bfloat16(), routing(tokens, 2, 3)
        weights = torch.rand(tokens, 2)
        out = torch.full((tokens, 64), torch.nan, device=DEVICE)
        device = (x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
        routed_experts(*device, ready, None, out, scratch)
        assert relative(out, exact(x, ids, weights, stored, None)) < ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 6, 40, 300])
def test_replayed_graph_with_other_routes(name: str, tokens: int) -> None:
    stored, ready = experts_of(name, 8, 512, 256, 2)
    x = torch.randn(tokens, 512).bfloat16().to(DEVICE)
    ids, weights = routing(tokens, 4, 8, 2).to(DEVICE), torch.rand(tokens, 4, device=DEVICE)
    out = torch.empty(tokens, 512, device=DEVICE)
    scratch = Scratch.allocate(ready, tokens, 4, x.device)
    routed_experts(x, ids, weights, ready, 10.0, out, scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routed_experts(x, ids, weights, ready, 10.0, out, scratch)
    for _ in range(2):
        x.copy_(torch.randn(tokens, 512))
        ids.copy_(routing(tokens, 4, 8, 2))
        out.fill_(torch.nan)
        graph.replay()
        assert relative(out, exact(x, ids, weights.cpu(), stored, 10.0)) < ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8", "int4-g128-zero", "mxfp4", "plain"])
@pytest.mark.parametrize(("tokens", "fewer"), [(7, 1), (7, 4), (33, 30)])
def test_a_token_does_not_depend_on_its_place(name: str, tokens: int, fewer: int) -> None:
    _, ready = experts_of(name, 8, 512, 256)
    x, ids = torch.randn(tokens, 512).bfloat16(), routing(tokens, 4, 8)
    weights = torch.rand(tokens, 4)
    whole = run(x, ids, weights, ready)
    turned = torch.randperm(tokens)
    assert torch.equal(run(x[turned], ids[turned], weights[turned], ready), whole[turned])
    some = turned[:fewer]
    assert torch.equal(run(x[some], ids[some], weights[some], ready), whole[some])
    spread = replace(ready, total=8)
    assert torch.equal(run(x, ids, weights, spread), whole)
