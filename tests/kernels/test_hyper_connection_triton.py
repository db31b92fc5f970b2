"""Gated hyper-connection kernels against fp64: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.cards import CARDS, KIB, Card
from kernels.hyper_connection import bench, exact, launch

DEVICE = "cpu" if backend.interpreted() else "cuda"
COUNT, EPS = 4, 1e-6


def made(
    tokens: int, hidden: int, low: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, bench.Matrices]:
    width = COUNT * hidden
    shapes = ((low, width), (width, low), (COUNT, width))
    down, up, inject = ((torch.randn(s) * s[1] ** -0.5 * 3).to(dtype).to(DEVICE) for s in shapes)
    scales = torch.rand(tokens, COUNT, 1) * 5 + 0.1
    streams = (torch.randn(tokens, COUNT, hidden) * scales).flatten(1)
    return streams.to(DEVICE), torch.randn(width).to(dtype).to(DEVICE), (down, up, inject)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape and not found.isnan().any()
    return float((found.double() - expected).norm() / expected.norm()) if len(found) else 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "hidden", "low"),
    [(0, 32, 16), (1, 96, 20), (3, 65, 33), (65, 40, 20), (131, 17, 70)],
)
def test_read(tokens: int, hidden: int, low: int, dtype: torch.dtype) -> None:
    streams, norm, matrices = made(tokens, hidden, low, dtype)
    x, weights = launch.read(streams, norm, *matrices, COUNT, EPS)
    expected = exact.read(streams, norm, matrices, COUNT, EPS)
    assert weights is not None and x.dtype == weights.dtype == torch.float32
    assert error(x, expected[0]) <= 1e-5 and error(weights, expected[1]) <= 1e-5


@pytest.mark.parametrize(
    ("multiprocessors", "parts", "low"), [(1, 1, 330), (8, 2, 12), (16, 4, 12)]
)
def test_read_in_parts_of_a_stream(
    multiprocessors: int, parts: int, low: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(multiprocessors, 64 * KIB)
    monkeypatch.setattr(launch, "card_of", lambda device: card)
    assert launch.parts(66, COUNT, card) == parts
    streams, norm, matrices = made(66, 50, low, torch.bfloat16)
    x, weights = launch.read(streams, norm, *matrices, COUNT, EPS)
    expected = exact.read(streams, norm, matrices, COUNT, EPS)
    assert weights is not None
    assert error(x, expected[0]) <= 1e-5 and error(weights, expected[1]) <= 1e-5


@pytest.mark.parametrize("target", CARDS)
@pytest.mark.parametrize("tokens", [65, 512, 513, 1024, 1025, 2112, 2113, 10**6])
def test_twice_the_parts_would_not_fit_the_card(tokens: int, target: int) -> None:
    parts = launch.parts(tokens, COUNT, CARDS[target])
    room = 2 * CARDS[target].multiprocessors
    programs = -(-tokens // launch.MANY_BLOCK) * COUNT * parts
    assert parts in (1, 2, 4, 8)
    assert programs <= room or parts == 1
    assert 2 * programs > room or parts == launch.MOST_PARTS


@pytest.mark.parametrize("tokens", [5, 65])
def test_read_without_injection_in_bf16(tokens: int) -> None:
    streams, norm, matrices = made(tokens, 40, 24, torch.bfloat16)
    down, up, _ = matrices
    x, weights = launch.read(streams, norm, down, up, None, COUNT, EPS, torch.bfloat16)
    assert weights is None and x.dtype == torch.bfloat16
    assert error(x, exact.read(streams, norm, matrices, COUNT, EPS)[0]) <= 3e-3


def test_read_without_injection_refuses_fewer_low_values_than_streams() -> None:
    streams, norm, (down, up, _) = made(1, 16, COUNT - 1, torch.bfloat16)
    with pytest.raises(AssertionError, match="in place of"):
        launch.read(streams, norm, down, up, None, COUNT, EPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "hidden"), [(0, 8), (1, 1030), (7, 65)])
def test_write(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    streams, y = torch.randn(tokens, COUNT * hidden), torch.randn(tokens, hidden).to(dtype)
    inject = torch.rand(tokens, COUNT)
    found = launch.write(streams.to(DEVICE), y.to(DEVICE), inject.to(DEVICE)).cpu()
    added = torch.einsum("th,tc->tch", y.double(), inject.double()).flatten(1)
    assert found.dtype == torch.float32 and error(found, streams.double() + added) <= 1e-6


@pytest.mark.parametrize(("tokens", "first"), [(17, 16), (70, 5)])
def test_a_token_has_the_same_bits_beside_others(tokens: int, first: int) -> None:
    streams, norm, matrices = made(tokens, 24, 16, torch.bfloat16)
    whole = launch.read(streams, norm, *matrices, COUNT, EPS)
    alone = launch.read(streams[first:], norm, *matrices, COUNT, EPS)
    for many, one in zip(whole, alone, strict=True):
        assert many is not None and one is not None and torch.equal(many[first:], one)


def test_the_benchmark_measures_its_error() -> None:
    for work in (bench._read(2, 32, 16, DEVICE), bench._write(2, 32, DEVICE)):
        assert work.error() < work.bound
    streams, y, inject = torch.ones(1, 8), torch.ones(1, 2), torch.ones(1, 4)
    assert bench.write_error(streams, y, inject, lambda: streams) > bench.MAX_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 300])
def test_a_replayed_graph(tokens: int) -> None:
    streams, norm, matrices = made(tokens, 2560, 320, torch.bfloat16)
    launch.read(streams, norm, *matrices, COUNT, EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x, _ = launch.read(streams, norm, *matrices, COUNT, EPS)
    streams.copy_(torch.randn_like(streams))
    graph.replay()
    assert error(x, exact.read(streams, norm, matrices, COUNT, EPS)[0]) <= 1e-5
