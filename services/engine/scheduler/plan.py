"""A step as data: what to compute, where its pages are, what to sample.

A plan is made by the scheduler, carries everything that a rank needs, and is executed by an
`Executor`. It holds no tensor and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol

from services.engine.cache.spec import PageId, SlotId
from services.engine.sampling.params import SamplingParams

SequenceId = NewType("SequenceId", int)


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """n >= 1 consecutive tokens of one sequence.

    `sample_from` is the index within `token_ids` of the first token whose next token is sampled
    or verified; None samples nothing (a prefill chunk that is not the last).
    """

    sequence: SequenceId
    start: int  # position of the first token
    token_ids: tuple[int, ...]
    ngram_context: tuple[int, ...]  # ids just before `start`, as many as the model asks for
    pages: dict[str, tuple[PageId, ...]]  # paged and window groups: the whole table
    state_read: dict[str, SlotId | None]  # None starts from zeros
    state_writes: dict[str, tuple[tuple[int, SlotId], ...]]  # (index within token_ids, slot)
    sample_from: int | None = None
    sampling: SamplingParams | None = None
    prompt_logprobs: int | None = None  # top-k for every token of this step


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of a replica. Empty when there is nothing to compute."""

    number: int
    sequences: tuple[SequenceStep, ...]
    zero_slots: dict[str, tuple[SlotId, ...]]  # slots to clear before the step

    @property
    def is_empty(self) -> bool:
        return not self.sequences

    @property
    def tokens(self) -> int:
        """Number of tokens computed."""
        return sum(len(s.token_ids) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token, its rank (1 is the most likely) and the top list."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """What a step produced for one sequence.

    `token_ids` are the sampled tokens (one, or several after verification). `finite` is False
    when the logits held NaN or infinity: the tokens are then meaningless.
    """

    sequence: SequenceId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()
    finite: bool = True


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the order of the plan's sequences."""

    number: int
    sequences: tuple[SequenceResult, ...]


class Executor(Protocol):
    """Runs plans: one process today, ranks and stages behind the same call."""

    def execute(self, plan: StepPlan) -> StepResult: ...
