"""The QSA indexer's Triton kernels against fp64: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import backend, qsa_index
from kernels.paged_attention.launch import Place, write
from kernels.qsa_index import launch
from kernels.top_k import launch as top_k

DEVICE = "cpu" if backend.interpreted() else "cuda"
RATIO, BUDGET, HEADS, WIDTH, PAGE = 4, 24, 3, 16, 4
KEPT = BUDGET // RATIO


def paged(blocks: list[int], *, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool whose used entries are small whole numbers and the others NaN, and its table.

    Products of such keys are exact in any type and order, so that equal scores are equal.
    """
    pages_of = [-(-n // PAGE) for n in blocks]
    order = torch.randperm(sum(pages_of) + 2)
    pool = torch.full((len(order), PAGE, width), torch.nan)
    table = torch.full((len(blocks), max(pages_of) + 1), -1)
    used = 0
    for b, (count, pages) in enumerate(zip(blocks, pages_of, strict=True)):
        table[b, :pages] = order[used : used + pages]
        used += pages
        entry = torch.arange(count)
        keys = torch.randint(-3, 4, (count, width)).float()
        pool[table[b, entry // PAGE], entry % PAGE] = keys
    return pool, table


def brute_force(
    q: torch.Tensor, pool: torch.Tensor, table: torch.Tensor, b: int, position: int
) -> list[int]:
    blocks = (position + 1) // RATIO
    rows = [(int(table[b, n // PAGE]), n % PAGE) for n in range(blocks)]
    scores = [
        float((pool[page, entry].double() @ q.double().t()).clamp(min=0).sum()) if page >= 0 else 0
        for page, entry in rows
    ]
    best = sorted(range(blocks), key=lambda n: (-scores[n], n))[:KEPT]
    tokens = [n * RATIO + i for n in sorted(best) for i in range(RATIO)]
    tokens += range(blocks * RATIO, position + 1)
    return tokens + [-1] * (BUDGET + RATIO - 1 - len(tokens))


def step(
    lengths: list[int], counts: list[int], *, width: int = WIDTH
) -> tuple[torch.Tensor, torch.Tensor, Place]:
    pool, table = paged([n // RATIO + 1 for n in lengths], width=width)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(counts))
    positions = torch.cat([torch.arange(n - m, n) for n, m in zip(lengths, counts, strict=True)])
    q = torch.randint(-3, 4, (sum(counts), HEADS, width)).bfloat16()
    place = Place(*(x.to(DEVICE) for x in (table, sequence, positions)))
    return q.to(DEVICE), pool.bfloat16().to(DEVICE), place


def check(found: torch.Tensor, q: torch.Tensor, pool: torch.Tensor, place: Place) -> None:
    q, pool, table = q.cpu(), pool.cpu(), place.page_table_BP.cpu()
    numbers = zip(place.sequence_T.tolist(), place.positions_T.tolist(), strict=True)
    for t, (b, position) in enumerate(numbers):
        assert found[t].tolist() == brute_force(q[t], pool, table, b, position), t


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([1], [1]),
        ([27], [1]),
        ([400], [1]),
        ([263, 12, 130], [1, 1, 1]),
        ([131, 66], [4, 4]),
        ([150, 40, 33], [49, 1, 2]),
    ],
    ids=["first", "all fit", "decode", "batch", "verify", "mixed"],
)
def test_selection_equals_brute_force(lengths: list[int], counts: list[int]) -> None:
    q, pool, place = step(lengths, counts)
    check(launch.select_tokens(q, pool, place, RATIO, BUDGET), q, pool, place)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_agree_with_double_precision(dtype: torch.dtype) -> None:
    q, pool, place = step([700], [2], width=64)
    q, pool = torch.randn_like(q, dtype=dtype), torch.randn_like(pool, dtype=dtype)
    found, _ = launch.scores_of(q, pool, place, range(2), RATIO, KEPT)
    keys = pool[place.page_table_BP[0, :-1]].flatten(0, 1)[:174].double()
    exact = (torch.einsum("thd,kd->thk", q.double(), keys)).clamp(min=0).sum(1) / 8
    torch.testing.assert_close(found[:, :174].double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counts", [[1, 1], [4, 3]])
def test_bests_of_groups_come_with_the_scores(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows of so few blocks, too."""

    def never(*_: object) -> None:
        raise AssertionError("another launch for the bests")

    monkeypatch.setattr(top_k, "DIRECT_FEW", 16)
    monkeypatch.setattr(top_k, "_bests", never)
    q, pool, place = step([523, 111], counts)
    check(launch.select_tokens(q, pool, place, RATIO, BUDGET), q, pool, place)


def test_chunks_of_tokens_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, pool, place = step([90, 77], [9, 10])
    monkeypatch.setattr(launch, "SCORE_BYTES", 4 * launch.columns_of(pool, place) * 7)
    check(launch.select_tokens(q, pool, place, RATIO, BUDGET), q, pool, place)


def test_blocks_without_a_page_score_nothing_and_stray_tokens_are_harmless() -> None:
    q, pool, place = step([200, 190, 5], [1, 1, 1])
    place.page_table_BP[0, 3] = -1
    place.page_table_BP[0, 5] = 10**6
    place.sequence_T[1:] = torch.tensor([2**40, -1], device=DEVICE)
    place.positions_T[1:] = torch.tensor([2**40, -1], device=DEVICE)
    found = launch.select_tokens(q, pool, place, RATIO, BUDGET)
    place.page_table_BP[0, 5] = -1
    expected = brute_force(q[0].cpu(), pool.cpu(), place.page_table_BP.cpu(), 0, 199)
    assert found[0].tolist() == expected
    assert (found[2] == -1).all()


def test_an_empty_step_selects_nothing() -> None:
    q, pool, place = step([9], [1])
    place = Place(place.page_table_BP, place.sequence_T[:0], place.positions_T[:0])
    assert launch.select_tokens(q[:0], pool, place, RATIO, BUDGET).shape == (0, BUDGET + RATIO - 1)
    assert launch.mean_of_blocks(torch.empty(0, RATIO, WIDTH, device=DEVICE)).shape == (0, WIDTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (65, 33)])
def test_means_are_taken_in_fp32(tokens: int, width: int, dtype: torch.dtype) -> None:
    keys = torch.randn(tokens, RATIO, width).to(dtype).to(DEVICE)
    a, b, c, d = keys.float().unbind(1)
    expected = ((((a + b) + c) + d) / RATIO).to(dtype)
    assert torch.equal(launch.mean_of_blocks(keys), expected)


@pytest.mark.gpu
def test_a_replayed_graph_follows_new_lengths() -> None:
    q, pool, place = step([1300, 420, 90], [4, 4, 4], width=128)
    at = (place.page_table_BP, place.sequence_T, place.positions_T)

    def call() -> torch.Tensor:
        return qsa_index.select_tokens(q, pool, *at, ratio=RATIO, budget=BUDGET)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for back in (0, 1, 61):
        q.copy_(torch.randint(-3, 4, q.shape))
        place.positions_T.sub_(back)
        found.fill_(7)
        graph.replay()
        check(found, q, pool, place)


@pytest.mark.gpu
def test_public_functions_reach_the_kernels() -> None:
    keys = torch.randn(6, RATIO, WIDTH, device=DEVICE).bfloat16()
    means = qsa_index.mean_of_blocks(keys)
    pool = torch.zeros(4, PAGE, WIDTH, device=DEVICE).bfloat16()
    other = pool.clone()
    place = Place(
        torch.tensor([[2, 0]], device=DEVICE),
        torch.zeros(6, dtype=torch.int64, device=DEVICE),
        torch.arange(14, 20, device=DEVICE),
    )
    at = (place.page_table_BP, place.sequence_T, place.positions_T)
    qsa_index.write_closed_blocks(means, pool, *at, RATIO)
    write(means, other, place, RATIO)
    assert torch.equal(pool, other)
    assert torch.equal(pool[2, 3], means[1]) and torch.equal(pool[0, 0], means[5])
