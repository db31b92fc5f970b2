"""Drives a stage model in tests: pages, state slots, packed batches, n-gram rows.

Pages and slots are handed out in random order, and pools start filled with NaN, so a model that
reads what it has not written shows at once. Pages of a window group that no token of a step may
see are absent from its table.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from services.engine.cache.spec import CachePools, allocate_pools
from services.engine.models.base import StageModel
from services.engine.runtime.batch import StateWrites, StepBatch
from services.engine.runtime.tables_api import TableSource

POOL_PAGES = 64
POOL_SLOTS = 64
POISON = 0xFF  # bytes of a NaN in every float type, and of an e8m0 scale that is NaN


@dataclass
class Live:
    """A sequence in the runner: its ids so far, pages by group, and its state slot."""

    ids: list[int] = field(default_factory=list)
    pages: dict[str, list[int]] = field(default_factory=dict)
    slot: int | None = None


@dataclass(frozen=True)
class Part:
    """`tokens` of one sequence to compute; `snapshots` are indices within them."""

    live: Live
    tokens: Sequence[int]
    snapshots: Sequence[int] = ()


class Runner:
    """One model (or the stages of one) with its pools."""

    def __init__(
        self,
        stages: Sequence[StageModel],
        table: TableSource | None = None,
        seed: int = 0,
        pages: int = POOL_PAGES,
    ) -> None:
        self.stages = list(stages)
        self.table = table
        self.random = random.Random(seed)
        self.free_pages: dict[str, list[int]] = {}
        self.pools: list[CachePools] = []
        self.groups = {g.name: g for stage in self.stages for g in stage.groups}
        for group in self.groups.values():
            if group.kind != "state":
                self.free_pages[group.name] = list(range(pages))
                self.random.shuffle(self.free_pages[group.name])
        self.free_slots = list(range(POOL_SLOTS))
        self.random.shuffle(self.free_slots)
        for stage in self.stages:
            sizes = {g.name: POOL_SLOTS if g.kind == "state" else pages for g in stage.groups}
            pools = allocate_pools(stage.groups, sizes, torch.device("cpu"))
            for tensors in pools.values():
                for tensor in tensors.values():
                    tensor.view(torch.uint8).fill_(POISON)
            self.pools.append(pools)

    def step(self, parts: Sequence[Part]) -> tuple[list[torch.Tensor], list[list[int]]]:
        """Logits [n, vocab] of each part, and the slots of its snapshots."""
        batch, snapshot_slots = self._batch(parts)
        hidden = None
        for stage, pools in zip(self.stages, self.pools, strict=True):
            hidden = stage.forward(batch, pools, hidden)
        assert hidden is not None
        for part in parts:
            part.live.ids.extend(part.tokens)
        logits = hidden.split([len(p.tokens) for p in parts])
        return list(logits), snapshot_slots

    def run(self, ids: Sequence[int], chunk: int) -> torch.Tensor:
        """Logits [len(ids), vocab] of one sequence computed in chunks."""
        live = Live()
        out = [self.step([Part(live, ids[i : i + chunk])])[0][0] for i in range(0, len(ids), chunk)]
        self.release(live)
        return torch.cat(out)

    def fork(self, live: Live, ids: Sequence[int], slot: int) -> Live:
        """A new sequence that shares the pages of a prefix `ids` of `live` and its snapshot.

        Only whole pages can be shared: the prefix must end at a page boundary of every group.
        """
        pages = {}
        for name, group in self.groups.items():
            if group.kind != "state":
                assert len(ids) % group.page_tokens == 0
                pages[name] = live.pages[name][: len(ids) // group.page_tokens]
        return Live(list(ids), pages, slot)

    def release(self, live: Live) -> None:
        """Give pages and slot back, poisoned."""
        for name, pages in live.pages.items():
            for pools in self.pools:
                for tensor in pools.get(name, {}).values():
                    tensor.view(torch.uint8)[pages] = POISON
            self.free_pages[name].extend(pages)
        if live.slot is not None:
            self.free_slots.append(live.slot)

    def _batch(self, parts: Sequence[Part]) -> tuple[StepBatch, list[list[int]]]:
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + len(part.tokens))
        reads = [p.live.slot if p.live.slot is not None else -1 for p in parts]
        writes, snapshot_slots = self._writes(parts, starts)
        columns = list(zip(*writes, strict=True))
        total = starts[-1]
        positions = [len(p.live.ids) + i for p in parts for i in range(len(p.tokens))]
        batch = StepBatch(
            token_ids_T=torch.tensor([t for p in parts for t in p.tokens]),
            positions_T=torch.tensor(positions),
            starts_B1=torch.tensor(starts),
            context_B=torch.tensor([len(p.live.ids) for p in parts]),
            page_tables={name: self._table(name, parts) for name in self.free_pages},
            state_read_B={"state": torch.tensor(reads)},
            state_writes={"state": StateWrites(*(torch.tensor(c) for c in columns))},
            logit_rows_N=torch.arange(total),
            ngram_rows=self._rows(parts),
        )
        return batch, snapshot_slots

    def _writes(
        self, parts: Sequence[Part], starts: Sequence[int]
    ) -> tuple[list[tuple[int, int, int]], list[list[int]]]:
        writes = []
        snapshot_slots: list[list[int]] = []
        for b, part in enumerate(parts):
            snapshot_slots.append([self.free_slots.pop() for _ in part.snapshots])
            for index, slot in zip(part.snapshots, snapshot_slots[-1], strict=True):
                writes.append((starts[b] + index, b, slot))
            if part.live.slot is None or self.random.random() < 0.5:
                if part.live.slot is not None:
                    self.free_slots.insert(0, part.live.slot)
                part.live.slot = self.free_slots.pop()
            writes.append((starts[b + 1] - 1, b, part.live.slot))
        return sorted(writes), snapshot_slots

    def _table(self, name: str, parts: Sequence[Part]) -> torch.Tensor:
        group = self.groups[name]
        rows = []
        for part in parts:
            pages = part.live.pages.setdefault(name, [])
            need = -(-(len(part.live.ids) + len(part.tokens)) // group.page_tokens)
            while len(pages) < need:
                pages.append(self.free_pages[name].pop())
            gone = 0
            if group.kind == "window":
                gone = max(0, len(part.live.ids) - group.window_tokens + 1) // group.page_tokens
            rows.append([-1] * gone + pages[gone:])
        width = max(len(r) for r in rows)
        return torch.tensor([r + [-1] * (width - len(r)) for r in rows])

    def _rows(self, parts: Sequence[Part]):
        hashes = [n for s in self.stages for n in s.ngrams]
        if not hashes:
            return {}
        assert self.table is not None
        found = {}
        for ngram in hashes:
            need = ngram.context_tokens
            ids = [
                ngram.row_ids(torch.tensor(p.tokens), torch.tensor(p.live.ids[-need:]).long())
                for p in parts
            ]
            found[ngram.table] = self.table.start_gather(ngram.table, torch.cat(ids))
        return found
