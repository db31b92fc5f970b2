"""The selection against a scalar search: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import backend
from kernels.top_k import launch, reference

DEVICE = "cpu" if backend.interpreted() else "cuda"
# The interpreter takes the maximum of a group of NaN as numpy does.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered")


def searched(row: list[float], visible: int, k: int) -> list[int]:
    """By sorting (score, column); -1 behind the last."""
    allowed = [g for g in range(min(max(visible, 0), len(row))) if row[g] > -math.inf]
    best = sorted(sorted(allowed, key=lambda g: (-row[g], g))[:k])
    return best + [-1] * (k - len(best))


def expected(scores: torch.Tensor, visible: torch.Tensor, k: int) -> list[list[int]]:
    rows = zip(scores.tolist(), visible.tolist(), strict=True)
    return [searched(row, count, k) for row, count in rows]


def found(scores: torch.Tensor, visible: torch.Tensor, k: int) -> list[list[int]]:
    return launch.top_k(scores.to(DEVICE), visible.to(DEVICE), k).tolist()


def drawn(kind: str, rows: int, columns: int) -> torch.Tensor:
    scores = torch.randn(rows, columns)
    if kind == "ties":
        return scores.round()
    if kind == "zeros":
        return torch.where(torch.rand(rows, columns) < 0.5, 0.0, -0.0)
    if kind == "wide":
        return scores * torch.exp2(torch.randint(-140, 120, (rows, columns)).float())
    if kind == "special":
        values = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, 3e38])
        return values[torch.randint(0, len(values), (rows, columns))]
    if kind == "near":
        return (scores.abs() + 1).view(torch.int32).bitwise_and(~0xFF00).view(torch.float32)
    return scores


KINDS = ("normal", "ties", "zeros", "wide", "special", "near")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "k"), [(1, 1), (63, 5), (65, 64), (1100, 513)])
def test_equals_a_scalar_search(kind: str, columns: int, k: int) -> None:
    scores = drawn(kind, 4, columns)
    visible = torch.tensor([columns, columns - 1, columns // 2, k])
    assert found(scores, visible, k) == expected(scores, visible, k)


def few_held(monkeypatch: pytest.MonkeyPatch, *, many: bool) -> None:
    """Groups already in short rows; with `many` every program finds their bests by itself."""
    monkeypatch.setattr(launch, "DIRECT_FEW", 16)
    monkeypatch.setattr(launch, "DIRECT_MANY", 16)
    monkeypatch.setattr(launch, "STREAMED", 256)
    if many:
        monkeypatch.setattr(launch, "FEW_ROWS", 0)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("columns", "k"), [(300, 9), (65, 64)])
def test_rows_in_groups(
    kind: str, many: bool, columns: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal scores within groups and in many of them; groups that the count cuts, or empty."""
    few_held(monkeypatch, many=many)
    scores = drawn(kind, 4, columns)
    visible = torch.tensor([columns, columns - 1, columns // 2, k])
    assert found(scores, visible, k) == expected(scores, visible, k)


@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_rows_of_many_groups(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few_held(monkeypatch, many=False)
    scores, visible = drawn(kind, 2, 1001), torch.tensor([1001, 640])
    assert found(scores, visible, 65) == expected(scores, visible, 65)
    assert found(scores, visible, 1) == expected(scores, visible, 1)


@pytest.mark.parametrize("many", [False, True])
def test_the_best_in_one_place_and_everywhere_the_same(
    many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All equal; all of the best side by side; each greater than the one before, and than the
    next; fewer numbers than are wanted; and numbers that differ in their last bit.
    """
    few_held(monkeypatch, many=many)
    columns, k = 270, 33
    scores = torch.full((7, columns), -2.0)
    scores[1, 100 : 100 + k + 3] = 5.0
    scores[2] = torch.arange(columns)
    scores[3] = -torch.arange(columns).float()
    scores[4], scores[4, ::29] = torch.nan, -1.0
    scores[5] = (torch.randint(0, 3, (columns,)).int() + 0x3F800000).view(torch.float32)
    scores[6], scores[6, 7::16] = -torch.inf, 0.0
    visible = torch.full((7,), columns)
    assert found(scores, visible, k) == expected(scores, visible, k)


def test_groups_are_balanced_and_fit_a_program() -> None:
    for rows in (1, launch.FEW_ROWS + 1):
        for columns in (8193, 20000, 65536, 262144, 524288):
            for k in (1, 20, 500, 2048):
                groups = launch.groups_of(rows, columns, k)
                held, candidates = groups.of(columns), groups.size * groups.chosen
                assert groups.chosen >= k and groups.of(columns) * groups.size >= columns
                assert held <= launch.MOST_HELD and candidates <= launch.MOST_HELD


def test_counts_out_of_range_are_taken_to_the_nearest() -> None:
    scores, visible = torch.randn(3, 100), torch.tensor([-5, 10**12, 0])
    assert found(scores, visible, 7) == [[-1] * 7, searched(scores[1].tolist(), 100, 7), [-1] * 7]


@pytest.mark.parametrize(("rows", "columns"), [(0, 50), (2, 0)])
def test_nothing_to_choose_from(rows: int, columns: int) -> None:
    scores, visible = torch.empty(rows, columns), torch.full((rows,), columns)
    assert found(scores, visible, 3) == [[-1] * 3] * rows


@pytest.mark.parametrize(("ratio", "budget"), [(4, 16), (1, 8), (16, 48)])
@pytest.mark.parametrize("many", [False, True, None])
def test_tokens_of_the_best_pools(
    ratio: int, budget: int, many: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if many is not None:
        few_held(monkeypatch, many=many)
    positions = torch.tensor([-1, 0, ratio - 1, budget + ratio, 799])
    scores = torch.randn(len(positions), 800 // ratio).round(decimals=1)
    whole = (positions + 1) // ratio <= budget // ratio
    scores[whole] = torch.nan
    rows = launch.top_pools(scores.to(DEVICE), positions.to(DEVICE), ratio, budget).tolist()
    for row, score, position in zip(rows, scores, positions.tolist(), strict=True):
        pools, kept = (position + 1) // ratio, budget // ratio
        best = searched(score.nan_to_num(0.0).tolist(), pools, kept)
        wanted = [g * ratio + r for g in best if g >= 0 for r in range(ratio)]
        wanted += range(pools * ratio, position + 1)
        assert row == wanted + [-1] * (budget + ratio - 1 - len(wanted)), position


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_follows_the_same_rules(kind: str) -> None:
    scores, visible = drawn(kind, 3, 200), torch.tensor([200, 90, 0])
    assert reference.top_k(scores, visible, 31).tolist() == expected(scores, visible, 31)
    positions = torch.tensor([799, 42, 2])
    found = launch.top_pools(scores.to(DEVICE), positions.to(DEVICE), 4, 64)
    assert torch.equal(reference.top_pools(scores, positions, 4, 64), found.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "columns", "k"),
    [(1, 32768, 512), (7, 262144, 2048), (130, 32768, 512), (100, 8190, 500), (3, 8192, 512)],
)
def test_long_rows_in_a_replayed_graph(rows: int, columns: int, k: int) -> None:
    scores = torch.randn(rows, columns, device="cuda")
    visible = torch.full((rows,), columns, device="cuda")
    launch.top_k(scores, visible, k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch.top_k(scores, visible, k)
    for decimals in (7, 2, 0):
        scores.copy_(torch.randn(rows, columns).round(decimals=decimals))
        visible.copy_(torch.randint(k, columns + 1, (rows,)))
        out.fill_(-7)
        graph.replay()
        assert torch.equal(out.cpu(), reference.top_k(scores.cpu(), visible.cpu(), k))


@pytest.mark.gpu
def test_a_row_is_chosen_alike_in_any_company() -> None:
    scores = torch.randn(launch.FEW_ROWS + 1, 20000, device="cuda").round(decimals=2)
    visible = torch.full((len(scores),), 19999, device="cuda")
    together = launch.top_k(scores, visible, 512)
    assert torch.equal(launch.top_k(scores[:5], visible[:5], 512), together[:5])
    pools = launch.top_pools(scores, 4 * visible, 4, 2048)
    assert torch.equal(launch.top_pools(scores[:5], 4 * visible[:5], 4, 2048), pools[:5])
