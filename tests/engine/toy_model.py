"""A stage model whose logits are an exact hash of the whole token prefix.

Every number is an integer and every token enters through the pools: through a paged group, a paged
group with four tokens per entry, a window group, a state group and an n-gram table, each with its
own page size. A wrong page, slot, snapshot, position or table row changes the logits of every later
token. `reference_logits` computes the same numbers from the token list alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.engine.cache.spec import CacheGroup, CachePools, CacheTensor
from services.engine.runtime.batch import StepBatch
from services.engine.runtime.tables_api import TableSource

VOCAB = 61
WINDOW = 20
STRIDE = 4
UNIT = 16
TABLE_ROWS = 997
_MODULUS = 1 << 31


def paged(page_tokens: int = 4) -> CacheGroup:
    return CacheGroup("kv", "paged", (CacheTensor("h", (2,), torch.int64),), page_tokens)


def strided(page_tokens: int = 16) -> CacheGroup:
    tensors = (CacheTensor("sum", (1,), torch.int64),)
    return CacheGroup("comp", "paged", tensors, page_tokens, stride=STRIDE)


def window(page_tokens: int = 8) -> CacheGroup:
    tensors = (CacheTensor("h", (), torch.int64), CacheTensor("twice", (3,), torch.int32))
    return CacheGroup("win", "window", tensors, page_tokens, window_tokens=WINDOW)


def state() -> CacheGroup:
    tensors = (CacheTensor("acc", (1,), torch.int64), CacheTensor("partial", (), torch.int64))
    return CacheGroup("state", "state", tensors)


ALL_GROUPS = (paged(), strided(), window(), state())


def token_hash(token: int, position: int) -> int:
    return (token * 2654435761 + position * 40503 + 12345) % 65521


def logits_of(digest: int) -> list[float]:
    return [((digest % 1000003) * (2 * v + 1) + v * v * 97) % 1009 / 16.0 for v in range(VOCAB)]


def row_id(tokens: Sequence[int], position: int) -> int:
    before = [tokens[p] if p >= 0 else 60 for p in (position - 1, position - 2)]
    return (tokens[position] * 3 + before[0] * 5 + before[1] * 7) % TABLE_ROWS


def table_value(row: int) -> int:
    return row * row % 8191


def digest_of(tokens: Sequence[int], groups: Sequence[CacheGroup], ngram: bool) -> int:
    """The number that decides the logits after the last of `tokens`."""
    names = {g.name for g in groups}
    hashes = [token_hash(x, p) for p, x in enumerate(tokens)]
    last = len(tokens) - 1
    total = 0
    if "kv" in names:
        total += sum(h * (7 * p + 1) for p, h in enumerate(hashes))
    if "comp" in names:
        for e in range(len(tokens) // STRIDE):
            total += sum(hashes[STRIDE * e : STRIDE * e + STRIDE]) * (13 * e + 5)
    if "win" in names:
        first = max(0, last - WINDOW + 1)
        total += sum(hashes[p] * (p + 3) for p in range(first, last + 1))
    if "state" in names:
        acc = 0
        for h in hashes:
            acc = (acc * 31 + h) % _MODULUS
        partial = sum(hashes[len(tokens) // STRIDE * STRIDE :])
        total += acc + 3 * partial
    if ngram:
        total += table_value(row_id(tokens, last))
    return total


def reference_logits(
    tokens: Sequence[int], groups: Sequence[CacheGroup] = ALL_GROUPS, ngram: bool = True
) -> list[float]:
    return logits_of(digest_of(tokens, groups, ngram))


def reference_greedy(
    prompt: Sequence[int],
    count: int,
    groups: Sequence[CacheGroup] = ALL_GROUPS,
    ngram: bool = True,
) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        logits = reference_logits(tokens, groups, ngram)
        tokens.append(logits.index(max(logits)))
    return tokens[len(prompt) :]


class ToyNgram:
    table = "toy"
    context_tokens = 2

    def row_ids(self, token_ids: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        known = [*context.tolist(), *token_ids.tolist()]
        start = len(known) - len(token_ids)
        return torch.tensor([[row_id(known, start + i)] for i in range(len(token_ids))])


class _Rows:
    def __init__(self, row_ids: torch.Tensor) -> None:
        self._row_ids = row_ids

    def wait(self) -> torch.Tensor:
        return self._row_ids * self._row_ids % 8191


class ToyTable:
    def start_gather(self, row_ids: torch.Tensor) -> _Rows:
        assert row_ids.dtype == torch.int64 and row_ids.shape[1] == 1
        assert int(row_ids.min()) >= 0 and int(row_ids.max()) < TABLE_ROWS
        return _Rows(row_ids)


def toy_tables() -> TableSource:
    return TableSource({ToyNgram.table: ToyTable()})


class ToyModel:
    """`poison_token` in a step makes the logits of its sequence NaN."""

    vocab_size = VOCAB
    max_positions = 4096
    weight_bytes = 0
    vision = None

    def __init__(
        self,
        groups: tuple[CacheGroup, ...] = ALL_GROUPS,
        *,
        ngram: bool = True,
        poison_token: int | None = None,
    ) -> None:
        self.groups = groups
        self.ngrams = (ToyNgram(),) if ngram else ()
        self.batch_sizes: list[int] = []
        self._by_name = {g.name: g for g in groups}
        self._poison_token = poison_token

    def forward(
        self, batch: StepBatch, pools: CachePools, hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        sequences = len(batch.context_B)
        self.batch_sizes.append(sequences)
        rows = batch.ngram_rows["toy"].wait() if batch.ngram_rows else None
        digests: list[int] = []
        for b in range(sequences):
            digests += self._sequence(batch, pools, b, rows)
        logits = [logits_of(digests[r]) for r in batch.logit_rows_N.tolist()]
        out = torch.tensor(logits, dtype=torch.float32)
        for index, row in enumerate(batch.logit_rows_N.tolist()):
            if batch.token_ids_T[row] == self._poison_token:
                out[index, 7] = float("nan")
        return out

    def _sequence(
        self, batch: StepBatch, pools: CachePools, b: int, rows: torch.Tensor | None
    ) -> list[int]:
        first, end = batch.starts_B1[b : b + 2].tolist()
        tokens = batch.token_ids_T[first:end].tolist()
        start = int(batch.context_B[b])
        assert batch.positions_T[first:end].tolist() == list(range(start, start + len(tokens)))
        hashes = [token_hash(x, start + i) for i, x in enumerate(tokens)]
        states = self._states(batch, pools, b, first, start, hashes)
        digests = []
        for i in range(len(tokens)):
            position = start + i
            total = 3 * states[i][1] + states[i][0] if "state" in self._by_name else 0
            total += self._pages(batch, pools, b, position, hashes[i], states[i][2])
            if rows is not None:
                total += int(rows[first + i, 0])
            digests.append(total)
        return digests

    def _states(
        self,
        batch: StepBatch,
        pools: CachePools,
        b: int,
        first: int,
        start: int,
        hashes: list[int],
    ) -> list[tuple[int, int, int]]:
        """Per token: accumulator, sum of an open stride, sum of the stride that it closed."""
        acc, partial = 0, 0
        if "state" in self._by_name:
            slot = int(batch.state_read_B["state"][b])
            if slot >= 0:
                acc = int(pools["state"]["acc"][slot, 0])
                partial = int(pools["state"]["partial"][slot])
            assert (slot < 0) == (start == 0)
        out = []
        for i, h in enumerate(hashes):
            acc = (acc * 31 + h) % _MODULUS
            partial += h
            closed = 0
            if (start + i + 1) % STRIDE == 0:
                closed, partial = partial, 0
            out.append((acc, partial, closed))
        self._write_states(batch, pools, b, first, out)
        return out

    def _write_states(
        self,
        batch: StepBatch,
        pools: CachePools,
        b: int,
        first: int,
        states: list[tuple[int, int, int]],
    ) -> None:
        if "state" not in self._by_name:
            return
        writes = batch.state_writes["state"]
        mine = (writes.sequence_W == b).nonzero()[:, 0].tolist()
        assert writes.token_W[mine].tolist() == sorted(set(writes.token_W[mine].tolist()))
        assert int(writes.token_W[mine[-1]]) == first + len(states) - 1
        for w in mine:
            acc, partial, _ = states[int(writes.token_W[w]) - first]
            slot = int(writes.slot_W[w])
            pools["state"]["acc"][slot, 0] = acc
            pools["state"]["partial"][slot] = partial

    def _pages(
        self, batch: StepBatch, pools: CachePools, b: int, position: int, h: int, closed: int
    ) -> int:
        """Write the token's entries, then sum over everything that it can see."""
        total = 0
        if "kv" in self._by_name:
            page, at = self._place(batch, "kv", b, position)
            pools["kv"]["h"][page, at] = torch.tensor([h, -h])
            seen = self._read(batch, pools["kv"]["h"], "kv", b, 0, position + 1)
            assert torch.equal(seen[:, 0], -seen[:, 1])
            weights = 7 * torch.arange(position + 1) + 1
            total += int((seen[:, 0] * weights).sum())
        if "comp" in self._by_name:
            entries = (position + 1) // STRIDE
            if closed:
                page, at = self._place(batch, "comp", b, position)
                pools["comp"]["sum"][page, at, 0] = closed
            seen = self._read(batch, pools["comp"]["sum"], "comp", b, 0, entries)
            total += int((seen[:, 0] * (13 * torch.arange(entries) + 5)).sum())
        if "win" in self._by_name:
            page, at = self._place(batch, "win", b, position)
            pools["win"]["h"][page, at] = h
            pools["win"]["twice"][page, at] = 2 * h
            low = max(0, position - WINDOW + 1)
            seen = self._read(batch, pools["win"]["h"], "win", b, low, position + 1)
            twice = self._read(batch, pools["win"]["twice"], "win", b, low, position + 1)
            assert torch.equal(twice, (2 * seen)[:, None].expand(-1, 3).int())
            total += int((seen * (torch.arange(low, position + 1) + 3)).sum())
        return total

    def _place(self, batch: StepBatch, group: str, b: int, position: int) -> tuple[int, int]:
        g = self._by_name[group]
        page = int(batch.page_tables[group][b, position // g.page_tokens])
        assert page >= 0, f"{group} has no page for position {position}"
        return page, position % g.page_tokens // g.stride

    def _read(
        self, batch: StepBatch, pool: torch.Tensor, group: str, b: int, low: int, high: int
    ) -> torch.Tensor:
        """Entries `low` to `high` of a sequence, gathered through its table."""
        entries = torch.arange(low, high)
        per_page = self._by_name[group].entries_per_page
        pages = batch.page_tables[group][b, entries // per_page]
        assert bool((pages >= 0).all()), f"{group} lacks a page for entries {low}..{high}"
        return pool[pages, entries % per_page]
