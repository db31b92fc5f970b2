"""Turns the state of the scheduler into the plan of the next step.

Positions count tokens: the state "at position p" is the one after the first p tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.engine.cache.manager import as_pages, as_slot
from services.engine.cache.pool import InvariantError
from services.engine.scheduler.drafts import DraftSource
from services.engine.scheduler.plan import SequenceBegin, SequenceStep, StepPlan
from services.engine.scheduler.planner import Decision, decide
from services.engine.scheduler.sequence import Sequence
from services.engine.scheduler.snapshots import kept_targets, wants_snapshot
from services.engine.scheduler.state import SchedulerState
from services.engine.scheduler.views import (
    Drafts,
    Hit,
    Hits,
    find_hits,
    survey,
    table_of,
    with_releases,
    writes_in_place,
)


@dataclass(slots=True)
class InFlight:
    """One sequence of a planned step, for the settling of its result.

    `slots[group][position]` is where the step writes the state at a position; `taken[group]` are
    the slots among them on which this step took a reference. `snapshots` are the positions that
    become snapshots once verified.
    """

    sequence: Sequence
    start: int
    tokens: int  # known ones
    drafts: tuple[int, ...] = ()
    new_pages: dict[str, list[int]] = field(default_factory=dict)
    slots: dict[str, dict[int, int]] = field(default_factory=dict)
    taken: dict[str, list[int]] = field(default_factory=dict)
    snapshots: set[int] = field(default_factory=set)

    @property
    def known_end(self) -> int:
        """Position after the last known token."""
        return self.start + self.tokens

    @property
    def end(self) -> int:
        """Position after the last computed token."""
        return self.known_end + len(self.drafts)

    @property
    def samples(self) -> bool:
        """Whether the step gives this sequence new tokens."""
        s = self.sequence
        return self.known_end == len(s.tokens) and s.state.request.stopping.max_tokens > 0


class Planner:
    """Makes step plans. Takes ids from the pools; touches no tensor, clock or socket.

    The same state gives the same plan.
    """

    def __init__(
        self, state: SchedulerState, ngram_context: int, drafts: DraftSource | None
    ) -> None:
        self._state = state
        self._cache = state.cache
        self._config = state.config
        self._ngram_context = ngram_context
        self._drafts = drafts
        self._number = 0

    def plan(self) -> tuple[StepPlan, list[InFlight]]:
        """The next step and what its settling needs to know."""
        hits, drafts = find_hits(self._state), self._proposals()
        decision = self._decide(hits, drafts)
        for sequence_id in decision.preempted:
            self._state.preempt(self._state.running[sequence_id])
        for grant in decision.grants:
            if grant.sequence in hits:
                self._bind(hits[grant.sequence])
        flights = self._flights(decision, drafts)
        steps = tuple(self._step(f) for f in flights)
        zero, garbage = self._cache.drain()
        ended = tuple(self._state.ended)
        self._state.ended.clear()
        self._number += 1
        return StepPlan(self._number, steps, ended, zero, garbage), flights

    def _decide(self, hits: Hits, drafts: Drafts) -> Decision:
        view = survey(self._state, hits, drafts)
        decision = decide(view)
        return decide(with_releases(self._state, view)) if decision.short else decision

    def _proposals(self) -> Drafts:
        """Draft tokens of the decoding sequences."""
        if self._drafts is None:
            return {}
        found = {}
        for s in self._state.running.values():
            limit = min(
                self._config.num_speculative_tokens,
                s.state.request.stopping.max_tokens - s.outputs - 1,
                self._config.max_model_len - len(s.tokens) - 1,
            )
            if s.decoding and limit > 0:
                found[s.id] = self._drafts.propose(s.id, s.tokens, limit)[:limit]
        return found

    def _bind(self, hit: Hit) -> None:
        """Give an admitted sequence its table with the units of its hit."""
        s, match = hit.sequence, hit.match
        s.table = self._cache.bind(s.restorable_hashes, match)
        s.computed = match.units * self._cache.unit_tokens
        s.indexed = match.units
        s.targets = kept_targets(s, match, self._cache.unit_tokens)
        s.turn_start = len(s.tokens)
        self._count_hit(s, match.units)
        self._state.admit(s)

    def _count_hit(self, s: Sequence, units: int) -> None:
        state, counters, unit = s.state, self._state.counters, self._cache.unit_tokens
        counters.prefix_queries_tokens += len(s.tokens)
        counters.prefix_hit_tokens += units * unit
        if s is state.leader and not state.started:
            external = max(0, min(units, s.external_units) - s.local_units) * unit
            state.cached, state.external_cached = units * unit, external
            counters.external_hit_tokens += external

    def _flights(self, decision: Decision, drafts: Drafts) -> list[InFlight]:
        """What every sequence needs first, then snapshots with what is left."""
        flights = []
        for grant in decision.grants:
            s = self._state.running[grant.sequence]
            proposed = drafts.get(grant.sequence, ())[: grant.drafts]
            flights.append(InFlight(s, s.computed, grant.tokens, proposed))
        for flight in flights:
            self._take_pages(flight)
            self._take_slots(flight)
        for flight in flights:
            self._take_snapshots(flight)
        return flights

    def _take_pages(self, flight: InFlight) -> None:
        table = table_of(flight.sequence)
        for g in self._cache.page_groups:
            count = -(-flight.end // g.page_tokens) - len(table.pages[g.name])
            flight.new_pages[g.name] = self._take(g.name, max(0, count))
            table.pages[g.name] += flight.new_pages[g.name]

    def _take_slots(self, flight: InFlight) -> None:
        """A slot for the state at every position that may turn out to be the last one."""
        table = table_of(flight.sequence)
        for name in self._cache.state_groups:
            positions = list(range(flight.known_end, flight.end + 1))
            slots, current = {}, table.states[name]
            if current is not None and writes_in_place(self._cache, table, name):
                slots[positions.pop()] = current
            taken = self._take(name, len(positions))
            flight.taken[name] = taken
            flight.slots[name] = slots | dict(zip(positions, taken, strict=True))

    def _take_snapshots(self, flight: InFlight) -> None:
        """Where slots are left; a position that has a slot of its own needs no other."""
        unit = self._config.unit_tokens
        for position in range((flight.start // unit + 1) * unit, flight.end + 1, unit):
            if wants_snapshot(self._config, flight.sequence, position) and self._snapshot_slots(
                flight, position
            ):
                flight.snapshots.add(position)

    def _snapshot_slots(self, flight: InFlight, position: int) -> bool:
        """Make sure that the state at `position` lands in slots that nobody overwrites."""
        lacking = [
            name
            for name in self._cache.state_groups
            if flight.slots[name].get(position) not in flight.taken[name]
        ]
        found: dict[str, list[int]] = {}
        for name in lacking:
            slot = self._cache.take(name, 1)
            if slot is None:
                for taken_name, ids in found.items():
                    self._cache.pools[taken_name].release(ids)
                return False
            found[name] = slot
        for name, (slot_id,) in found.items():
            flight.slots[name][position] = slot_id
            flight.taken[name].append(slot_id)
        return True

    def _take(self, group: str, count: int) -> list[int]:
        if not count:
            return []
        ids = self._cache.take(group, count)
        if ids is None:
            raise InvariantError(f"the plan counts on {count} ids of group {group} and lacks them")
        return ids

    def _step(self, flight: InFlight) -> SequenceStep:
        s, table = flight.sequence, table_of(flight.sequence)
        begin = None if s.begun else _begin(s)
        pages = flight.new_pages if s.begun else {n: table.held(n) for n in table.pages}
        freed = {n: c for n, c in table.freed.items() if c != s.told_freed.get(n, 0)}
        s.begun = True
        s.told_freed |= freed
        first = max(0, flight.start - self._ngram_context)
        return SequenceStep(
            sequence=s.id,
            start=flight.start,
            token_ids=(*s.tokens[flight.start : flight.known_end], *flight.drafts),
            ngram_context=tuple(s.tokens[first : flight.start]),
            new_pages={n: as_pages(ids) for n, ids in pages.items() if ids},
            freed_pages=freed,
            state_read={
                n: None if slot is None else as_slot(slot) for n, slot in table.states.items()
            },
            state_writes={
                n: tuple((p - flight.start - 1, as_slot(slots[p])) for p in sorted(slots))
                for n, slots in flight.slots.items()
            },
            begin=begin,
            sample_from=flight.tokens - 1 if flight.samples else None,
            prompt_logprobs=s.state.request.prompt_logprobs if s.collects_prompt_logprobs else None,
            prompt_targets=_prompt_targets(flight) if s.collects_prompt_logprobs else (),
        )


def _begin(s: Sequence) -> SequenceBegin:
    images = s.state.request.images
    if not s.sampling.needs_history:
        return SequenceBegin(s.sampling, output_tokens=s.outputs, images=images)
    return SequenceBegin(
        s.sampling,
        prompt_token_ids=tuple(s.tokens[: s.prompt_length]),
        output_token_ids=tuple(s.tokens[s.prompt_length :]),
        output_tokens=s.outputs,
        images=images,
    )


def _prompt_targets(flight: InFlight) -> tuple[int, ...]:
    """The prompt token after each token of the step; the last prompt token has none."""
    s = flight.sequence
    return tuple(s.tokens[flight.start + 1 : min(flight.known_end + 1, s.prompt_length)])
