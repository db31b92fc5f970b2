# ruff: noqa: N803, N806 (shape suffixes)
"""Runs step plans in this process: plan to tensors, forward pass, finite check, sampling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from services.engine.cache.spec import CacheGroup, CachePools
from services.engine.images import ImageSource
from services.engine.models.base import NgramHash, StageModel
from services.engine.runtime.batch import PendingRows, StateWrites, StepBatch
from services.engine.runtime.image_rows import ImageRows, Part
from services.engine.runtime.page_tables import PageTables
from services.engine.runtime.tables_api import TableSource
from services.engine.sampling.grammar import MakeMatcher
from services.engine.sampling.sampler import Drawn, RowGroup, Sampler, score
from services.engine.scheduler.plan import (
    Logprob,
    SequenceId,
    SequenceResult,
    SequenceStep,
    StepPlan,
    StepResult,
)

_GARBAGE = 0x5A  # byte that freed pages are filled with in debug mode; finite in every dtype


@dataclass(frozen=True, slots=True)
class _Rows:
    """Logit rows of one sequence within those of the step: all of them, and those to sample."""

    first: int
    count: int
    sampled: int  # the last so many of them


class LocalExecutor:
    """One process, all layers. Not thread-safe; plans must come in order."""

    def __init__(
        self,
        model: StageModel,
        pools: CachePools,
        tables: TableSource | None,
        device: torch.device,
        images: ImageSource | None = None,
        make_matcher: MakeMatcher | None = None,
    ) -> None:
        self._model = model
        self._pools = pools
        self._tables = tables
        self._device = device
        self._groups = model.groups
        self._page_tables = PageTables([g.name for g in model.groups if g.kind != "state"], device)
        self._images = ImageRows(model.vision, images, device)
        self._sampler = Sampler(model.vocab_size, device, make_matcher)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; results in the order of the plan's sequences."""
        rows = self._start_gather(plan.sequences)
        self._prepare(plan)
        if not plan.sequences:
            return StepResult(plan.number, ())
        for s in plan.sequences:
            if s.sample_from is not None:
                self._sampler.start_masks(s.sequence, s.token_ids[s.sample_from + 1 :])
        layout = _logit_rows(plan.sequences)
        batch = self._batch(plan.sequences, layout, rows)
        logits_NV = self._model.forward(batch, self._pools)
        return StepResult(plan.number, self._results(plan.sequences, layout, logits_NV))

    def _start_gather(self, steps: Sequence[SequenceStep]) -> dict[str, PendingRows]:
        """N-gram rows depend on token ids alone: ask for them before anything else."""
        tables = self._tables
        if tables is None or not steps:
            return {}
        return {
            ngram.table: tables.start_gather(ngram.table, torch.cat(_row_ids(ngram, steps)))
            for ngram in self._model.ngrams
        }

    def _prepare(self, plan: StepPlan) -> None:
        """Bring what is kept per sequence up to date, clear what the plan names."""
        for sequence in plan.ended:
            self._page_tables.drop(sequence)
            self._images.end(sequence)
            self._sampler.end(sequence)
        for fill, byte in ((plan.garbage, _GARBAGE), (plan.zero, 0)):
            for name, ids in fill.items():
                self._fill(name, ids, byte)
        for step in plan.sequences:
            if step.begin is not None:
                self._page_tables.begin(step.sequence, step.freed_pages)
                self._images.begin(step.sequence, step.begin.images)
                self._sampler.begin(step.sequence, step.begin)
            self._page_tables.update(step.sequence, step.new_pages, step.freed_pages)

    def _fill(self, name: str, ids: Iterable[int], byte: int) -> None:
        index = self._ids(list(ids))
        for tensor in self._pools[name].values():
            tensor.view(tensor.shape[0], -1).view(torch.uint8)[index] = byte

    def _batch(
        self, steps: Sequence[SequenceStep], layout: list[_Rows], rows: dict[str, PendingRows]
    ) -> StepBatch:
        counts = [len(s.token_ids) for s in steps]
        starts = [0]
        for n in counts:
            starts.append(starts[-1] + n)
        logit_rows = [
            row
            for end, r in zip(starts[1:], layout, strict=True)
            for row in range(end - r.count, end)
        ]
        states = [g for g in self._groups if g.kind == "state"]
        images = self._images.inputs(
            [Part(s.sequence, s.start, n) for s, n in zip(steps, counts, strict=True)]
        )
        return StepBatch(
            token_ids_T=self._ids([t for s in steps for t in s.token_ids]),
            positions_T=self._ids([s.start + i for s in steps for i in range(len(s.token_ids))]),
            starts_B1=self._ids(starts),
            context_B=self._ids([s.start for s in steps]),
            page_tables=self._page_tables.batch([s.sequence for s in steps]),
            state_read_B={g.name: self._reads(g, steps) for g in states},
            state_writes={g.name: self._writes(g, steps, starts) for g in states},
            logit_rows_N=self._ids(logit_rows),
            ngram_rows=rows,
            images=images.images,
            rope_positions_T3=images.rope_positions_T3,
            rope_lagging_T3=images.rope_lagging_T3,
        )

    def _reads(self, group: CacheGroup, steps: Sequence[SequenceStep]) -> torch.Tensor:
        slots = (s.state_read[group.name] for s in steps)
        return self._ids([-1 if slot is None else slot for slot in slots])

    def _writes(
        self, group: CacheGroup, steps: Sequence[SequenceStep], starts: list[int]
    ) -> StateWrites:
        writes = [
            (starts[b] + index, b, slot)
            for b, s in enumerate(steps)
            for index, slot in s.state_writes[group.name]
        ]
        token, sequence, slot = zip(*writes, strict=True)
        return StateWrites(self._ids(token), self._ids(sequence), self._ids(slot))

    def _results(
        self, steps: Sequence[SequenceStep], layout: list[_Rows], logits_NV: torch.Tensor
    ) -> tuple[SequenceResult, ...]:
        finite_N = torch.isfinite(logits_NV).all(dim=1).tolist()
        finite = [all(finite_N[r.first : r.first + r.count]) for r in layout]
        drawn = self._sample(steps, layout, finite, logits_NV)
        results = []
        for s, rows, ok in zip(steps, layout, finite, strict=True):
            ids, logprobs = drawn.get(s.sequence, ((), ()))
            prompt = self._prompt_logprobs(s, rows, logits_NV) if ok else ()
            results.append(SequenceResult(s.sequence, ids, logprobs, prompt, ok))
        return tuple(results)

    def _sample(
        self,
        steps: Sequence[SequenceStep],
        layout: list[_Rows],
        finite: list[bool],
        logits_NV: torch.Tensor,
    ) -> dict[SequenceId, Drawn]:
        """What is drawn for every sequence that samples and has finite logits."""
        groups, rows = [], []
        for s, r, ok in zip(steps, layout, finite, strict=True):
            if ok and s.sample_from is not None:
                drafts = s.token_ids[s.sample_from + 1 :]
                groups.append(RowGroup(s.sequence, s.start + s.sample_from + 1, drafts))
                rows.append(logits_NV[r.first + r.count - r.sampled : r.first + r.count])
        drawn = self._sampler.sample(torch.cat(rows), groups) if rows else []
        return {g.sequence: d for g, d in zip(groups, drawn, strict=True)}

    def _prompt_logprobs(
        self, step: SequenceStep, rows: _Rows, logits_NV: torch.Tensor
    ) -> tuple[Logprob, ...]:
        if step.prompt_logprobs is None:
            return ()
        first = logits_NV[rows.first : rows.first + len(step.prompt_targets)]
        return score(first, step.prompt_targets, step.prompt_logprobs)

    def _ids(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _row_ids(ngram: NgramHash, steps: Sequence[SequenceStep]) -> list[torch.Tensor]:
    return [ngram.row_ids(_host(s.token_ids), _host(s.ngram_context)) for s in steps]


def _host(ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def _logit_rows(steps: Sequence[SequenceStep]) -> list[_Rows]:
    """Rows from the first sampled token on; at least the last one, for the finite check.

    With prompt log-probabilities, every token of the step.
    """
    layout: list[_Rows] = []
    first = 0
    for s in steps:
        tokens = len(s.token_ids)
        sampled = 0 if s.sample_from is None else tokens - s.sample_from
        count = tokens if s.prompt_logprobs is not None else max(1, sampled)
        layout.append(_Rows(first, count, sampled))
        first += count
    return layout
