"""Where requests enter: ranges are checked here and nowhere behind."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from itertools import count

from warhorse.v1.common_pb2 import ErrorReason

from services.common.prefix_chain import HashChain, root_hash
from services.engine.config import CoreConfig
from services.engine.models.base import VisionModel
from services.engine.sampling.params import SamplingParams
from services.engine.scheduler.messages import Request, RequestRefused
from services.engine.scheduler.plan import SequenceId
from services.engine.scheduler.sequence import Phase, RequestState, Sequence
from services.engine.scheduler.spans import AtomicSpans, check_images
from services.engine.scheduler.state import SchedulerState

MAX_CHOICES = 128
MAX_BIAS = 100.0
LEAST_TEMPERATURE = 0.01  # lower ones, except 0, are raised to it
SALT_LENGTH = 128
SALT_FORBIDDEN = "@/\\\0"


class Admission:
    """Checks requests and turns them into waiting sequences."""

    def __init__(
        self, state: SchedulerState, vocab_size: int, vision: VisionModel | None = None
    ) -> None:
        self._state = state
        self._vision = vision
        self._config = state.config
        self._vocab_size = vocab_size
        self._arrivals = count()
        self._sequence_ids = count()

    def submit(self, request: Request, now: float) -> RequestState:
        """Queue all choices of a request. Raises RequestRefused and keeps nothing."""
        check_request(request, self._config, self._vocab_size)
        check_images(request, self._vision, self._config.max_num_batched_tokens)
        if request.request_id in self._state.requests:
            raise _invalid("request_id", request.request_id, "not in use")
        self._check_queue(request)
        timeout = request.queue_timeout
        deadline = None if timeout is None else now + timeout
        spans = AtomicSpans.of(request.images, self._vision)
        state = RequestState(request, next(self._arrivals), deadline, spans, last_report=now)
        state.arrived_at = now
        chain = HashChain(
            root_hash(self._config.model_fingerprint, request.cache_salt),
            self._config.unit_tokens,
            request.images,
        )
        if self._config.enable_prefix_caching:
            chain.extend(request.prompt_token_ids)
        for choice in range(request.n):
            state.sequences.append(self._sequence(state, choice, chain))
            self._state.enqueue(state.sequences[-1])
        self._state.requests[request.request_id] = state
        return state

    def _sequence(self, state: RequestState, choice: int, chain: HashChain) -> Sequence:
        return Sequence(
            id=SequenceId(next(self._sequence_ids)),
            state=state,
            choice=choice,
            sampling=resolve_sampling(state.request, choice, self._config),
            tokens=list(state.request.prompt_token_ids),
            chain=chain.fork(),
            phase=Phase.FOLLOWING if choice else Phase.READY,
        )

    def _check_queue(self, request: Request) -> None:
        waiting, most = self._state.waiting_tokens, self._config.max_waiting_tokens
        new = len(request.prompt_token_ids) * request.n
        if self._state.waiting and waiting + new > most:
            raise RequestRefused(
                ErrorReason.ERROR_REASON_QUEUE_FULL,
                f"{waiting} prompt tokens are waiting, {new} more would exceed {most}",
            )


def resolve_sampling(request: Request, choice: int, config: CoreConfig) -> SamplingParams:
    """The settings of one choice; every choice has a seed of its own."""
    sampling, stopping = request.sampling, request.stopping
    eos = () if stopping.ignore_eos else stopping.eos_token_ids
    temperature = sampling.temperature
    greedy = temperature == 0
    return SamplingParams(
        temperature=0.0 if greedy else max(temperature, LEAST_TEMPERATURE),
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=_choice_seed(request, choice, config.seed),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias={
            token: min(MAX_BIAS, max(-MAX_BIAS, bias))
            for token, bias in sampling.logit_bias.items()
        },
        allowed_token_ids=sampling.allowed_token_ids,
        stop_token_ids=tuple(dict.fromkeys((*stopping.stop_token_ids, *eos))),
        min_tokens=stopping.min_tokens,
        logprobs=config.max_logprobs if request.logprobs == -1 else request.logprobs,
        logprob_token_ids=request.logprob_token_ids,
        grammar=sampling.grammar,
        bad_words=sampling.bad_words,
        thinking_budget=sampling.thinking_budget,
    )


def _choice_seed(request: Request, choice: int, engine_seed: int) -> int:
    """64 bits. Choice 0 of a seeded request has the seed itself; an unseeded one has its id's."""
    seed = request.sampling.seed
    if seed is not None and choice == 0:
        return seed % (1 << 64)
    parts: tuple[object, ...] = ("request", seed, choice)
    if seed is None:
        parts = (request.request_id, engine_seed, choice)
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def check_request(request: Request, config: CoreConfig, vocab_size: int) -> None:
    """Raise RequestRefused, naming field, value and range, for whatever cannot be served."""
    if not request.request_id:
        raise _invalid("request_id", "''", "not empty")
    _check_range("n", request.n, 1, MAX_CHOICES)
    _check_salt(request.cache_salt)
    _check_prompt(request, config, vocab_size)
    _check_sampling(request, vocab_size)
    _check_stopping(request, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(request, name)
        if value is not None:
            _check_range(f"output.{name}", value, -1, config.max_logprobs)
    _check_ids("output.logprob_token_ids", request.logprob_token_ids, vocab_size)
    if request.queue_timeout is not None:
        _check_range("queue_timeout", request.queue_timeout, 0, math.inf)


def _check_prompt(request: Request, config: CoreConfig, vocab_size: int) -> None:
    tokens = request.prompt_token_ids
    if not tokens:
        raise _invalid("prompt_token_ids", "empty", "at least one token")
    _check_ids("prompt_token_ids", (min(tokens), max(tokens)), vocab_size)
    room = config.max_model_len - (request.stopping.max_tokens > 0)
    if len(tokens) > room:
        raise RequestRefused(
            ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {len(tokens)} tokens and the context of {config.max_model_len} tokens "
            f"holds at most {room} beside the output",
            field="prompt_token_ids",
        )


def _check_sampling(request: Request, vocab_size: int) -> None:
    sampling = request.sampling
    _check_range("sampling.temperature", sampling.temperature, 0, 2)
    _check_range("sampling.top_p", sampling.top_p, 0, 1, open_start=True)
    _check_range("sampling.top_k", sampling.top_k, 0, math.inf)
    _check_range("sampling.min_p", sampling.min_p, 0, 1)
    _check_range("sampling.presence_penalty", sampling.presence_penalty, -2, 2)
    _check_range("sampling.frequency_penalty", sampling.frequency_penalty, -2, 2)
    repetition = sampling.repetition_penalty
    if not (math.isfinite(repetition) and repetition > 0):
        raise _invalid("sampling.repetition_penalty", repetition, "finite and above 0")
    _check_ids("sampling.logit_bias", sampling.logit_bias, vocab_size)
    for bias in sampling.logit_bias.values():
        if math.isnan(bias):
            raise _invalid("sampling.logit_bias", bias, "a number")
    _check_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    for word in sampling.bad_words:
        _check_ids("sampling.bad_words", word, vocab_size)
    if sampling.thinking_budget is not None:
        end = sampling.thinking_budget.end_token_id
        _check_ids("sampling.thinking_budget", (end,), vocab_size)


def _check_stopping(request: Request, vocab_size: int) -> None:
    stopping = request.stopping
    least = 1 if request.prompt_logprobs is None else 0
    _check_range("stopping.max_tokens", stopping.max_tokens, least, math.inf)
    _check_range("stopping.min_tokens", stopping.min_tokens, 0, stopping.max_tokens)
    _check_ids("stopping.stop_token_ids", stopping.stop_token_ids, vocab_size)
    _check_ids("stopping.eos_token_ids", stopping.eos_token_ids, vocab_size)
    eos = () if stopping.ignore_eos else stopping.eos_token_ids
    stops = {*stopping.stop_token_ids, *eos}
    allowed = set(request.sampling.allowed_token_ids) or range(vocab_size)
    if stopping.min_tokens and all(token in stops for token in allowed):
        raise _invalid(
            "sampling.allowed_token_ids",
            "only stop tokens",
            "with min_tokens, at least one other token",
        )


def _check_salt(salt: str) -> None:
    if len(salt) > SALT_LENGTH or any(c in SALT_FORBIDDEN for c in salt):
        raise _invalid(
            "cache_salt",
            repr(salt[: SALT_LENGTH + 1]),
            f"at most {SALT_LENGTH} characters, none of @ / \\ NUL",
        )


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise _invalid(field, token, f"in 0..{vocab_size - 1}")


def _check_range(
    field: str, value: float, low: float, high: float, *, open_start: bool = False
) -> None:
    inside = low < value <= high if open_start else low <= value <= high
    if not inside or (value == math.inf):
        start = "above " if open_start else ""
        raise _invalid(field, value, f"in {start}{low}..{high}")


def _invalid(field: str, value: object, expected: str) -> RequestRefused:
    return RequestRefused(
        ErrorReason.ERROR_REASON_INVALID_FIELD,
        f"{field} is {value} and must be {expected}",
        field=field,
    )
