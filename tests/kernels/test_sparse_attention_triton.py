"""The Triton kernel of latent attention against dense fp64 softmax: interpreted, and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import backend
from kernels.cache_rows import (
    COMPRESSED_ROWS,
    WINDOW_ROWS,
    RowFormat,
    decode_rows,
    encode_rows,
    latent_rows,
)
from kernels.cards import CARDS
from kernels.sparse_attention import Entries, Rows, sparse_attention
from kernels.sparse_attention.configs import Config, select
from kernels.sparse_attention.launch import Layout, Question, attend
from kernels.split_keys import Partials

DEVICE = "cpu" if backend.interpreted() else "cuda"
ERROR = 3e-3  # queries and weights in bf16, and a bf16 output
WHOLE, SPLIT = Config(16, 32, 1, 4, 3), Config(16, 32, 2, 4, 3)
WIDE, WIDE_SPLIT = Config(64, 32, 1, 8, 3), Config(32, 16, 2, 8, 2)
HEADS, PAGES, WINDOW_PAGE, ENTRY_PAGE = 20, 11, 16, 8
# Window rows, entries, width.
FORMS = {
    "v4": (latent_rows(512, 64), latent_rows(512, 64), 512),
    "v4.1": (WINDOW_ROWS, COMPRESSED_ROWS, 128),
    "plain": (None, None, 64),
}
# First and last window row, and visible entries: of one key, of odd numbers, of none.
TOKENS = ((5, 5, 0), (0, 64, 63), (31, 130, 65), (9, 8, 3))


def rows(form: RowFormat | None, width: int, per_page: int) -> Rows:
    """Two sequences of PAGES pages at random places; a page that no table names is poison."""
    pool = torch.randn(2 * PAGES + 1, per_page, width).bfloat16()
    stored = pool if form is None else encode_rows(pool, form)
    table = torch.randperm(2 * PAGES).view(2, PAGES)
    stored[-1] = torch.nan if form is None else 0xFF
    return Rows(stored.to(DEVICE), table.to(DEVICE), form)


def question(
    width: int, tokens: tuple[tuple[int, int, int], ...] = TOKENS, heads: int = HEADS
) -> Question:
    first, last, _ = torch.tensor(tokens).T.to(DEVICE)
    return Question(
        torch.randn(len(tokens), heads, width).bfloat16().to(DEVICE),
        (torch.arange(len(tokens)) % 2).to(DEVICE),
        width**-0.5,
        torch.randn(heads).to(DEVICE),
        first.contiguous(),
        last.contiguous(),
    )


def entries_of(pool: Rows, *, selected: bool) -> Entries:
    """What TOKENS say is visible, or 33 of it at random."""
    visible = torch.tensor([token[2] for token in TOKENS])
    chosen = torch.full((len(TOKENS), 33), -1)
    for t, count in enumerate(visible.tolist()):
        picked = torch.randperm(count)[:33].sort().values
        chosen[t, : len(picked)] = picked
    return Entries(pool, visible.to(DEVICE), chosen.to(DEVICE) if selected else None)


def keys_of(pool: Rows, sequence: int, numbers: torch.Tensor) -> torch.Tensor:
    """fp64 [L, D] of the numbers that exist."""
    per_page, table = pool.pool.shape[1], pool.pages.cpu()
    found = []
    for n in numbers.tolist():
        exists = 0 <= sequence < len(table) and 0 <= n < per_page * table.shape[1]
        page = int(table[sequence, n // per_page]) if exists else -1
        if 0 <= page < len(pool.pool):
            row = pool.pool[page, n % per_page].cpu()
            found.append((row if pool.form is None else decode_rows(row, pool.form)).double())
    return torch.stack(found) if found else torch.zeros(0, pool.width, dtype=torch.float64)


def dense(asked: Question, window: Rows | None, entries: Entries | None) -> torch.Tensor:
    """fp64 [T, H, D]: torch's softmax over the logits and the sink's column."""
    out = []
    for t, b in enumerate(asked.sequence_T.tolist()):
        keys = [torch.zeros(0, asked.q_THD.shape[2], dtype=torch.float64)]
        if window is not None:
            span = torch.arange(int(asked.first_T[t]), int(asked.last_T[t]) + 1)
            keys.append(keys_of(window, b, span))
        if entries is not None:
            chosen = entries.selected_TS
            every = torch.arange(int(entries.visible_T[t]))
            keys.append(keys_of(entries.rows, b, every if chosen is None else chosen[t]))
        k = torch.cat(keys)
        logits = asked.q_THD[t].cpu().double() @ k.T * asked.scale
        if asked.sinks_H is not None:
            logits = torch.cat([logits, asked.sinks_H.cpu().double()[:, None]], dim=1)
        out.append(logits.softmax(1)[:, : len(k)] @ k)
    return torch.stack(out)


def run(
    asked: Question, window: Rows | None, entries: Entries | None, config: Config
) -> torch.Tensor:
    """Into poisoned memory."""
    out, (tokens, heads, width) = torch.full_like(asked.q_THD, torch.nan), asked.q_THD.shape
    partials = Partials.allocate(tokens, heads, config.splits, width, out.device)
    partials.values.fill_(torch.nan)
    partials.stats.fill_(torch.nan)
    return attend(asked, window, entries, out, partials, config)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    ("selected", "config"),
    [(True, WHOLE), (False, SPLIT), (True, WIDE_SPLIT), (False, WIDE)],
    ids=["selected", "visible-split", "selected-wide-split", "visible-wide"],
)
def test_window_and_entries_agree_with_double_precision(
    name: str, selected: bool, config: Config
) -> None:
    window_form, entry_form, width = FORMS[name]
    window = rows(window_form, width, WINDOW_PAGE)
    entries = entries_of(rows(entry_form, width, ENTRY_PAGE), selected=selected)
    asked = question(width)
    found = run(asked, window, entries, config)
    assert error(found, dense(asked, window, entries)) < ERROR


@pytest.mark.parametrize("config", [WHOLE, SPLIT], ids=["whole", "split"])
def test_one_kind_of_keys_and_none_at_all(config: Config) -> None:
    """Without a key the result is 0, with and without sinks."""
    window, asked = rows(None, 64, WINDOW_PAGE), question(64)
    found = run(asked, window, None, config)
    assert error(found, dense(asked, window, None)) < ERROR
    assert not found[3].any()
    entries = entries_of(rows(None, 64, ENTRY_PAGE), selected=True)
    plain = replace(asked, sinks_H=None, first_T=None, last_T=None)
    found = run(plain, None, entries, config)
    assert error(found, dense(plain, None, entries)) < ERROR
    assert not found[0].any()


def test_a_sink_takes_weight_and_gives_none() -> None:
    window, asked = rows(None, 64, WINDOW_PAGE), question(64, ((7, 7, 0),))
    sinks = torch.tensor([0.0, -torch.inf, 60.0, -60.0]).repeat(5).to(DEVICE)
    asked = replace(asked, q_THD=torch.zeros_like(asked.q_THD), sinks_H=sinks)
    key = keys_of(window, 0, torch.tensor([7]))
    weights = torch.tensor([0.5, 1.0, 0.0, 1.0], dtype=torch.float64).repeat(5)[:, None]
    found = run(asked, window, None, SPLIT)[0].cpu().double()
    torch.testing.assert_close(found, weights * key, rtol=4e-3, atol=1e-20)


def test_what_is_out_of_range_is_left_out() -> None:
    """Numbers, sequences and pages of stale metadata; the poison page would show in the result."""
    window, entries = rows(None, 64, WINDOW_PAGE), rows(None, 64, ENTRY_PAGE)
    window.pages[0, 1], window.pages[0, 3], window.pages[1, 0] = -1, 2 * PAGES + 1, 1 << 40
    entries.pages[0, 2] = -7
    asked = question(64, ((0, 90, 0), (0, 1 << 40, 0), (-5, 40, 0), (0, 50, 0), (0, 3, 0)))
    asked.sequence_T[3], asked.sequence_T[4] = 2, -1
    chosen = torch.tensor([[0, 17, 88, 3, -5, 1 << 33, 87]]).repeat(5, 1).to(DEVICE)
    named = Entries(entries, torch.zeros(5, dtype=torch.int64, device=DEVICE), chosen)
    checked = replace(asked, last_T=asked.last_T.clamp_max(WINDOW_PAGE * PAGES))
    assert error(run(asked, window, named, SPLIT), dense(checked, window, named)) < ERROR
    every = Entries(entries, torch.tensor([88, 1 << 40, -3, 9, 9], device=DEVICE))
    expected = Entries(entries, torch.tensor([88, 88, 0, 9, 9]))
    assert error(run(asked, window, every, SPLIT), dense(checked, window, expected)) < ERROR


@pytest.mark.parametrize("name", ["e4m3", "e4m3-tail", "e2m1"])
def test_every_code_is_decoded_exactly(name: str) -> None:
    """A single key without a sink is the result; its row holds all codes."""
    codes = torch.arange(256, dtype=torch.uint8)
    if name == "e2m1":
        form, row = COMPRESSED_ROWS, torch.cat([codes, (torch.arange(32) * 4 + 1).byte()])
    else:
        codes[[0x7F, 0xFF]] = 0
        scales = torch.arange(119, 135, dtype=torch.uint8)
        form, row = WINDOW_ROWS, torch.cat([codes, codes.flip(0), scales])
    if name == "e4m3-tail":
        form, tail = latent_rows(512, 64), torch.randn(64).bfloat16().view(torch.uint8)
        codes = torch.cat([codes, codes[:192]])
        row = torch.cat([codes, tail, torch.arange(123, 130).byte(), torch.full((1,), 0xFF).byte()])
    window = Rows(row.view(1, 1, -1).to(DEVICE), torch.zeros(1, 1, dtype=torch.int64), form)
    window = replace(window, pages=window.pages.to(DEVICE))
    asked = replace(question(512, ((0, 0, 0),)), sinks_H=None)
    found = run(asked, window, None, WHOLE)
    expected = decode_rows(row, form).bfloat16().expand(HEADS, 512)
    assert torch.equal(found[0].cpu(), expected)


def test_no_tokens() -> None:
    window = rows(None, 64, WINDOW_PAGE)
    asked = question(64)
    none = Question(asked.q_THD[:0], asked.sequence_T[:0], 1.0, asked.sinks_H)
    none = replace(none, first_T=asked.first_T[:0], last_T=asked.last_T[:0])
    assert run(none, window, None, SPLIT).shape == (0, HEADS, 64)


def test_a_token_does_not_depend_on_the_others() -> None:
    window, asked = rows(None, 64, WINDOW_PAGE), question(64)
    together = run(asked, window, None, SPLIT)
    for t in range(len(TOKENS)):
        alone = Question(
            asked.q_THD[t : t + 1],
            asked.sequence_T[t : t + 1],
            asked.scale,
            asked.sinks_H,
            asked.first_T[t : t + 1],
            asked.last_T[t : t + 1],
        )
        assert torch.equal(run(alone, window, None, SPLIT)[0], together[t])


def test_rows_that_no_kernel_reads_are_refused() -> None:
    with pytest.raises(ValueError, match="plain"):
        Layout.of(rows(latent_rows(512, 128), 512, 1))


@pytest.mark.parametrize("target", backend.TARGETS)
def test_splits_fill_the_card_and_follow_from_the_shape(target: int) -> None:
    card = CARDS[target]
    for coded in (False, True):
        found = [select(card, tokens, 64, coded=coded) for tokens in (0, 1, 4, 16, 64, 8192)]
        splits = [config.splits for config in found]
        assert splits == sorted(splits, reverse=True) and splits[-1] == 1
        assert all(count & (count - 1) == 0 and count <= 32 for count in splits)
        assert splits[3] * 16 * 64 // found[3].block_heads > card.multiprocessors / 2
        assert [config.block_heads for config in found[2:4]] == [16, 64]
        assert select(card, 8192, 32, coded=coded).block_heads == 16


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("tokens", "heads"), [(1, HEADS), (4, HEADS), (65, HEADS), (33, 50)])
def test_a_graph_replays_with_other_inputs(name: str, tokens: int, heads: int) -> None:
    window_form, entry_form, width = FORMS[name]
    window, pool = rows(window_form, width, WINDOW_PAGE), rows(entry_form, width, ENTRY_PAGE)
    asked = question(width, tuple(TOKENS[t % len(TOKENS)] for t in range(tokens)), heads)
    assert asked.first_T is not None and asked.last_T is not None and asked.sinks_H is not None
    visible = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
    entries = Entries(pool, visible)

    def call() -> torch.Tensor:
        return sparse_attention(
            asked.q_THD, window, asked.first_T, asked.last_T, asked.sequence_T, asked.sinks_H,
            scale=asked.scale, entries=entries,
        )  # fmt: skip

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(2):
        asked.q_THD.normal_()
        asked.last_T.copy_(asked.first_T + torch.randint(0, 100, (tokens,), device=DEVICE))
        visible.copy_(torch.randint(0, 88, (tokens,), device=DEVICE))
        out.fill_(torch.nan)
        graph.replay()
        assert error(out, dense(asked, window, entries)) < ERROR
