"""Pooling, finishing and storing of entries: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.cache_rows import COMPRESSED_ROWS, INDEX_ROWS, RowFormat, decode_rows, latent_rows
from kernels.compressor import OVERLAP_STATE_ROWS, STATE_ROWS, Finish, launch, reference

DEVICE = "cpu" if backend.interpreted() else "cuda"
WIDTH = 40
kinds = pytest.mark.parametrize(
    ("ratio", "overlap"), [(4, True), (16, False), (2, False), (1, False)]
)


def drawn(tokens: int, overlap: bool) -> tuple[torch.Tensor, torch.Tensor]:
    channels = 2 * WIDTH if overlap else WIDTH
    return torch.randn(tokens, channels), torch.randn(tokens, channels) * 5


def empty(sequences: int, overlap: bool) -> torch.Tensor:
    return torch.zeros(sequences, OVERLAP_STATE_ROWS if overlap else STATE_ROWS, WIDTH)


def pool(
    rows: torch.Tensor,
    scores: torch.Tensor,
    state: torch.Tensor,
    starts: list[int],
    positions: torch.Tensor,
    writes: list[int],
    ratio: int,
    overlap: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    given = (rows, scores, state, torch.tensor(starts), positions, torch.tensor(writes).long())
    r, s, held, first, at, write = (x.to(DEVICE) for x in given)
    entries, states = launch.pool_rows(r, s, held, first, at, write, ratio, overlap)
    return entries.cpu(), states.cpu()


def exact(
    rows: torch.Tensor, scores: torch.Tensor, ratio: int, overlap: bool
) -> dict[int, torch.Tensor]:
    """fp64 entries of a whole sequence by the token that closes a window."""
    found = {}
    for stop in range(ratio, len(rows) + 1, ratio):
        now = slice(stop - ratio, stop)
        r, s = rows[now, -WIDTH:].double(), scores[now, -WIDTH:].double()
        if overlap and stop > ratio:
            before = slice(stop - 2 * ratio, stop - ratio)
            r = torch.cat([rows[before, :WIDTH].double(), r])
            s = torch.cat([scores[before, :WIDTH].double(), s])
        found[stop - 1] = (s.softmax(0) * r).sum(0)
    return found


@kinds
@pytest.mark.parametrize("few", [launch.FEW_TOKENS, 0])
def test_entries_equal_a_softmax_over_the_window(
    ratio: int, overlap: bool, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a program has a window's tokens, of up to three sequences."""
    monkeypatch.setattr(launch, "FEW_TOKENS", few)
    lengths = [1, ratio, 2 * ratio + 3]
    parts = [drawn(length, overlap) for length in lengths]
    rows, scores = (torch.cat(x) for x in zip(*parts, strict=True))
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    positions = torch.cat([torch.arange(length) for length in lengths])
    found, _ = pool(rows, scores, empty(3, overlap), starts, positions, [], ratio, overlap)
    wanted = torch.zeros(len(rows), WIDTH, dtype=torch.float64)
    for start, part in zip(starts, parts, strict=False):
        for token, entry in exact(*part, ratio, overlap).items():
            wanted[start + token] = entry
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_long_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FEW_TOKENS", 0)
    rows, scores = drawn(129, overlap=False)
    at = torch.arange(129)
    found, _ = pool(rows, scores, empty(1, False), [0, 129], at, [], 128, overlap=False)
    wanted = exact(rows, scores, 128, overlap=False)[127]
    torch.testing.assert_close(found[127].double(), wanted, rtol=1e-4, atol=1e-5)


@kinds
def test_a_cut_between_steps_changes_no_bit(
    ratio: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, cut at several places of a window; the first one's states are the second's.

    Nor does how many tokens a program has.
    """
    tokens = min(3 * ratio, ratio + 5) + 1
    rows, scores = drawn(tokens, overlap)
    at, cuts = torch.arange(tokens), sorted({1, ratio // 2 or 1, ratio, min(ratio + 2, tokens - 1)})
    writes = [*(cut - 1 for cut in cuts), tokens - 1]
    first = (empty(1, overlap), [0, tokens], at, writes)
    whole, (*states, end) = pool(rows, scores, *first, ratio, overlap)
    monkeypatch.setattr(launch, "FEW_TOKENS", 0)
    for cut, state in zip(cuts, states, strict=True):
        left = tokens - cut
        rest = (state[None], [0, left], at[cut:], [left - 1])
        found, last = pool(rows[cut:], scores[cut:], *rest, ratio, overlap)
        assert torch.equal(found, whole[cut:]) and torch.equal(last[0], end)


@kinds
def test_states_agree_with_the_reference(ratio: int, overlap: bool) -> None:
    rows, scores = drawn(23, overlap)
    state = empty(2, overlap)
    positions = torch.cat([torch.arange(9), torch.arange(14)])
    starts, writes = [0, 9, 23], [0, 8, 12, 22]
    _, found = pool(rows, scores, state, starts, positions, writes, ratio, overlap)
    _, wanted = reference.pool_rows(
        rows, scores, state, torch.tensor(starts), positions, torch.tensor(writes), ratio, overlap
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("few", [launch.FEW_TOKENS, 0])
def test_tokens_beyond_the_sequences_give_zeros(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FEW_TOKENS", few)
    rows, scores = drawn(6, overlap=False)
    positions = torch.tensor([0, 1, 0, 1, -1, 1])
    found, states = pool(
        rows, scores, empty(1, False), [0, 2], positions, [-3, 4, 99], 2, overlap=False
    )
    assert found[1].any() and not found[[0, 2, 3, 4, 5]].any() and not states.any()


FORMS: dict[str, tuple[RowFormat | None, int, bool]] = {
    "plain": (None, 96, False),
    "compressed": (COMPRESSED_ROWS, 64, False),
    "index": (INDEX_ROWS, 128, True),
    "latent": (latent_rows(512, 64), 512, False),
}
PER_PAGE, PAGES, ANGLES = 4, 12, 16


def finish_of(form: str, tokens: int, dtype: torch.dtype) -> Finish:
    kind, width, rotated = FORMS[form]
    angles = torch.rand(tokens, ANGLES) * 7
    moved = (x.to(DEVICE) for x in (torch.rand(width) + 0.5, angles.cos(), angles.sin()))
    weight, cos, sin = moved
    return Finish(weight, 1e-6, cos, sin, dtype, kind, rotated)


def on_cpu(f: Finish) -> Finish:
    return Finish(
        f.weight_D.cpu(), f.eps, f.cos_TF.cpu(), f.sin_TF.cpu(), f.dtype, f.form, f.rotated
    )


def values_of(stored: torch.Tensor, form: RowFormat | None) -> torch.Tensor:
    return (stored if form is None else decode_rows(stored, form)).double()


@pytest.mark.parametrize("few", [launch.FEW_TOKENS, 0])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_entries_agree_with_the_steps_one_by_one(
    form: str, dtype: torch.dtype, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly all are equal; a rounding that falls the other way is one step of its format."""
    monkeypatch.setattr(launch, "FEW_TOKENS", few)
    tokens, ratio = 23, 4
    finish, (kind, width, _) = finish_of(form, tokens, dtype), FORMS[form]
    entries = torch.randn(tokens, width)
    size = width if kind is None else kind.row_bytes(width)
    pool_type = dtype if kind is None else torch.uint8
    wanted = torch.zeros(PAGES, PER_PAGE, size, dtype=pool_type)
    found = wanted.clone().to(DEVICE)
    table, sequence = torch.randperm(PAGES).view(2, 6), torch.arange(tokens) % 2
    positions = torch.randperm(6 * PER_PAGE * ratio)[:tokens]
    positions[3:20] = positions[3:20] // ratio * ratio + ratio - 1
    _, first = torch.unique(positions // ratio * 2 + sequence, return_inverse=True)
    sequence = torch.where(torch.bincount(first)[first] > 1, 7, sequence)  # no entry twice
    known = sequence < 2
    rows = reference.finished(entries, on_cpu(finish))[known]
    reference.write_entries(rows, wanted, table, sequence[known], positions[known], ratio)
    table, sequence, positions = (x.to(DEVICE) for x in (table, sequence, positions))
    launch.store_entries(entries.to(DEVICE), finish, found, table, sequence, positions, ratio)
    got, want = values_of(found.cpu(), kind), values_of(wanted, kind)
    assert torch.equal(got.any(2), want.any(2)) and want.any()
    assert (got - want).norm() <= 2e-2 * want.norm()
    assert kind is None or (got != want).float().mean() <= 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_entries_go_where_their_windows_say(dtype: torch.dtype) -> None:
    width, tokens = 70, 9
    entries = torch.randint(0, 100, (tokens, width)).to(dtype)
    pool_ = torch.full((PAGES, PER_PAGE, width), 101, dtype=dtype, device=DEVICE)
    table = torch.randperm(PAGES).view(2, 6)
    table[1, 0] = PAGES
    positions = torch.tensor([1, 2, 3, 9, 46, 47, 1, 48, -1])
    sequence = torch.tensor([0, 0, 0, 0, 0, 0, 1, 0, 0])
    wanted = pool_.cpu()
    for token in (0, 2, 3, 5):
        entry = int(positions[token]) // 2
        wanted[table[0, entry // PER_PAGE], entry % PER_PAGE] = entries[token]
    table, sequence, positions = (x.to(DEVICE) for x in (table, sequence, positions))
    launch.write_entries(entries.to(DEVICE), pool_, table, sequence, positions, 2)
    assert torch.equal(pool_.cpu(), wanted)


def test_no_tokens() -> None:
    found = pool(
        torch.empty(0, WIDTH), torch.empty(0, WIDTH), empty(1, False), [0, 0],
        torch.empty(0, dtype=torch.int64), [], 2, overlap=False,
    )  # fmt: skip
    assert found[0].shape == (0, WIDTH) and found[1].shape == (0, 3, WIDTH)


def test_a_span_of_many_short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its tokens closes a window that states began; entries of all sequences, in order."""
    monkeypatch.setattr(launch, "FEW_TOKENS", 0)
    ratio, sequences = 16, 21
    rows, scores = drawn(sequences, overlap=False)
    state = torch.rand(sequences, STATE_ROWS, WIDTH) + 0.5
    starts, at = list(range(sequences + 1)), torch.full((sequences,), 5 * ratio - 1)
    at[3] = 7
    found, _ = pool(rows, scores, state, starts, at, [], ratio, overlap=False)
    wanted, _ = reference.pool_rows(
        rows.double(), scores.double(), state.double(), torch.tensor(starts), at,
        torch.empty(0, dtype=torch.int64), ratio, overlap=False,
    )  # fmt: skip
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@kinds
def test_a_replayed_graph(ratio: int, overlap: bool) -> None:
    tokens = 2 * ratio
    rows, scores = (x.cuda() for x in drawn(tokens, overlap))
    state, starts = empty(1, overlap).cuda(), torch.tensor([0, tokens]).cuda()
    positions, writes = torch.arange(tokens).cuda(), torch.tensor([tokens - 1]).cuda()
    given = (rows, scores, state, starts, positions, writes)
    launch.pool_rows(*given, ratio, overlap)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, _ = launch.pool_rows(*given, ratio, overlap)
    rows.copy_(drawn(tokens, overlap)[0])
    graph.replay()
    for token, entry in exact(rows.cpu(), scores.cpu(), ratio, overlap).items():
        torch.testing.assert_close(found[token].cpu().double(), entry, rtol=1e-4, atol=1e-5)
