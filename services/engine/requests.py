"""The one place where a GenerateRequest is checked; everything behind it trusts the message.

Every sampling field whose zero is a legal value must be set: the caller resolves defaults (from
generation_config.json), the engine has none. Ranges are those of the OpenAI API where it has the
field. `seed` alone may be absent and is then drawn here, so that a request is complete afterwards.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.engine_pb2 import GenerateRequest

from services.common.errors import ServiceError
from services.engine.image_fields import check_images, invalid

MAX_REQUEST_ID = 256
MAX_CHOICES = 128
MAX_SALT = 128
MAX_IDS = 1024
MAX_BAD_WORDS = 256  # two token sequences for each word
MAX_LOGPROB_IDS = 128
SALT_FORBIDDEN = "@/\\\0"


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What this engine serves. `max_logprobs` is the length of the longest top list."""

    model_names: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    max_logprobs: int = 20
    takes_images: bool = False


@dataclass(frozen=True, slots=True)
class FloatRange:
    """Accepted values of one float field; `text` is the range as the error names it."""

    field: str
    accepts: Callable[[float], bool]
    text: str


SAMPLING_RANGES = (
    FloatRange("temperature", lambda v: 0.0 <= v <= 2.0, "0 to 2"),
    FloatRange("top_p", lambda v: 0.0 < v <= 1.0, "above 0 up to 1"),
    FloatRange("min_p", lambda v: 0.0 <= v <= 1.0, "0 to 1"),
    FloatRange("presence_penalty", lambda v: -2.0 <= v <= 2.0, "-2 to 2"),
    FloatRange("frequency_penalty", lambda v: -2.0 <= v <= 2.0, "-2 to 2"),
    FloatRange("repetition_penalty", lambda v: 0.0 < v < math.inf, "finite and above 0"),
)


def validate(request: GenerateRequest, limits: RequestLimits) -> None:
    """Check `request` and complete it in place (seed, clamped logit_bias).

    Raises ServiceError MODEL_NOT_FOUND, UNSUPPORTED, INVALID_FIELD or CONTEXT_LENGTH_EXCEEDED.
    """
    _check_identity(request, limits)
    _check_prompt(request, limits)
    check_images(request.images, len(request.prompt_token_ids) // 4, limits.takes_images)
    _check_sampling(request, limits)
    _check_stopping(request, limits)
    _check_output(request, limits)
    _check_choices(request)
    _check_context(request, limits)


def _check_identity(request: GenerateRequest, limits: RequestLimits) -> None:
    if not 1 <= len(request.request_id) <= MAX_REQUEST_ID:
        got = len(request.request_id)
        raise invalid("request_id", f"has {got} characters; must have 1 to {MAX_REQUEST_ID}")
    if len(request.client_request_id) > MAX_REQUEST_ID:
        got = len(request.client_request_id)
        raise invalid("client_request_id", f"has {got} characters; at most {MAX_REQUEST_ID}")
    if request.model not in limits.model_names:
        served = ", ".join(limits.model_names)
        raise ServiceError(
            ErrorReason.ERROR_REASON_MODEL_NOT_FOUND,
            f"model {request.model!r} is not served here; served: {served}",
            field="model",
        )
    salt = request.cache_salt
    if len(salt) > MAX_SALT or any(c in salt for c in SALT_FORBIDDEN):
        raise invalid(
            "cache_salt", f"must have at most {MAX_SALT} characters and none of @ / \\ NUL"
        )


def _check_prompt(request: GenerateRequest, limits: RequestLimits) -> None:
    data = request.prompt_token_ids
    if not data:
        raise invalid("prompt_token_ids", "is empty; must hold at least one token")
    if len(data) % 4:
        raise invalid(
            "prompt_token_ids", f"has {len(data)} bytes; must be a multiple of 4 (uint32 each)"
        )
    ids = np.frombuffer(data, dtype="<u4")
    if int(ids.max()) >= limits.vocab_size:
        index = int(np.argmax(ids >= limits.vocab_size))
        raise _out_of_vocabulary(f"prompt_token_ids[{index}]", int(ids[index]), limits)


def _out_of_vocabulary(field: str, token: int, limits: RequestLimits) -> ServiceError:
    return invalid(field, f"token id {token} is outside 0 to {limits.vocab_size - 1}")


def _check_ids(field: str, ids: Sequence[int], limits: RequestLimits) -> None:
    if len(ids) > MAX_IDS:
        raise invalid(field, f"has {len(ids)} entries; at most {MAX_IDS}")
    for index, token in enumerate(ids):
        if token >= limits.vocab_size:
            raise _out_of_vocabulary(f"{field}[{index}]", token, limits)


def _check_sampling(request: GenerateRequest, limits: RequestLimits) -> None:
    sampling = request.sampling
    for rule in SAMPLING_RANGES:
        if not sampling.HasField(rule.field):
            raise invalid(f"sampling.{rule.field}", f"is not set; must be {rule.text}")
        value: float = getattr(sampling, rule.field)
        if not (math.isfinite(value) and rule.accepts(value)):
            raise invalid(f"sampling.{rule.field}", f"is {value:g}; must be {rule.text}")
    if not sampling.HasField("top_k"):
        raise invalid("sampling.top_k", "is not set; must be 0 (off) or more")
    _check_bias(request, limits)
    if len(sampling.allowed_token_ids) > limits.vocab_size:
        raise invalid("sampling.allowed_token_ids", f"at most {limits.vocab_size} entries")
    for index, token in enumerate(sampling.allowed_token_ids):
        if token >= limits.vocab_size:
            raise _out_of_vocabulary(f"sampling.allowed_token_ids[{index}]", token, limits)
    _check_rules(request, limits)
    if not sampling.HasField("seed"):
        sampling.seed = secrets.randbits(63)


def _check_rules(request: GenerateRequest, limits: RequestLimits) -> None:
    sampling = request.sampling
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        got = len(sampling.bad_words)
        raise invalid("sampling.bad_words", f"has {got} entries; at most {MAX_BAD_WORDS}")
    for index, word in enumerate(sampling.bad_words):
        field = f"sampling.bad_words[{index}]"
        if not word.token_ids:
            raise invalid(field, "is empty; must hold at least one token")
        _check_ids(field, word.token_ids, limits)
    if sampling.HasField("thinking_budget"):
        field = "sampling.thinking_budget.end_token_id"
        _check_ids(field, [sampling.thinking_budget.end_token_id], limits)


def _check_bias(request: GenerateRequest, limits: RequestLimits) -> None:
    bias = request.sampling.logit_bias
    _check_ids("sampling.logit_bias", [b.token_id for b in bias], limits)
    for index, entry in enumerate(bias):
        if math.isnan(entry.bias):
            raise invalid(f"sampling.logit_bias[{index}]", "is nan; must be -100 to 100")
        entry.bias = min(100.0, max(-100.0, entry.bias))


def _check_stopping(request: GenerateRequest, limits: RequestLimits) -> None:
    stopping = request.stopping
    if not stopping.HasField("max_tokens"):
        raise invalid("stopping.max_tokens", "is not set; must be 1 or more")
    if stopping.max_tokens == 0 and not request.output.HasField("prompt_logprobs"):
        raise invalid("stopping.max_tokens", "is 0; must be 1 or more without prompt_logprobs")
    if stopping.min_tokens > stopping.max_tokens:
        raise invalid(
            "stopping.min_tokens",
            f"is {stopping.min_tokens}; must be 0 to max_tokens, which is {stopping.max_tokens}",
        )
    _check_ids("stopping.stop_token_ids", stopping.stop_token_ids, limits)
    _check_ids("stopping.eos_token_ids", stopping.eos_token_ids, limits)


def _check_output(request: GenerateRequest, limits: RequestLimits) -> None:
    most = min(limits.max_logprobs, limits.vocab_size)
    output = request.output
    if output.HasField("logprobs") and not 0 <= output.logprobs <= most:
        raise invalid("output.logprobs", f"is {output.logprobs}; must be 0 to {most}")
    if output.HasField("prompt_logprobs") and not 0 <= output.prompt_logprobs <= most:
        raise invalid("output.prompt_logprobs", f"is {output.prompt_logprobs}; must be 0 to {most}")
    _check_logprob_ids(output.logprob_token_ids, output.HasField("logprobs"), limits)


def _check_logprob_ids(ids: Sequence[int], has_logprobs: bool, limits: RequestLimits) -> None:
    field = "output.logprob_token_ids"
    if ids and not has_logprobs:
        raise invalid(field, "is set; needs output.logprobs")
    if len(ids) > MAX_LOGPROB_IDS:
        raise invalid(field, f"has {len(ids)} entries; at most {MAX_LOGPROB_IDS}")
    _check_ids(field, ids, limits)


def _check_choices(request: GenerateRequest) -> None:
    if not request.HasField("n"):
        raise invalid("n", f"is not set; must be 1 to {MAX_CHOICES}")
    if not 1 <= request.n <= MAX_CHOICES:
        raise invalid("n", f"is {request.n}; must be 1 to {MAX_CHOICES}")
    if request.n > 1 and request.sampling.temperature == 0:
        raise invalid("n", f"is {request.n}; must be 1 when temperature is 0 (greedy)")


def _check_context(request: GenerateRequest, limits: RequestLimits) -> None:
    prompt, output = len(request.prompt_token_ids) // 4, request.stopping.max_tokens
    if prompt + output <= limits.max_model_len:
        return
    field = "prompt_token_ids" if prompt >= limits.max_model_len else "stopping.max_tokens"
    raise ServiceError(
        ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED,
        f"the maximum context length is {limits.max_model_len} tokens, but {prompt + output} were "
        f"requested ({prompt} in the prompt, {output} to generate)",
        field=field,
    )
