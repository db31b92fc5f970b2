"""Pooling of token windows against a softmax over each window at once."""

from __future__ import annotations

import pytest
import torch

from kernels.compressor import OVERLAP_STATE_ROWS, STATE_ROWS, pool_rows, write_entries

WIDTH = 24


def empty(sequences: int, overlap: bool) -> torch.Tensor:
    return torch.zeros(sequences, OVERLAP_STATE_ROWS if overlap else STATE_ROWS, WIDTH)


def drawn(tokens: int, overlap: bool) -> tuple[torch.Tensor, torch.Tensor]:
    channels = 2 * WIDTH if overlap else WIDTH
    return torch.randn(tokens, channels), torch.randn(tokens, channels) * 5


def at_once(
    rows: torch.Tensor, scores: torch.Tensor, ratio: int, overlap: bool
) -> list[torch.Tensor]:
    """Entries in fp64 from all rows of a sequence."""
    rows, scores = rows.double(), scores.double()
    entries = []
    for g in range(len(rows) // ratio):
        now = slice(g * ratio, (g + 1) * ratio)
        r, s = rows[now, -WIDTH:], scores[now, -WIDTH:]
        if overlap and g:
            before = slice((g - 1) * ratio, g * ratio)
            r = torch.cat([rows[before, :WIDTH], r])
            s = torch.cat([scores[before, :WIDTH], s])
        entries.append((s.softmax(0) * r).sum(0).float())
    return entries


def pool(
    rows: torch.Tensor,
    scores: torch.Tensor,
    ratio: int,
    overlap: bool,
    *,
    state: torch.Tensor | None = None,
    first: int = 0,
    writes: tuple[int, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence whose first token has position `first`."""
    return pool_rows(
        rows,
        scores,
        empty(1, overlap) if state is None else state,
        torch.tensor([0, len(rows)]),
        torch.arange(first, first + len(rows)),
        torch.tensor(writes or (len(rows) - 1,)),
        ratio=ratio,
        overlap=overlap,
    )


KINDS = [(4, True), (128, False), (2, False)]
kinds = pytest.mark.parametrize(("ratio", "overlap"), KINDS)


@kinds
def test_entries_equal_a_softmax_over_the_window(ratio: int, overlap: bool) -> None:
    rows, scores = drawn(301, overlap)
    found = pool(rows, scores, ratio, overlap)[0]
    wanted = at_once(rows, scores, ratio, overlap)
    closing = found[ratio - 1 :: ratio]
    torch.testing.assert_close(closing, torch.stack(wanted), rtol=1e-4, atol=1e-5)
    others = torch.ones(len(rows), dtype=torch.bool)
    others[ratio - 1 :: ratio] = False
    assert not found[others].any()


@kinds
@pytest.mark.parametrize("chunk", [1, 3, 130])
def test_a_cut_changes_no_bit(ratio: int, overlap: bool, chunk: int) -> None:
    rows, scores = drawn(150, overlap)
    whole = pool(rows, scores, ratio, overlap)[0]
    state, parts = empty(1, overlap), []
    for i in range(0, len(rows), chunk):
        now = slice(i, i + chunk)
        entries, state = pool(rows[now], scores[now], ratio, overlap, state=state, first=i)
        parts.append(entries)
    assert torch.equal(torch.cat(parts), whole)


@kinds
def test_a_state_of_any_token_continues_like_the_whole(ratio: int, overlap: bool) -> None:
    rows, scores = drawn(140, overlap)
    whole, states = pool(rows, scores, ratio, overlap, writes=(0, 2, 5, 126, 127, 128))
    for token, state in zip((0, 2, 5, 126, 127, 128), states, strict=True):
        rest = slice(token + 1, None)
        found = pool(rows[rest], scores[rest], ratio, overlap, state=state[None], first=token + 1)[
            0
        ]
        assert torch.equal(found, whole[rest])


def test_sequences_of_a_step_do_not_mix() -> None:
    rows, scores = drawn(30, overlap=True)
    alone = [pool(rows[a:b], scores[a:b], 4, True)[0] for a, b in ((0, 11), (11, 30))]
    positions = torch.cat([torch.arange(11), torch.arange(19)])
    together, _ = pool_rows(
        rows,
        scores,
        empty(2, overlap=True),
        torch.tensor([0, 11, 30]),
        positions,
        torch.tensor([10, 29]),
        ratio=4,
        overlap=True,
    )
    assert torch.equal(together, torch.cat(alone))


def test_the_first_window_has_nothing_before_it() -> None:
    """Series A of a fresh sequence weighs nothing, however low the scores of B are."""
    rows, scores = drawn(4, overlap=True)
    scores -= 1000.0
    found = pool(rows, scores, 4, overlap=True)[0][3]
    wanted = at_once(rows, scores, 4, overlap=True)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@kinds
def test_scores_far_apart_stay_finite(ratio: int, overlap: bool) -> None:
    rows, scores = drawn(256, overlap)
    found = pool(rows, scores * 40, ratio, overlap)[0][ratio - 1 :: ratio]
    wanted = torch.stack(at_once(rows, scores * 40, ratio, overlap))
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@kinds
def test_windows_lie_at_the_same_places_at_long_positions(ratio: int, overlap: bool) -> None:
    """A sequence that starts its step at a window's first token, far from the start."""
    rows, scores = drawn(256, overlap)
    near = pool(rows, scores, ratio, overlap)[0]
    far = pool(rows, scores, ratio, overlap, first=1_048_576 - 256)[0]
    assert torch.equal(far, near)


@pytest.mark.parametrize("position", [131_071, 131_075, 1_048_575])
def test_an_entry_goes_to_the_window_that_its_token_closes(position: int) -> None:
    per_page, ratio = 32, 4
    entry = position // ratio
    table = torch.full((1, entry // per_page + 1), -1)
    table[0, -1] = 1
    pool_PND = torch.zeros(2, per_page, WIDTH)
    rows = torch.randn(2, WIDTH)
    positions = torch.tensor([position - 1, position])
    write_entries(rows, pool_PND, table, torch.zeros(2, dtype=torch.int64), positions, ratio)
    assert torch.equal(pool_PND[1, entry % per_page], rows[1])
    pool_PND[1, entry % per_page] = 0
    assert not pool_PND.any()
