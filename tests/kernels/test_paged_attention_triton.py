"""Paged attention's Triton kernels against fp64: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kernels import backend, paged_attention
from kernels.paged_attention import configs
from kernels.paged_attention.launch import Place, attend, write
from kernels.split_keys import Partials

DEVICE = "cpu" if backend.interpreted() else "cuda"
PAGE, WIDTH = 4, 32
BF16_ERROR = 5e-3  # of bf16 weights and outputs
INVALID = (-1, 10_000, -(2**40), 2**40)  # pages, sequences: none may be followed
# Positions; cut to 32 bits they are -3, 5, 5 and 40, which is behind 16 selected tokens.
NEGATIVE = (-3, -(2**32) + 5, -(2**40) + 5, -(2**32) + 40)


@dataclass
class Step:
    """A packed step: `counts[b]` tokens at the end of `lengths[b]` of sequence b."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    place: Place
    gate: torch.Tensor
    selected: torch.Tensor | None = None

    @property
    def pools(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k, self.v


def step(
    lengths: list[int], counts: list[int], heads: int, key_heads: int, *, width: int = WIDTH
) -> Step:
    """Pages lie anywhere; what no table names, and entries behind a sequence, are NaN."""
    pages_of = [-(-length // PAGE) for length in lengths]
    columns, total = max(pages_of) + 1, sum(pages_of) + 3
    order = torch.randperm(total)
    table = torch.full((len(lengths), columns), -1)
    k, v = (torch.full((total, PAGE, key_heads, width), torch.nan) for _ in range(2))
    used = 0
    for b, (length, pages) in enumerate(zip(lengths, pages_of, strict=True)):
        table[b, :pages] = order[used : used + pages]
        used += pages
        entry = torch.arange(length)
        for pool in (k, v):
            pool[table[b, entry // PAGE], entry % PAGE] = torch.randn(length, key_heads, width)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(counts))
    positions = torch.cat([torch.arange(n - m, n) for n, m in zip(lengths, counts, strict=True)])
    both = torch.randn(sum(counts), heads, 2 * width).bfloat16().to(DEVICE)
    place = Place(*(x.to(DEVICE) for x in (table, sequence, positions)))
    q, gate = both[..., :width].contiguous(), both[..., width:]
    return Step(q, k.bfloat16().to(DEVICE), v.bfloat16().to(DEVICE), place, gate)


def selection(s: Step, slots: int) -> torch.Tensor:
    """Positions that each token sees, in order, fewer from token to token, then -1."""
    selected = torch.full((len(s.q), slots), -1)
    for t, position in enumerate(s.place.positions_T.tolist()):
        chosen = torch.randperm(position + 1)[: slots - t % slots].sort().values
        selected[t, : len(chosen)] = chosen
    return selected.to(DEVICE)


def exact(s: Step, *, gated: bool = True) -> torch.Tensor:
    """fp64, token by token, with the keys gathered by hand."""
    q, k, v, gate = (x.cpu().double() for x in (s.q, s.k, s.v, s.gate))
    table, sequences, positions = (
        x.cpu() for x in (s.place.page_table_BP, s.place.sequence_T, s.place.positions_T)
    )
    out = torch.zeros_like(q)
    for t, (b, position) in enumerate(zip(sequences.tolist(), positions.tolist(), strict=True)):
        if not 0 <= b < len(table):
            continue
        seen = torch.arange(max(position + 1, 0)) if s.selected is None else s.selected[t].cpu()
        seen = seen[(seen >= 0) & (seen <= position)]
        pages = table[b, seen // PAGE]
        known = (pages >= 0) & (pages < len(k))
        at = pages[known], (seen % PAGE)[known]
        query = q[t].view(k.shape[2], -1, q.shape[2])
        logits = torch.einsum("gid,lgd->gil", query, k[at]) * q.shape[2] ** -0.5
        out[t] = torch.einsum("gil,lgd->gid", logits.softmax(-1), v[at]).reshape(q.shape[1:])
    return out * torch.sigmoid(gate) if gated else out


def run(s: Step, *, gated: bool = True, splits: int | None = None) -> torch.Tensor:
    out = torch.full_like(s.q, torch.nan)
    tokens, heads, width = s.q.shape
    partials = Partials.allocate(tokens, heads, 64, width, s.q.device)
    partials.values.fill_(torch.nan)
    partials.stats.fill_(torch.nan)
    return attend(
        s.q, *s.pools, s.place, out, gate_THD=s.gate if gated else None, selected_TS=s.selected,
        partials=partials, splits=splits,
    )  # fmt: skip


def error(found: torch.Tensor, s: Step, *, gated: bool = True) -> float:
    expected = exact(s, gated=gated)
    return float((found.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("lengths", "counts", "heads", "key_heads"),
    [
        ([1], [1], 6, 1),
        ([63], [1], 24, 4),
        ([65, 1, 33], [1, 1, 1], 12, 1),
        ([70, 36], [4, 4], 6, 1),
        ([40, 9], [3, 1], 6, 2),
        ([129], [129], 3, 1),
        ([50, 3, 34, 1], [23, 1, 2, 1], 2, 1),
    ],
    ids=["one", "decode", "batch", "verify", "uneven", "prefill", "mixed"],
)
def test_dense_attention_agrees_with_double_precision(
    lengths: list[int], counts: list[int], heads: int, key_heads: int, splits: int
) -> None:
    s = step(lengths, counts, heads, key_heads)
    gated = splits == 1 or len(lengths) > 1
    assert error(run(s, gated=gated, splits=splits), s, gated=gated) < BF16_ERROR


@pytest.mark.parametrize(
    ("width", "pool"),
    [(32, torch.bfloat16), (128, torch.bfloat16), (256, torch.bfloat16), (32, torch.float32)],
)
@pytest.mark.parametrize("splits", [8, 1])
@pytest.mark.parametrize("counts", [[1, 1], [5, 2]], ids=["decode", "prefill"])
def test_selected_tokens_alone_are_seen(
    counts: list[int], splits: int, width: int, pool: torch.dtype
) -> None:
    s = step([90, 17], counts, 12, 1, width=width)
    s.k, s.v = s.k.to(pool), s.v.to(pool)
    s.selected = selection(s, 67)
    assert error(run(s, splits=splits), s) < BF16_ERROR


@pytest.mark.parametrize("splits", [1, 4])
def test_no_slots_behind_as_many_as_the_tokens_to_the_position_are_seen(splits: int) -> None:
    s = step([40], [3], 4, 2)
    s.place.positions_T[:] = torch.tensor([-1, 5, 39], device=DEVICE)
    s.selected = torch.arange(20, device=DEVICE).repeat(3, 1)
    found = run(s, splits=splits)
    assert error(found, s) < BF16_ERROR
    assert not found[0].any()


@pytest.mark.parametrize("splits", [1, 8])
def test_a_selection_gives_the_same_bits_beside_other_tokens(splits: int) -> None:
    s = step([90, 61, 33], [2, 3, 2], 12, 1, width=128)
    s.selected = selection(s, 67)
    together = run(s, splits=splits)
    mine, others = slice(2, 5), [0, 1, 5, 6]
    s.q[others] *= -2
    s.gate[others] += 1
    s.place.positions_T[others] -= 20
    s.place.sequence_T[5:] = -1
    s.selected[others] = selection(s, 67)[others]
    assert torch.equal(run(s, splits=splits)[mine], together[mine])


@pytest.mark.parametrize(("width", "dtype"), [(16, torch.bfloat16), (256, torch.float32)])
def test_other_widths_and_types(width: int, dtype: torch.dtype) -> None:
    s = step([37], [2], 2, 1, width=width)
    s.q, s.k, s.v, s.gate = (x.to(dtype) for x in (s.q, s.k, s.v, s.gate))
    assert error(run(s), s) < BF16_ERROR


def test_holes_and_numbers_out_of_range_are_left_out() -> None:
    s = step([40, 40, 40, 40, 9], [2, 2, 2, 2, 1], 4, 1)
    for b, page in enumerate(INVALID):
        s.place.page_table_BP[b, 2 * b + 1] = page
    s.place.sequence_T[2:4] = torch.tensor([-1, 2**40], device=DEVICE)
    s.place.sequence_T[8] = len(s.place.page_table_BP)
    found = run(s, splits=4)
    assert error(found, s) < BF16_ERROR
    assert not found[[2, 3, 8]].any()


@pytest.mark.parametrize("splits", [1, 4])
def test_selected_numbers_out_of_range_are_left_out(splits: int) -> None:
    s = step([40, 9, 40, 40], [1, 1, 1, 1], 4, 1)
    chosen = torch.tensor([[0, 7, 39, 2**32 + 3, -(2**32) + 3, 2**40, -9, 5]]).repeat(4, 1)
    chosen[1, [1, 2]] = torch.tensor([4, 8])
    s.place.page_table_BP[2, [0, 1]] = torch.tensor([10_000, -1], device=DEVICE)
    s.place.sequence_T[3] = 2**40
    s.selected = chosen.to(DEVICE)
    found = run(s, splits=splits)
    s.selected = torch.where((chosen >= 0) & (chosen < 40), chosen, -1)
    assert error(found, s) < BF16_ERROR
    assert not found[3].any()


def test_positions_out_of_range_read_nothing_outside_the_table() -> None:
    s = step([7, 8], [1, 1], 2, 1)
    s.place.page_table_BP[0] = s.place.page_table_BP[1]
    s.place.positions_T[:] = torch.tensor([-3, 2**40], device=DEVICE)
    found = run(s, splits=2)
    assert not found[0].any()
    s.place.positions_T[:] = torch.tensor([-1, 7], device=DEVICE)
    assert error(found, s) < BF16_ERROR


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("selected", [False, True])
def test_tokens_of_negative_positions_see_nothing(selected: bool, splits: int) -> None:
    s = step([60], [6], 2, 1)
    s.selected = selection(s, 16) if selected else None
    s.place.positions_T[:4] = torch.tensor(NEGATIVE, device=DEVICE)
    found = run(s, splits=splits)
    assert error(found, s) < BF16_ERROR
    assert not found[:4].any()


def test_an_empty_step_is_left_alone() -> None:
    s = step([5], [1], 2, 1)
    place = Place(s.place.page_table_BP, s.place.sequence_T[:0], s.place.positions_T[:0])
    assert attend(s.q[:0], *s.pools, place, s.q[:0]).shape == (0, 2, WIDTH)
    assert write(s.k[0, :0], s.k, place) is s.k


@pytest.mark.parametrize(
    ("target", "tokens", "sequences", "group", "selected", "expected"),
    [
        (80, 1, 1, 6, False, (1, 1)),
        (80, 64, 16, 6, False, (4, 1)),
        (86, 2048, 1, 6, False, (10, 1)),
        (80, 2048, 1, 6, False, (21, 1)),
        (80, 2063, 16, 6, False, (21, 16)),
        (89, 2063, 16, 6, False, (10, 10)),
        (80, 2048, 1, 12, True, (1, 1)),
        (80, 2048, 1, 196, False, (1, 1)),
    ],
)
def test_tiles_follow_the_shape_of_the_step(
    target: int, tokens: int, sequences: int, group: int, selected: bool, expected: tuple[int, int]
) -> None:
    per_tile = configs.tile_tokens(target, tokens, sequences, group, selected=selected)
    assert (per_tile, configs.dealt_runs(tokens, sequences, per_tile)) == expected


@pytest.mark.parametrize(("pool", "rows"), [("bfloat16", "float32"), ("uint8", "uint8")])
@pytest.mark.parametrize("shape", [(1,), (2, 33), (1100,)])
def test_rows_are_written_where_the_table_says(
    pool: str, rows: str, shape: tuple[int, ...]
) -> None:
    kind = getattr(torch, rows)
    values = (torch.rand(7, *shape) * 200).to(kind).to(DEVICE)
    pages = torch.full((6, PAGE, *shape), 77, dtype=getattr(torch, pool), device=DEVICE)
    table = torch.tensor([[4, 1, 3], [0, -1, 99]])
    sequence = torch.tensor([0, 1, 0, 1, 1, 5, 0])  # the fourth to the last are out of range
    positions = torch.tensor([5, 3, 2, 4, 8, 0, 2**33])
    expected = pages.clone()
    for t, at in enumerate([(1, 1), (0, 3), (4, 2)]):
        expected[at] = values[t].to(expected.dtype)
    write(values, pages, Place(*(x.to(DEVICE) for x in (table, sequence, positions))))
    assert torch.equal(pages, expected)


def test_only_the_last_of_a_block_is_written() -> None:
    values = torch.arange(9.0, device=DEVICE)[:, None]
    pages = torch.full((2, 2, 1), -1.0, device=DEVICE)
    table, sequence = torch.tensor([[1, 0]]), torch.zeros(9, dtype=torch.int64)
    place = Place(*(x.to(DEVICE) for x in (table, sequence, torch.arange(-1, 8))))
    write(values, pages, place, ratio=4)
    assert pages.flatten().tolist() == [-1, -1, 4, 8]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "counts", [[1] * 16, [4] * 3, [300, 1, 7]], ids=["decode", "verify", "mix"]
)
def test_a_replayed_graph_follows_new_lengths(counts: list[int]) -> None:
    s = step([331, *range(20, 19 + len(counts))], counts, 24, 4, width=256)
    at = (s.place.page_table_BP, s.place.sequence_T, s.place.positions_T)

    def call() -> torch.Tensor:
        return paged_attention.paged_attention(s.q, *s.pools, *at, gate_THD=s.gate)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for back in (0, 1, 2):
        s.q.copy_(torch.randn_like(s.q))
        s.place.positions_T.sub_(back).clamp_(min=0)
        out.fill_(torch.nan)
        graph.replay()
        assert error(out, s) < BF16_ERROR


@pytest.mark.gpu
def test_a_replayed_graph_follows_new_selections() -> None:
    s = step([331, 20], [150, 2], 24, 2, width=256)
    s.selected = selection(s, 67)

    run(s)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(s)
    for _ in range(2):
        s.q.copy_(torch.randn_like(s.q))
        s.selected.copy_(selection(s, 67))
        out.fill_(torch.nan)
        graph.replay()
        assert error(out, s) < BF16_ERROR


@pytest.mark.gpu
def test_a_token_does_not_depend_on_the_other_sequences() -> None:
    # On a card alone: the interpreter's products come from a library that promises no such thing.
    s = step([200, 131, 77, 8], [4, 4, 4, 4], 24, 4, width=256)
    together = run(s)
    for name in ("q", "gate"):
        getattr(s, name)[4:8].normal_()
    s.place.positions_T[:4] -= 60
    s.place.sequence_T[12:] = -1
    assert torch.equal(run(s)[8:12], together[8:12])
