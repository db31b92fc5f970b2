"""All requests of the core and where they stand."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.tokenizer_pb2 import FinishReason

from services.engine.cache.manager import CacheManager
from services.engine.config import CoreConfig
from services.engine.scheduler.messages import EngineEvent, FinishedOut
from services.engine.scheduler.plan import SequenceId
from services.engine.scheduler.sequence import Phase, RequestState, Sequence

# Upper bounds of the tokens of a step, as dashboards know them.
STEP_BUCKETS = (1, *(8 << n for n in range(12)))


@dataclass(slots=True)
class Counters:
    """Totals since the start of the core."""

    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries_tokens: int = 0
    prefix_hit_tokens: int = 0
    external_query_tokens: int = 0
    external_hit_tokens: int = 0
    steps: int = 0
    draft_tokens: int = 0
    drafts: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    step_tokens: int = 0
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS) + 1))

    @property
    def accepted_draft_tokens(self) -> int:
        """Accepted drafts of any place in a step."""
        return sum(self.accepted_by_position)

    def verified(self, drafts: int, accepted: int) -> None:
        """The first `accepted` of the `drafts` of a sequence's step were right."""
        self.drafts += bool(drafts)
        self.draft_tokens += drafts
        missing = accepted - len(self.accepted_by_position)
        self.accepted_by_position += [0] * missing
        for position in range(accepted):
            self.accepted_by_position[position] += 1

    def step(self, tokens: int) -> None:
        """A step of so many tokens was made."""
        self.steps += 1
        self.step_tokens += tokens
        self.steps_by_tokens[bisect.bisect_left(STEP_BUCKETS, tokens)] += 1


@dataclass(slots=True)
class SchedulerState:
    """Owned by the core; the steps of its loop change it one after the other.

    `waiting` is ordered by rank. `ended` are sequences that the executor has to forget, `events`
    what the next step reports.
    """

    config: CoreConfig
    cache: CacheManager
    requests: dict[str, RequestState] = field(default_factory=dict)
    running: dict[SequenceId, Sequence] = field(default_factory=dict)
    waiting: list[Sequence] = field(default_factory=list)
    ended: list[SequenceId] = field(default_factory=list)
    events: list[EngineEvent] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    now: float = 0.0  # clock reading at the begin of the present step
    waiting_tokens: int = 0  # tokens to compute of `waiting`, hits not counted

    def enqueue(self, sequence: Sequence) -> None:
        """Add a sequence to the waiting ones."""
        bisect.insort(self.waiting, sequence, key=lambda s: s.rank)
        self.waiting_tokens += len(sequence.tokens)

    def admit(self, sequence: Sequence) -> None:
        """A waiting sequence has its table and runs."""
        self._unqueue(sequence)
        sequence.phase = Phase.RUNNING
        if not sequence.state.started:
            sequence.state.started_at = self.now
        sequence.state.started = True
        self.running[sequence.id] = sequence

    def preempt(self, sequence: Sequence) -> None:
        """Take the table of a running sequence; it waits and computes everything again.

        What the prefix index holds of it stays there and may save most of that.
        """
        self._stop(sequence)
        sequence.phase = Phase.READY
        self.counters.preemptions += 1
        sequence.preemptions += 1
        self.enqueue(sequence)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: ErrorReason = ErrorReason.ERROR_REASON_UNSPECIFIED,
        message: str = "",
    ) -> None:
        """End one choice wherever it stands, give everything back, report it."""
        if sequence.phase is Phase.RUNNING:
            self._stop(sequence)
        else:
            self._unqueue(sequence)
        sequence.phase = Phase.DONE
        state = sequence.state
        self.events.append(
            FinishedOut(
                request_id=state.request.request_id,
                choice=sequence.choice,
                reason=reason,
                completion_tokens=sequence.outputs,
                stop_token_id=stop_token_id,
                error=error,
                error_message=message,
                preemptions=sequence.preemptions,
            )
        )
        if sequence is state.leader:
            self.release_followers(state)
        if all(s.phase is Phase.DONE for s in state.sequences):
            del self.requests[state.request.request_id]

    def release_followers(self, state: RequestState) -> None:
        """The other choices of a request need not wait for the first one any more."""
        for s in state.sequences:
            if s.phase is Phase.FOLLOWING:
                s.phase = Phase.READY

    def _stop(self, sequence: Sequence) -> None:
        del self.running[sequence.id]
        if sequence.table is not None:
            self.cache.release(sequence.table)
            sequence.table = None
        sequence.computed = 0
        sequence.indexed = 0
        sequence.targets.clear()
        sequence.told_freed.clear()
        sequence.rolling = 0
        if sequence.collects_prompt_logprobs:
            sequence.state.prompt_logprobs.clear()
        if sequence.begun:
            self.ended.append(sequence.id)
            sequence.begun = False

    def _unqueue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.waiting_tokens -= len(sequence.tokens)
