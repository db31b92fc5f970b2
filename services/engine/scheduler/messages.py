"""What goes into the engine core and what comes out: plain data, a closed set of events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.tokenizer_pb2 import FinishReason

from services.engine.images import ImageSpan
from services.engine.sampling.params import GrammarUse, ThinkingBudget
from services.engine.scheduler.plan import Logprob


class RequestRefused(Exception):  # noqa: N818
    """A request that the core does not take; nothing of it is kept.

    `field` names the field of GenerateRequest at fault ("" where none is); the message holds the
    value and the accepted range.
    """

    def __init__(self, reason: ErrorReason, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """How tokens are chosen, with defaults already applied. `seed` None draws one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    grammar: GrammarUse | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    thinking_budget: ThinkingBudget | None = None


@dataclass(frozen=True, slots=True)
class RequestStopping:
    """When a choice ends. `ignore_eos` removes `eos_token_ids` alone."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One GenerateRequest. `queue_timeout` is the longest wait for its first step, seconds."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    stopping: RequestStopping
    sampling: RequestSampling = RequestSampling()
    logprobs: int | None = None  # None: none; 0: the chosen token alone; -1: max_logprobs
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()  # in place of the most likely ones; needs logprobs
    n: int = 1
    priority: int = 0  # lower runs first
    cache_salt: str = ""
    images: tuple[ImageSpan, ...] = ()
    queue_timeout: float | None = None


@dataclass(frozen=True, slots=True)
class PromptDone:
    """The prompt of a request has been computed; sent once, before its first tokens.

    `cached` prompt tokens came from a cache, `external_cached` of them from the external store;
    `created` ones were computed and are now in the prefix index.
    `prompt_logprobs` starts with the second prompt token.
    """

    request_id: str
    cached: int
    external_cached: int
    prompt_logprobs: tuple[Logprob, ...] = ()
    created: int = 0
    queue_seconds: float = field(default=0.0, compare=False)  # arrival to its first step
    prefill_seconds: float = field(default=0.0, compare=False)  # from there to this event


@dataclass(frozen=True, slots=True)
class TokensOut:
    """New tokens of one choice, in order. `logprobs` is empty or as long as `tokens`."""

    request_id: str
    choice: int
    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ProgressOut:
    """A prompt is being computed: `prefilled` of `total` tokens are done."""

    request_id: str
    prefilled: int
    total: int


@dataclass(frozen=True, slots=True)
class FinishedOut:
    """The last event of a choice.

    `stop_token_id` is set where one ended the choice; it was sent as its last token. `error` and
    `error_message` go with reason FINISH_REASON_ERROR.
    """

    request_id: str
    choice: int
    reason: FinishReason
    completion_tokens: int
    stop_token_id: int | None = None
    error: ErrorReason = ErrorReason.ERROR_REASON_UNSPECIFIED
    error_message: str = ""
    preemptions: int = field(default=0, compare=False)


EngineEvent: TypeAlias = PromptDone | TokensOut | ProgressOut | FinishedOut


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Fill of one pool, in pages or slots."""

    name: str
    kind: str
    page_tokens: int
    page_bytes: int
    total: int
    free: int
    cached: int


@dataclass(frozen=True, slots=True)
class CoreLoad:
    """Counters of the core since its start, and its present load (LoadResponse)."""

    running: int
    waiting: int
    waiting_tokens: int
    kv_usage: float  # 0 to 1, of the fullest pool; cached pages count as free
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_queries_tokens: int
    prefix_hit_tokens: int
    external_query_tokens: int
    external_hit_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int
    steps: int
    groups: tuple[GroupLoad, ...]
    store_connected: bool
    drafts: int = 0  # steps of sequences with drafts
    step_tokens: int = 0
    steps_by_tokens: tuple[int, ...] = ()  # see LoadResponse
    store_jobs: int = 0
    accepted_by_position: tuple[int, ...] = ()  # drafts, the first of a step first
