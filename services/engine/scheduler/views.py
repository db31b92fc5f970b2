"""The state of the scheduler as the numbers that the planner decides on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.engine.cache.manager import CacheManager, SequenceTable
from services.engine.cache.pool import InvariantError
from services.engine.cache.prefix import Match
from services.engine.scheduler.plan import SequenceId
from services.engine.scheduler.planner import UNLIMITED, Candidate, GroupView, PlanView
from services.engine.scheduler.sequence import Phase, Sequence
from services.engine.scheduler.state import SchedulerState

Drafts = dict[SequenceId, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Hit:
    """A waiting sequence and what the prefix index has of it."""

    sequence: Sequence
    match: Match


Hits = dict[SequenceId, Hit]


def find_hits(state: SchedulerState) -> Hits:
    """Prefix hits of the waiting sequences that one step could admit at most."""
    budget = state.config.max_num_batched_tokens
    seats = state.config.max_num_seqs - len(state.running)
    worst = max((s.rank[0] for s in state.running.values()), default=0)
    found: Hits = {}
    for s in state.waiting:
        if budget <= 0 or len(found) == state.config.max_num_seqs:
            break
        if not seats and s.rank[0] >= worst:
            break
        if s.phase is Phase.READY:
            match = _longest_match(state, s)
            found[s.id] = Hit(s, match)
            budget -= len(s.tokens) - match.units * state.cache.unit_tokens
    return found


def _longest_match(state: SchedulerState, s: Sequence) -> Match:
    """The longest restorable prefix that ends at no place where the sequence may not be cut."""
    hashes, unit = s.restorable_hashes, state.cache.unit_tokens
    match = state.cache.index.match(hashes)
    while (units := s.boundary(match.units * unit) // unit) < match.units:
        match = Match(state.cache.index.match(hashes[:units]).units, match.chain)
    return match


def survey(state: SchedulerState, hits: Hits, drafts: Drafts) -> PlanView:
    """What the planner needs, except the costly `releases`."""
    cache, running = state.cache, list(state.running.values())
    return PlanView(
        groups=tuple(
            GroupView(g.name, g.kind, g.page_tokens, cache.pools[g.name].available)
            for g in cache.groups
        ),
        candidates=(
            *(_running(state, s, len(drafts.get(s.id, ()))) for s in running),
            *(_waiting(state, hit) for hit in hits.values()),
        ),
        budget=state.config.max_num_batched_tokens,
        seats=state.config.max_num_seqs - len(running),
    )


def with_releases(state: SchedulerState, view: PlanView) -> PlanView:
    """The same view with what a preemption of each running sequence would free."""

    def counted(c: Candidate) -> Candidate:
        return replace(c, releases=_releases(state, c.sequence)) if c.running else c

    return replace(view, candidates=tuple(counted(c) for c in view.candidates))


def table_of(s: Sequence) -> SequenceTable:
    """The table of a running sequence."""
    if s.table is None:
        raise InvariantError(f"sequence {s.id} runs without a table")
    return s.table


def writes_in_place(cache: CacheManager, table: SequenceTable, group: str) -> bool:
    """Whether a step may overwrite the state that it starts from."""
    slot = table.states[group]
    return slot is not None and not cache.pools[group].is_shared(slot)


def _running(state: SchedulerState, s: Sequence, drafts: int) -> Candidate:
    table, cache = table_of(s), state.cache
    return Candidate(
        sequence=s.id,
        rank=s.rank,
        running=True,
        start=s.computed,
        tokens=len(s.tokens) - s.computed,
        drafts=drafts,
        limit=_limit(state, s),
        spans=s.spans,
        pages={name: len(pages) for name, pages in table.pages.items()},
        in_place=all(writes_in_place(cache, table, name) for name in cache.state_groups),
    )


def _waiting(state: SchedulerState, hit: Hit) -> Candidate:
    s, cache = hit.sequence, state.cache
    start = hit.match.units * cache.unit_tokens
    claims = {g.name: 0 for g in cache.groups}
    shares = dict(claims)
    for name, ids in cache.restored(s.restorable_hashes, hit.match.units):
        holders = [cache.pools[name].references(i) for i in ids]
        claims[name] += holders.count(0)
        shares[name] += holders.count(1)
    return Candidate(
        sequence=s.id,
        rank=s.rank,
        running=False,
        start=start,
        tokens=len(s.tokens) - start,
        limit=_limit(state, s),
        spans=s.spans,
        pages={g.name: start // g.page_tokens for g in cache.page_groups},
        claims=claims,
        shares=shares,
    )


def _limit(state: SchedulerState, s: Sequence) -> int:
    return state.config.prompt_logprobs_chunk if s.collects_prompt_logprobs else UNLIMITED


def _releases(state: SchedulerState, sequence: SequenceId) -> dict[str, int]:
    table = table_of(state.running[sequence])
    return {
        name: sum(pool.references(i) == 1 for i in table.held(name))
        for name, pool in state.cache.pools.items()
    }
