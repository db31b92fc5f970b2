"""A step as data: what to compute, where its pages are, what to sample.

A plan is made by the scheduler, carries everything that a rank does not know yet, and is executed
by an `Executor`. It holds no tensor and no clock, and its size follows the tokens of the step, not
the length of the contexts: what a sequence needs once (sampling settings, the pages of a prefix
hit) comes with `begin`, later pages as they are added. Executors drop what they keep of a sequence
when it is listed in `ended`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType, Protocol

from services.engine.cache.spec import PageId, SlotId
from services.engine.images import ImageSpan
from services.engine.sampling.params import SamplingParams

SequenceId = NewType("SequenceId", int)


@dataclass(frozen=True, slots=True)
class SequenceBegin:
    """What an executor keeps of a sequence from its first step on, and again after preemption.

    Token ids are those that penalties count and grammars follow: the prompt and the output so
    far; both empty where `sampling` needs neither. `output_tokens` is the number of tokens
    generated so far. `images` are all of its images; executors get their pixels by digest from an
    `ImageSource`.
    """

    sampling: SamplingParams
    prompt_token_ids: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    output_tokens: int = 0
    images: tuple[ImageSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """n >= 1 consecutive tokens of one sequence.

    `sample_from` is the index within `token_ids` of the first token whose next token is sampled;
    None samples nothing (a prefill chunk that is not the last). Tokens after it are drafts, to be
    verified: draft i is accepted where it equals the token sampled in front of it.

    Page tables of paged and window groups: `new_pages` are appended to the table (at a `begin`, to
    an empty one); the first `freed_pages` of a window group's table may not be read any more.
    """

    sequence: SequenceId
    start: int  # position of the first token
    token_ids: tuple[int, ...]
    ngram_context: tuple[int, ...]  # ids just before `start`, as many as the model asks for
    new_pages: dict[str, tuple[PageId, ...]]
    freed_pages: dict[str, int]
    state_read: dict[str, SlotId | None]  # None starts from zeros
    state_writes: dict[str, tuple[tuple[int, SlotId], ...]]  # (index within token_ids, slot)
    begin: SequenceBegin | None = None
    sample_from: int | None = None
    prompt_logprobs: int | None = None  # length of the top lists
    prompt_targets: tuple[int, ...] = ()  # the prompt token after each token, from the first on


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of a replica.

    Before the forward pass the executor forgets the sequences in `ended`, fills the pages and slots
    in `garbage` with arbitrary values (debugging only) and clears those in `zero`.
    """

    number: int
    sequences: tuple[SequenceStep, ...]
    ended: tuple[SequenceId, ...] = ()
    zero: dict[str, tuple[int, ...]] = field(default_factory=dict)
    garbage: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing at all to do."""
        return not (self.sequences or self.ended or self.zero or self.garbage)

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

    `token_ids` are the sampled tokens: one, or with drafts the accepted ones and the one after
    them. `finite` is False when the logits held NaN or infinity: the tokens are then meaningless.
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
    """Runs plans in order: one process today, ranks and stages behind the same call."""

    def execute(self, plan: StepPlan) -> StepResult: ...
