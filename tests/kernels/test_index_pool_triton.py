"""Pooled keys, their codes and their selection: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import backend
from kernels.hadamard.reference import hadamard
from kernels.index_pool import KeyPool, launch, reference
from kernels.quant_linear.reference import decode_e4m3

DEVICE = "cpu" if backend.interpreted() else "cuda"
HEADS, WIDTH, PER_PAGE, PAGES, RATIO, BUDGET = 3, 64, 8, 20, 4, 24
coded_or_not = pytest.mark.parametrize("coded", [False, True])


def on_device(pool: KeyPool) -> KeyPool:
    scale = None if pool.scale is None else pool.scale.to(DEVICE)
    return replace(pool, values=pool.values.to(DEVICE), scale=scale)


def empty(*, coded: bool) -> KeyPool:
    shape = (PAGES, PER_PAGE, WIDTH)
    if not coded:
        return KeyPool(torch.full(shape, torch.nan, dtype=torch.bfloat16))
    scale = torch.full((*shape[:2], 1), torch.nan)
    return KeyPool(torch.full(shape, 0x7F, dtype=torch.uint8), scale)


def tables() -> torch.Tensor:
    """Of two sequences that share no page."""
    return torch.randperm(PAGES).view(2, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "ratio", "width"), [(1, 4, 64), (63, 2, 24), (17, 16, 128)])
def test_pooled_keys_equal_a_softmax(
    dtype: torch.dtype, tokens: int, ratio: int, width: int
) -> None:
    both = torch.randn(tokens, ratio, 2 * width).to(dtype)
    bias = torch.randn(ratio, width).to(dtype)
    moved = both.to(DEVICE)
    found = launch.pool_keys(moved[..., :width], moved[..., width:], bias.to(DEVICE)).cpu()
    keys, gates = both.double().split(width, 2)
    exact = (torch.softmax(gates + bias.double(), 1) * keys).sum(1)
    bound = 1e-6 if dtype == torch.float32 else 4e-3
    assert found.dtype == dtype and (found.double() - exact).norm() < bound * exact.norm()


@coded_or_not
@pytest.mark.parametrize("tokens", [0, 1, 75])
def test_written_pools_equal_the_reference(coded: bool, tokens: int) -> None:
    keys = torch.randn(tokens, WIDTH).mul_(torch.logspace(-6, 4, tokens)[:, None]).bfloat16()
    table, sequence = tables(), torch.arange(tokens) % 2
    positions = torch.randperm(10 * PER_PAGE * RATIO)[:tokens]
    wanted, found = empty(coded=coded), on_device(empty(coded=coded))
    reference.write_pools(keys, wanted.values, wanted.scale, table, sequence, positions, RATIO)
    table, sequence, positions = (x.to(DEVICE) for x in (table, sequence, positions))
    launch.write_pools(keys.to(DEVICE), found, table, sequence, positions, RATIO)
    assert torch.equal(found.values.cpu().view(torch.uint8), wanted.values.view(torch.uint8))
    if coded:
        assert found.scale is not None and wanted.scale is not None
        assert torch.equal(found.scale.cpu().view(torch.int32), wanted.scale.view(torch.int32))


def test_what_is_out_of_range_is_not_written() -> None:
    table = tables()
    table[0, 0], table[1, 0] = -1, PAGES
    sequence = torch.tensor([-1, 2, 0, 1, 0, 0])
    positions = torch.tensor([RATIO - 1, RATIO - 1, RATIO - 1, RATIO - 1, -1, 10**6 * RATIO - 1])
    pool = on_device(empty(coded=False))
    table, sequence, positions = (x.to(DEVICE) for x in (table, sequence, positions))
    keys = torch.randn(6, WIDTH, device=DEVICE)
    launch.write_pools(keys, pool, table, sequence, positions, RATIO)
    assert pool.values.isnan().all()


class Setting:
    """Random pooled keys of two sequences, and queries at random positions."""

    def __init__(self, tokens: int, *, coded: bool) -> None:
        values = torch.randn(PAGES, PER_PAGE, WIDTH).bfloat16()
        self.pool, self.table = KeyPool(values), tables()
        if coded:
            codes, scale = reference.encode(values.flatten(0, 1))
            self.pool = KeyPool(codes.view(values.shape), scale.view(PAGES, PER_PAGE, 1))
        self.q = torch.randn(tokens, HEADS, WIDTH).bfloat16()
        self.weights = torch.randn(tokens, HEADS)
        self.sequence = torch.randint(0, 2, (tokens,)).sort().values
        self.positions = torch.randint(0, 10 * PER_PAGE * RATIO, (tokens,))

    def scores(self, t: int) -> list[float]:
        """fp64 of all pools of the token's sequence."""
        q = self.q[t].double()
        keys = self.pool.values[self.table[self.sequence[t]]].flatten(0, 1)
        if self.pool.scale is None:
            keys = keys.double()
        else:
            q = hadamard(self.q[t]).double()
            scale = self.pool.scale[self.table[self.sequence[t]]].flatten(0, 1)
            keys = decode_e4m3(keys).double() * scale.double()
        found = (q @ keys.T * WIDTH**-0.5).clamp_min(0).T @ self.weights[t].double()
        return [float(score) for score in found]

    def expected(self, t: int) -> list[int]:
        position, scores = int(self.positions[t]), self.scores(t)
        pools = (position + 1) // RATIO
        best = sorted(range(pools), key=lambda g: (-scores[g], g))[: BUDGET // RATIO]
        tokens = [g * RATIO + r for g in sorted(best) for r in range(RATIO)]
        tokens += range(pools * RATIO, position + 1)
        return tokens + [-1] * (BUDGET + RATIO - 1 - len(tokens))

    def tensors(self) -> list[torch.Tensor]:
        given = (self.q, self.weights, self.table, self.sequence, self.positions)
        return [x.to(DEVICE) for x in given]


def select(tensors: list[torch.Tensor], pool: KeyPool) -> torch.Tensor:
    q, weights, table, sequence, positions = tensors
    return launch.select_pools(q, weights, pool, table, sequence, positions, RATIO, BUDGET)


@pytest.mark.parametrize(("tokens", "coded"), [(1, False), (5, True), (34, True)])
def test_selected_tokens_equal_a_scalar_search(tokens: int, coded: bool) -> None:
    setting = Setting(tokens, coded=coded)
    found = select(setting.tensors(), on_device(setting.pool)).tolist()
    for t in range(tokens):
        assert found[t] == setting.expected(t), t


@pytest.mark.gpu
@coded_or_not
def test_a_replayed_graph(coded: bool) -> None:
    setting = Setting(5, coded=coded)
    pool = on_device(setting.pool)
    tensors = setting.tensors()
    select(tensors, pool)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = select(tensors, pool)
    other = Setting(5, coded=coded)
    for held, new in zip(tensors, other.tensors(), strict=True):
        held.copy_(new)
    pool.values.copy_(other.pool.values)
    if coded:
        pool.scale.copy_(other.pool.scale)  # type: ignore[union-attr, arg-type]
    graph.replay()
    assert found.tolist() == [other.expected(t) for t in range(5)]
