"""Scores and selections of the indexer: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.cache_rows import INDEX_ROWS, RowFormat, decode_rows, encode_rows
from kernels.lightning_index import Candidates, launch
from kernels.top_k import launch as top_k

DEVICE = "cpu" if backend.interpreted() else "cuda"
HEADS, WIDTH, PER_PAGE, PAGES = 5, 64, 8, 40
ERROR = 1e-5  # of fp32 sums of exact products
FORMS: dict[str, RowFormat | None] = {
    "bf16": None,
    "index": INDEX_ROWS,
    "e4m3": RowFormat("e4m3", 64, "ue8m0"),
    "e2m1-e4m3": RowFormat("e2m1", 16, "e4m3"),
}


class Setting:
    """Two sequences of random keys in shuffled pages, a hole in the second's table; queries."""

    def __init__(self, form: str, tokens: int) -> None:
        self.form = FORMS[form]
        values = torch.randn(PAGES, PER_PAGE, WIDTH).bfloat16()
        self.pool = values if self.form is None else encode_rows(values, self.form)
        self.values = values.double() if self.form is None else self._decoded()
        self.pages = torch.stack([torch.randperm(PAGES)[:24], torch.randperm(PAGES)[:24]])
        self.pages[1, 3], self.pages[1, 5] = -1, PAGES
        self.q = torch.randn(tokens, HEADS, WIDTH).bfloat16()
        self.weights = torch.randn(tokens, HEADS)
        self.sequence = (torch.arange(tokens) * 3 // max(tokens, 1) == 1).long()
        self.visible = torch.randint(0, 24 * PER_PAGE + 1, (tokens,))

    def _decoded(self) -> torch.Tensor:
        assert self.form is not None
        return decode_rows(self.pool, self.form).double()

    def scores(self, t: int) -> torch.Tensor:
        """fp64 of the visible entries, -inf where there is no page."""
        table = self.pages[self.sequence[t]]
        missing = (table < 0) | (table >= PAGES)
        keys = self.values[table.masked_fill(missing, 0)].flatten(0, 1)
        found = (self.q[t].double() @ keys.T).clamp_min(0).T @ self.weights[t].double()
        found[missing.repeat_interleave(PER_PAGE)] = -torch.inf
        return found[: self.visible[t]]

    def queries(self) -> launch.Queries:
        given = (self.q, self.weights, self.sequence, self.visible)
        q, weights, sequence, visible = (x.to(DEVICE) for x in given)
        return launch.Queries(q, weights, sequence, visible)

    def keys(self) -> launch.Keys:
        return launch.Keys(self.pool.to(DEVICE), self.pages.to(DEVICE), self.form)


def best(scores: torch.Tensor, allowed: list[int], top: int) -> list[int]:
    """By sorting (score, number)."""
    values = scores.tolist()
    ranked = sorted(allowed, key=lambda g: (-values[g], g))[:top]
    return sorted(g for g in ranked if values[g] > -torch.inf)


def rows_of(found: torch.Tensor) -> list[list[int]]:
    return [[g for g in row if g >= 0] for row in found.tolist()]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 33])
def test_scores_agree_with_double_precision(form: str, tokens: int) -> None:
    setting = Setting(form, tokens)
    out = torch.full((tokens, 24 * PER_PAGE), torch.nan, device=DEVICE)
    launch.fill_scores(setting.queries(), setting.keys(), out)
    for t, row in enumerate(out.cpu().double()):
        wanted, visible = setting.scores(t), int(setting.visible[t])
        there = wanted > -torch.inf
        assert torch.equal(row[:visible] > -torch.inf, there)
        assert ((row[:visible] - wanted)[there].abs() < ERROR * WIDTH * HEADS).all()
        assert row[visible:].isnan().all()


def in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows as short as here are selected in groups, too, whose bests the scores' kernel finds."""
    monkeypatch.setattr(top_k, "DIRECT_FEW", 16)

    def never(*_: object) -> None:
        raise AssertionError("another launch for the bests")

    monkeypatch.setattr(top_k, "_bests", never)


@pytest.mark.parametrize(
    ("form", "top", "tokens", "held"),
    [("bf16", 1, 34, 0), ("index", 30, 9, 0), ("index", 7, 3, 99)],
)
def test_selections_equal_a_scalar_search(
    form: str, top: int, tokens: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With programs of many tokens, of some, and of one."""
    monkeypatch.setattr(launch, "HELD_PROGRAMS", held)
    setting = Setting(form, tokens)
    found = launch.select_entries(setting.queries(), setting.keys(), top, None)
    for t, row in enumerate(rows_of(found)):
        visible = int(setting.visible[t])
        whole = list(range(visible))
        wanted = whole if visible <= top else best(setting.scores(t), whole, top)
        assert row == wanted, t


@pytest.mark.parametrize(("top", "held"), [(1, 99), (20, 0)])
def test_bests_of_groups_come_with_the_scores(
    top: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "HELD_PROGRAMS", held)
    setting = Setting("index", 5)
    setting.visible[0] = 24 * PER_PAGE
    queries, keys = setting.queries(), setting.keys()
    blocks = torch.stack([torch.randperm(24)[:12].sort().values for _ in range(5)])
    candidates = Candidates(blocks.to(DEVICE), 8)
    whole = launch.select_entries(queries, keys, top, None)
    among = launch.select_entries(queries, keys, top, candidates)
    blocks_of_2 = launch.select_blocks(queries, keys, 2, top)
    in_groups(monkeypatch)
    assert torch.equal(launch.select_entries(queries, keys, top, None), whole)
    assert torch.equal(launch.select_entries(queries, keys, top, candidates), among)
    assert torch.equal(launch.select_blocks(queries, keys, 2, top), blocks_of_2)


def test_tokens_in_chunks_choose_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting("index", 7)
    whole = launch.select_entries(setting.queries(), setting.keys(), 20, None)
    monkeypatch.setattr(launch, "SCRATCH_BYTES", 3 * 4 * 24 * PER_PAGE)
    assert torch.equal(launch.select_entries(setting.queries(), setting.keys(), 20, None), whole)


def test_candidates_limit_the_selection() -> None:
    setting = Setting("index", 6)
    blocks = torch.stack([torch.randperm(48)[:9].sort().values for _ in range(6)])
    blocks[:, 7:] = -1
    candidates = Candidates(blocks.to(DEVICE), 4)
    found = launch.select_entries(setting.queries(), setting.keys(), 11, candidates)
    for t, row in enumerate(rows_of(found)):
        named = [4 * int(b) + r for b in blocks[t] if b >= 0 for r in range(4)]
        allowed = [g for g in named if g < setting.visible[t]]
        assert row == best(setting.scores(t), allowed, 11)


def test_best_blocks_and_always_the_newest() -> None:
    setting = Setting("bf16", 9)
    size, top = 8, 5
    found = launch.select_blocks(setting.queries(), setting.keys(), size, top)
    for t, row in enumerate(rows_of(found)):
        count = -(-int(setting.visible[t]) // size)
        if count <= top:
            assert row == list(range(count))
            continue
        scores = torch.stack([part.amax() for part in setting.scores(t).split(size)])
        scores[-1] = torch.inf
        assert row == best(scores, list(range(count)), top)


def test_sequences_out_of_range_take_nothing() -> None:
    setting = Setting("index", 3)
    setting.sequence = torch.tensor([-1, 2, 10**12])
    setting.visible = torch.tensor([100, 10**12, 150])
    found = launch.select_entries(setting.queries(), setting.keys(), 6, None)
    assert (found == -1).all()


def test_no_tokens() -> None:
    setting = Setting("bf16", 0)
    assert launch.select_entries(setting.queries(), setting.keys(), 6, None).shape == (0, 6)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 6, 100])
def test_selection_in_a_replayed_graph(tokens: int) -> None:
    setting = Setting("index", tokens)
    queries, keys = setting.queries(), setting.keys()
    launch.select_entries(queries, keys, 20, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = launch.select_entries(queries, keys, 20, None)
    for _ in range(2):
        other = Setting("index", tokens)
        setting.q, setting.weights, setting.visible = other.q, other.weights, other.visible
        queries.q_THD.copy_(other.q)
        queries.weights_TH.copy_(other.weights)
        queries.numbers_T.copy_(other.visible)
        found.fill_(-7)
        graph.replay()
        for t, row in enumerate(rows_of(found)):
            visible = int(setting.visible[t])
            whole = list(range(visible))
            assert row == (whole if visible <= 20 else best(setting.scores(t), whole, 20))


@pytest.mark.gpu
def test_a_token_does_not_depend_on_the_others() -> None:
    setting = Setting("index", 100)
    queries, keys = setting.queries(), setting.keys()
    together = launch.select_entries(queries, keys, 20, None)
    for t in (0, 31, 32, 99):
        alone = launch.select_entries(queries.part(t, t + 1), keys, 20, None)
        assert torch.equal(alone, together[t : t + 1])
