"""Who computes how many tokens in the next step: a pure function of numbers.

Rules, in order:

1. Sequences are served by rank: priority, then arrival. Each decoding sequence has its token set
   aside, so that prompts in front of it never stop its output.
2. A running sequence that finds no page takes what fits; where not even one token fits, the
   running sequences of the worst rank, below its own, are preempted until one does.
3. A waiting sequence is admitted when a seat is free and all its known tokens fit. It may preempt
   running sequences of a strictly worse priority, and only if that is enough.
4. The first waiting sequence that cannot be admitted closes the queue for this step.
5. A range of tokens that must be computed in one step (`AtomicSpans`) is granted whole or not at
   all. Its turn may use up the tokens set aside for decoding sequences of a worse rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from services.engine.scheduler.plan import SequenceId
from services.engine.scheduler.sequence import Rank
from services.engine.scheduler.spans import NO_SPANS, AtomicSpans

UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class GroupView:
    """One pool: `available` ids can be had, by eviction of cached ones if need be."""

    name: str
    kind: Literal["paged", "window", "state"]
    page_tokens: int
    available: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """One sequence that may compute tokens.

    Of a waiting sequence, `start` and `pages` describe it with its prefix hit. `claims` counts the
    cached ids that the hit would take out of `available`, `shares` the ids of the hit that one
    running sequence holds: its preemption would not make them available after all. `releases`
    counts the ids that preemption makes available otherwise; it matters when memory is short.
    """

    sequence: SequenceId
    rank: Rank
    running: bool
    start: int  # tokens in the cache
    tokens: int  # known tokens to compute
    drafts: int = 0  # further tokens to verify
    limit: int = UNLIMITED  # most tokens of a step
    spans: AtomicSpans = NO_SPANS
    pages: dict[str, int] = field(default_factory=dict)  # length of the page tables
    in_place: bool = False  # the state slot may be overwritten
    claims: dict[str, int] = field(default_factory=dict)
    shares: dict[str, int] = field(default_factory=dict)
    releases: dict[str, int] = field(default_factory=dict)

    @property
    def decoding(self) -> bool:
        """One known token, which gives the next one."""
        return self.running and self.tokens == 1

    @property
    def least(self) -> int:
        """The fewest tokens that may be computed."""
        return self.spans.least(self.start)

    def whole(self, tokens: int) -> int:
        """As many of `tokens` as may be computed; 0 where that are fewer than `least`."""
        return self.spans.cut(self.start + tokens) - self.start


@dataclass(frozen=True, slots=True)
class PlanView:
    """Everything that the decision depends on."""

    groups: tuple[GroupView, ...]
    candidates: tuple[Candidate, ...]
    budget: int  # tokens of the step
    seats: int  # sequences that can still be admitted


@dataclass(frozen=True, slots=True)
class Grant:
    """`tokens` known tokens of a sequence and `drafts` after them."""

    sequence: SequenceId
    tokens: int
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Grants by rank; `short` says that memory, not the budget, was in the way."""

    grants: tuple[Grant, ...]
    preempted: tuple[SequenceId, ...] = ()
    short: bool = False


def decide(view: PlanView) -> Decision:
    """Apply the rules above to one view."""
    return _Walk(view).run()


class _Walk:
    """One pass over the candidates, best rank first; its own state, nothing shared."""

    def __init__(self, view: PlanView) -> None:
        self._order = sorted(view.candidates, key=lambda c: c.rank)
        self._groups = view.groups
        self._room = {g.name: g.available for g in view.groups}
        self._budget = view.budget
        self._seats = view.seats
        self._victims = [c for c in self._order if c.running]  # still running, by rank
        self._reserved = sum(c.decoding for c in self._order)
        self._grants: list[Grant] = []
        self._preempted: list[SequenceId] = []
        self._shared = {g.name: 0 for g in view.groups}  # by hits with sequences still running
        self._short = False

    def run(self) -> Decision:
        is_open = True
        for c in self._order:
            if c.sequence in self._preempted:
                continue
            if c.running:
                self._serve(c)
            elif is_open:
                is_open = self._admit(c)
        return Decision(tuple(self._grants), tuple(self._preempted), self._short)

    def _serve(self, c: Candidate) -> None:
        self._reserved -= c.decoding
        wanted = self._wanted(c)
        if wanted <= 0:
            return
        while (fits := self._fits(c, self._room)) < c.least:
            self._short = True
            victim = self._victims[-1]
            if victim.rank <= c.rank:
                return
            self._preempt(victim)
        tokens = c.whole(min(wanted, fits))
        self._short |= fits < wanted
        self._grant(c, tokens, self._drafts(c, tokens))

    def _wanted(self, c: Candidate) -> int:
        """Tokens that limit and budget allow.

        A span, and a token that was set aside, may take what is set aside for worse ranks.
        """
        room, least = max(0, self._budget - self._reserved), c.least
        if (least > 1 or c.decoding) and least <= self._budget:
            room = max(room, least)
        return c.whole(min(c.tokens, max(c.limit, least), room))

    def _admit(self, c: Candidate) -> bool:
        """Whether the queue stays open behind `c`."""
        wanted = self._wanted(c)
        worse = [v for v in self._victims if v.rank[0] > c.rank[0]]
        if wanted <= 0 or not (self._seats or worse):
            return False
        while not self._seats or not self._holds(c, wanted, self._room):
            self._short |= not self._holds(c, wanted, self._room)
            if not worse or not self._holds(c, wanted, self._room_without(worse)):
                return False
            self._preempt(worse.pop())
        for name in self._room:
            self._room[name] -= self._claim(c, name)
            self._shared[name] += 0 if self._preempted else c.shares.get(name, 0)
        self._seats -= 1
        self._grant(c, wanted, 0)
        return True

    def _holds(self, c: Candidate, tokens: int, room: dict[str, int]) -> bool:
        """Whether a hit and all known tokens (of windows and states: the first step's) fit."""
        return all(
            _fitting(g, c, room[g.name] - self._claim(c, g.name))
            >= (c.tokens if g.kind == "paged" else tokens)
            for g in self._groups
        )

    def _claim(self, c: Candidate, group: str) -> int:
        """Ids that the hit of `c` takes out of the room; a share may be a victim's by now."""
        return c.claims.get(group, 0) + (c.shares.get(group, 0) if self._preempted else 0)

    def _fits(self, c: Candidate, room: dict[str, int]) -> int:
        return min(_fitting(g, c, room[g.name]) for g in self._groups)

    def _drafts(self, c: Candidate, tokens: int) -> int:
        """Drafts after `tokens` known ones: what the budget allows, none if memory is short."""
        drafts = min(c.drafts, self._budget - self._reserved - tokens)
        if drafts <= 0 or tokens < c.tokens:
            return 0
        needs = (_need(g, c, tokens, drafts) <= self._room[g.name] for g in self._groups)
        return drafts if all(needs) else 0

    def _grant(self, c: Candidate, tokens: int, drafts: int) -> None:
        for g in self._groups:
            self._room[g.name] -= _need(g, c, tokens, drafts)
        self._budget -= tokens + drafts
        self._grants.append(Grant(c.sequence, tokens, drafts))

    def _preempt(self, victim: Candidate) -> None:
        for name in self._room:
            released = victim.releases.get(name, 0)
            kept = min(self._shared[name], released)
            self._shared[name] -= kept
            self._room[name] += released - kept
        self._victims.remove(victim)
        self._preempted.append(victim.sequence)
        self._reserved -= victim.decoding
        self._seats += 1

    def _room_without(self, victims: list[Candidate]) -> dict[str, int]:
        return {
            name: room + sum(v.releases.get(name, 0) for v in victims)
            for name, room in self._room.items()
        }


def _fitting(group: GroupView, c: Candidate, room: int) -> int:
    """Most tokens that `room` ids of one group allow."""
    if group.kind == "state":
        return UNLIMITED if room >= (0 if c.in_place else 1) else 0
    return (c.pages.get(group.name, 0) + room) * group.page_tokens - c.start


def _need(group: GroupView, c: Candidate, tokens: int, drafts: int) -> int:
    """Ids of one group that computing `tokens` and `drafts` takes.

    A state group needs a slot for the state after every token that may turn out to be the last.
    """
    if group.kind == "state":
        return drafts + (0 if c.in_place else 1)
    end = c.start + tokens + drafts
    return max(0, -(-end // group.page_tokens) - c.pages.get(group.name, 0))
