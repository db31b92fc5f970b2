"""A request under way and its choices."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from services.common.prefix_chain import HashChain, UnitHash
from services.engine.cache.manager import SequenceTable
from services.engine.sampling.params import SamplingParams
from services.engine.scheduler.messages import Request
from services.engine.scheduler.plan import Logprob, SequenceId
from services.engine.scheduler.spans import NO_SPANS, AtomicSpans

Rank = tuple[int, int, int]  # priority, arrival, choice: the smallest runs first


class Phase(enum.Enum):
    """Where a sequence stands. Only READY and RUNNING ones are planned."""

    FOLLOWING = enum.auto()  # waits for the first choice to compute the prompt
    LOOKUP = enum.auto()  # the store has been asked
    LOADABLE = enum.auto()  # the store has units; a load may start
    LOADING = enum.auto()
    READY = enum.auto()
    RUNNING = enum.auto()  # has a table
    DONE = enum.auto()


@dataclass(slots=True)
class RequestState:
    """What the choices of one request share."""

    request: Request
    arrival: int
    deadline: float | None  # clock reading after which it may not start any more
    spans: AtomicSpans = NO_SPANS
    sequences: list[Sequence] = field(default_factory=list)
    prompt_done: bool = False
    started: bool = False
    arrived_at: float = 0.0  # clock readings
    started_at: float = 0.0
    cached: int = 0  # prompt tokens of the first hit
    external_cached: int = 0
    last_report: float = 0.0  # clock reading of the last progress
    prompt_logprobs: list[Logprob] = field(default_factory=list)

    @property
    def leader(self) -> Sequence:
        """The choice that computes the prompt."""
        return self.sequences[0]


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice: its tokens, how many of them are in the cache, and its table.

    `computed` tokens of `tokens` (prompt and output) have verified cache entries. A sequence
    without a table has `computed` 0.
    """

    id: SequenceId
    state: RequestState
    choice: int
    sampling: SamplingParams
    tokens: list[int]
    chain: HashChain
    phase: Phase
    table: SequenceTable | None = None
    computed: int = 0
    begun: bool = False  # the executor knows it
    told_freed: dict[str, int] = field(default_factory=dict)  # freed pages the executor knows of
    indexed: int = 0  # units offered to the prefix index
    targets: set[int] = field(default_factory=set)  # boundaries whose snapshot is kept
    turn_start: int = 0  # tokens known when it was admitted; snapshots after it roll
    rolling: int = 0  # boundary of the snapshot that the next one replaces; 0 for none
    lookup_deadline: float = 0.0
    external_units: int = 0  # units that the store can restore
    preemptions: int = 0
    local_units: int = 0  # units restorable without it

    @property
    def rank(self) -> Rank:
        """Order of service."""
        return (self.state.request.priority, self.state.arrival, self.choice)

    @property
    def prompt_length(self) -> int:
        """Prompt tokens."""
        return len(self.state.request.prompt_token_ids)

    @property
    def outputs(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def decoding(self) -> bool:
        """Whether only the last token lacks its cache entries."""
        return self.table is not None and len(self.tokens) - self.computed == 1

    @property
    def collects_prompt_logprobs(self) -> bool:
        """Whether its prompt tokens are still to be scored."""
        state = self.state
        asked = state.request.prompt_logprobs is not None
        return asked and self is state.leader and not state.prompt_done

    @property
    def spans(self) -> AtomicSpans:
        """Where its tokens may not be cut."""
        return self.state.spans

    def boundary(self, position: int) -> int:
        """The last unit boundary up to `position` at which no span is cut."""
        unit = self.chain.unit_tokens
        boundary = position // unit * unit
        while (cut := self.spans.cut(boundary)) < boundary:
            boundary = cut // unit * unit
        return boundary

    @property
    def restorable_hashes(self) -> Seq[UnitHash]:
        """Units that a hit may use: the last token is always computed, for its logits."""
        if self.collects_prompt_logprobs:
            return []
        return self.chain.hashes[: (len(self.tokens) - 1) // self.chain.unit_tokens]
