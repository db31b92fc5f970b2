"""From valid request fields to the engine's parameters: defaults, relations, context length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from warhorse.v1 import engine_pb2, tokenizer_pb2

from services.gateway.errors import bad_request
from services.gateway.plan import Prompt
from services.gateway.schema.sampling import MAX_STOPS, SamplingRequest

LOWEST_TEMPERATURE = 0.01
MAX_BIAS = 100.0
# Longest text that one token can stand for on average in a prompt worth encoding; a longer text
# is refused before any work is spent on it.
MAX_BYTES_PER_TOKEN = 128


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What requests are checked against."""

    name: str
    served_as: str  # the name that answers give
    fingerprint: str
    vocab_size: int
    max_model_len: int
    defaults: Mapping[str, Any]  # generation_config.json with the operator's overrides
    max_logprobs: int
    family: str = ""


def check_request(request: SamplingRequest, facts: ModelFacts) -> None:
    """Relations between fields, and token ids against the vocabulary. Raises ApiError 400."""
    if request.stream_options is not None and not request.stream:
        raise bad_request("`stream_options` needs `stream` to be true.", "stream_options")
    if request.stream and request.prompt_logprobs:
        raise bad_request("`prompt_logprobs` cannot be streamed.", "prompt_logprobs")
    temperature = _temperature(request, facts)
    if temperature == 0 and (request.n or 1) > 1:
        message = f"`n` must be 1 when `temperature` is 0, got {request.n}."
        raise bad_request(message, "n")
    _check_stops(request.stop or [])
    check_ids("stop_token_ids", request.stop_token_ids or (), facts)
    check_ids("allowed_token_ids", request.allowed_token_ids or (), facts)
    check_ids("logit_bias", request.logit_bias or (), facts)
    check_logprobs("prompt_logprobs", request.prompt_logprobs, facts)
    _check_logprob_ids(request, facts)


def _check_logprob_ids(request: SamplingRequest, facts: ModelFacts) -> None:
    name = "logprob_token_ids"
    if not request.logprob_token_ids:
        return
    if not request.wants_logprobs:
        raise bad_request(f"`{name}` needs `logprobs`.", name)
    if request.max_tokens == 0:
        raise bad_request(f"`{name}` needs output, and `max_tokens` is 0.", name)
    check_ids(name, request.logprob_token_ids, facts)


def check_logprobs(name: str, value: int | None, facts: ModelFacts) -> None:
    """Refuse more alternatives than the server allows (-1, all of them, counts as too many)."""
    if value is not None and not 0 <= value <= facts.max_logprobs:
        raise bad_request(f"`{name}` must be from 0 to {facts.max_logprobs}, got {value}.", name)


def check_messages(count: int, facts: ModelFacts) -> None:
    """Refuse more messages than the context has tokens, before time is spent on them."""
    if count > facts.max_model_len:
        message = (
            f"The prompt has {count} messages, too many for the model's maximum context length of "
            f"{facts.max_model_len} tokens."
        )
        raise bad_request(message, "messages")


def check_text_size(size: int, facts: ModelFacts, param: str) -> None:
    """Refuse `size` bytes of prompt that no tokenizer could fit into the context."""
    if size > facts.max_model_len * MAX_BYTES_PER_TOKEN:
        message = (
            f"The prompt has {size} bytes, too many for the model's maximum context length of "
            f"{facts.max_model_len} tokens."
        )
        raise bad_request(message, param)


def _check_stops(stops: list[str]) -> None:
    if len(stops) > MAX_STOPS:
        raise bad_request(f"`stop` may hold {MAX_STOPS} texts, got {len(stops)}.", "stop")
    if not all(stops):
        raise bad_request("`stop` must not hold an empty text.", "stop")


def check_ids(name: str, ids: Iterable[int], facts: ModelFacts) -> None:
    """Refuse ids outside the vocabulary; `name` is the field that holds them."""
    for token in ids:
        if not 0 <= token < facts.vocab_size:
            message = f"`{name}` must hold token ids from 0 to {facts.vocab_size - 1}, got {token}."
            raise bad_request(message, name)


def max_tokens(
    requested: int | None, prompt: Prompt, facts: ModelFacts, name: str, param: str
) -> int:
    """Tokens that may be generated: `requested`, else the room that the prompt leaves.

    `name` is the field that `requested` came from, `param` the field that holds the prompt.
    Raises ApiError 400 when prompt and output do not fit the context.
    """
    limit = facts.max_model_len
    room = limit - prompt.length
    if (room < 1 and requested != 0) or room < 0:
        message = (
            f"The prompt has {prompt.length} tokens, which leaves no room for output within the "
            f"model's maximum context length of {limit} tokens."
        )
        raise bad_request(message, param)
    if requested is None:
        return min(room, int(facts.defaults.get("max_new_tokens") or room))
    if requested > room:
        message = (
            f"The prompt has {prompt.length} tokens and `{name}` asks for {requested} more, but "
            f"the model's maximum context length is {limit} tokens."
        )
        raise bad_request(message, name)
    return requested


def truncate(request: SamplingRequest, prompt: Prompt, facts: ModelFacts) -> Prompt:
    """The prompt cut to `truncate_prompt_tokens`, at its beginning unless told otherwise."""
    wanted = request.truncate_prompt_tokens
    if wanted is None:
        return prompt
    if wanted == 0:
        message = "`truncate_prompt_tokens` must be an integer of at least 1, or -1, got 0."
        raise bad_request(message, "truncate_prompt_tokens")
    size = 4 * (facts.max_model_len - 1 if wanted == -1 else wanted)
    ids = prompt.token_ids
    if prompt.images and size < len(ids):
        message = "`truncate_prompt_tokens` cannot cut a prompt that holds images."
        raise bad_request(message, "truncate_prompt_tokens")
    kept = ids[:size] if request.truncation_side == "right" else ids[-size:]
    return replace(prompt, token_ids=kept)


def _temperature(request: SamplingRequest, facts: ModelFacts) -> float:
    value = float(_first(request.temperature, facts.defaults.get("temperature"), 1.0))
    return max(value, LOWEST_TEMPERATURE) if value > 0 else 0.0


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def sampling_params(
    request: SamplingRequest,
    facts: ModelFacts,
    bad_words: Sequence[engine_pb2.TokenSequence] = (),
) -> engine_pb2.SamplingParams:
    """The request's values, else the checkpoint's, else those of the OpenAI interface."""
    defaults = facts.defaults
    params = engine_pb2.SamplingParams(
        temperature=_temperature(request, facts),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_first(
            request.repetition_penalty, defaults.get("repetition_penalty"), 1.0
        ),
        allowed_token_ids=request.allowed_token_ids or (),
        bad_words=bad_words,
        logit_bias=[
            engine_pb2.LogitBias(token_id=t, bias=max(-MAX_BIAS, min(MAX_BIAS, bias)))
            for t, bias in (request.logit_bias or {}).items()
        ],
    )
    params.top_p, params.top_k, params.min_p = 1.0, 0, 0.0  # greedy: nothing to cut
    if params.temperature:
        params.top_p = _first(request.top_p, defaults.get("top_p"), 1.0)
        params.top_k = max(0, _first(request.top_k, defaults.get("top_k"), 0))
        params.min_p = _first(request.min_p, defaults.get("min_p"), 0.0)
    if request.seed is not None and request.seed != -1:
        params.seed = request.seed
    return params


def output_params(request: SamplingRequest, logprobs: int | None) -> engine_pb2.OutputParams:
    """Which log-probabilities are told; `logprobs`: alternatives of each token, None: none."""
    output = engine_pb2.OutputParams(logprobs=logprobs, prompt_logprobs=request.prompt_logprobs)
    output.logprob_token_ids.extend(dict.fromkeys(request.logprob_token_ids or ()))
    return output


def stopping_params(
    request: SamplingRequest, prompt: Prompt, most: int
) -> engine_pb2.StoppingParams:
    """When generation ends; `most` is the resolved max_tokens."""
    least = request.min_tokens or 0
    if least > most:
        message = f"`min_tokens` must be from 0 to max_tokens ({most}), got {least}."
        raise bad_request(message, "min_tokens")
    return engine_pb2.StoppingParams(
        max_tokens=most,
        min_tokens=least,
        stop_token_ids=request.stop_token_ids or (),
        eos_token_ids=prompt.eos_token_ids,
        ignore_eos=bool(request.ignore_eos),
    )


def parse_open(
    request: SamplingRequest, request_id: str, prompt: Prompt
) -> tokenizer_pb2.ParseOpen:
    """What every Parse stream of this request starts with."""
    opening = tokenizer_pb2.ParseOpen(
        request_id=request_id,
        start_state=prompt.start_state,
        stop=request.stop or (),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        prompt_tail=prompt.token_ids[-64:],
    )
    if request.skip_special_tokens is not None:
        opening.skip_special_tokens = request.skip_special_tokens
    return opening
