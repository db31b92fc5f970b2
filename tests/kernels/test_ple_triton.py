"""The n-gram embedding kernels against plain arithmetic: in the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.engram.launch import gather_rows
from kernels.ple import launch

DEVICE = "cpu" if backend.interpreted() else "cuda"
EOS = 5


def hash_constants(order: int, heads: int) -> list[torch.Tensor]:
    multipliers = torch.randint(0, 1 << 43, (order,)) * 2 + 1
    sizes = torch.randint(19_000_000, 20_000_000, (heads,)) * 2 + 1
    return [multipliers, sizes, sizes.cumsum(0) - sizes]


def scalar_rows(codes: list[int], constants: list[torch.Tensor]) -> list[int]:
    """Of one token, by Python integers."""
    multipliers, sizes, offsets = (x.tolist() for x in constants)
    each = len(sizes) // (len(codes) - 1)
    rows = []
    for head, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        mixed = 0
        for s in range(head // each + 2):
            mixed ^= codes[s] * multipliers[s]
        rows.append(mixed % size + offset)
    return rows


@pytest.mark.parametrize(("order", "heads"), [(3, 16), (4, 24), (2, 3)])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 19])
def test_rows_are_exact(order: int, heads: int, cut: bool, tokens: int) -> None:
    constants = hash_constants(order, heads)
    codes = torch.randint(0, 250_000, (tokens, order))
    if cut and tokens > 1:
        codes[3, 1], codes[4, -1], codes[5, 1], codes[6, 0] = -1, -1, EOS, EOS
    multipliers, sizes, offsets = (x.to(DEVICE) for x in constants)
    eos = EOS if cut else None
    found = launch.hashed_rows(codes.to(DEVICE), multipliers, sizes, offsets, eos)
    wanted = []
    for row in codes.tolist():
        gone = [s for s in range(1, order) if row[s] in (-1, EOS)] if cut else []
        if gone:
            row[gone[0] :] = [EOS] * (order - gone[0])
        wanted.append(scalar_rows(row, constants))
    assert found.tolist() == wanted


def test_rows_of_the_table_are_read_by_id() -> None:
    table = torch.randint(0, 0x7F, (9, 160), dtype=torch.uint8)
    table = table if DEVICE == "cpu" else table.pin_memory()
    ids = torch.tensor([[0, 8, -1], [9, 4, 4]])
    out = torch.full((2, 480), torch.nan, device=DEVICE)
    gather_rows(table, ids.to(DEVICE), out, scaled=False, scale=0.25)
    values = table.view(torch.float8_e4m3fn).float()[ids.clamp(0, 8)] * 0.25
    values[0, 2], values[1, 0] = 0.0, 0.0
    assert torch.equal(out.cpu(), values.flatten(1))


@pytest.mark.parametrize(("tokens", "width"), [(1, 2560), (3, 65), (5, 1000), (0, 64)])
def test_gate_agrees_with_double_precision(tokens: int, width: int) -> None:
    key, query = torch.randn(2, tokens, 4 * width)
    value = torch.randn(tokens, width)
    key[:1, :width] = 0  # a product of zero opens halfway
    out = torch.full((tokens, 4 * width), torch.nan, device=DEVICE)
    launch.ple_gate(key.to(DEVICE), query.to(DEVICE), value.to(DEVICE), 4, out)
    wanted = exact_gate(key, query, value)
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-5, atol=1e-5)


def exact_gate(key: torch.Tensor, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    tokens, width = value.shape
    raw = (key.double() * query.double()).view(tokens, 4, width).sum(-1) / width**0.5
    opening = torch.sigmoid(raw.sign() * raw.abs().clamp_min(1e-6).sqrt())
    return (opening[..., None] * value.double()[:, None]).flatten(1)


@pytest.mark.gpu
def test_a_replayed_graph_goes_from_tokens_to_rows_and_gates() -> None:
    multipliers, sizes, offsets = hash_constants(3, 16)
    sizes = sizes % 500 + 1
    offsets = sizes.cumsum(0) - sizes
    table = torch.randint(0, 0x7F, (int(sizes.sum()), 160), dtype=torch.uint8).pin_memory()
    constants = [x.to(DEVICE) for x in (multipliers, sizes, offsets)]
    codes = torch.zeros(19, 3, dtype=torch.int64, device=DEVICE)
    key, query = torch.zeros(2, 19, 4 * 2560, device=DEVICE)
    values, out = torch.zeros(19, 2560, device=DEVICE), torch.zeros(19, 4 * 2560, device=DEVICE)

    def step() -> None:
        rows = launch.hashed_rows(codes, *constants, EOS)
        gather_rows(table, rows, values, scaled=False, scale=0.25)
        launch.ple_gate(key, query, values, 4, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(2):
        fresh = torch.randint(6, 250_000, codes.shape)
        codes.copy_(fresh)
        key.copy_(torch.randn(key.shape))
        query.copy_(torch.randn(key.shape))
        out.fill_(torch.nan)
        graph.replay()
        ids = torch.tensor(
            [scalar_rows(row, [multipliers, sizes, offsets]) for row in fresh.tolist()]
        )
        rows = (table.view(torch.float8_e4m3fn).float()[ids] * 0.25).flatten(1)
        assert torch.equal(values.cpu(), rows)
        wanted = exact_gate(key.cpu(), query.cpu(), rows)
        torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-5, atol=1e-5)
