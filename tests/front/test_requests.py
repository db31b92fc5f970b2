"""Every field of a request that can be wrong, as a table."""

from __future__ import annotations

import math
from typing import Any

import pytest
from warhorse.v1 import engine_pb2 as pb
from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.stage_pb2 import CoreSubmit
from warhorse.v1.tokenizer_pb2 import ImageInput

from services.common.errors import ServiceError
from services.engine.core_events import to_request
from services.engine.requests import RequestLimits, validate
from tests.front.helpers import MAX_MODEL_LEN, MODEL, VOCAB, make_request

LIMITS = RequestLimits(
    model_names=(MODEL, "alias"), vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN, max_logprobs=20
)
INVALID = ErrorReason.ERROR_REASON_INVALID_FIELD
TOO_LONG = ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED
BIAS = pb.LogitBias


def bias(*pairs: tuple[int, float]) -> list[pb.LogitBias]:
    return [BIAS(token_id=token, bias=value) for token, value in pairs]


# (field set to value, field named by the error, words of the message)
INVALID_FIELDS: list[tuple[str, Any, str, list[str]]] = [
    ("request_id", "", "request_id", ["0 characters", "1 to 256"]),
    ("request_id", "x" * 257, "request_id", ["257", "1 to 256"]),
    ("prompt_token_ids", b"", "prompt_token_ids", ["empty"]),
    ("prompt_token_ids", b"12345", "prompt_token_ids", ["5 bytes", "multiple of 4"]),
    ("cache_salt", "a@b", "cache_salt", ["128", "@"]),
    ("cache_salt", "s" * 129, "cache_salt", ["128"]),
    ("sampling.temperature", None, "sampling.temperature", ["not set", "0 to 2"]),
    ("sampling.temperature", -0.1, "sampling.temperature", ["-0.1", "0 to 2"]),
    ("sampling.temperature", 2.5, "sampling.temperature", ["2.5", "0 to 2"]),
    ("sampling.temperature", math.nan, "sampling.temperature", ["nan", "0 to 2"]),
    ("sampling.temperature", math.inf, "sampling.temperature", ["inf", "0 to 2"]),
    ("sampling.top_p", None, "sampling.top_p", ["not set"]),
    ("sampling.top_p", 0.0, "sampling.top_p", ["is 0", "above 0 up to 1"]),
    ("sampling.top_p", 1.5, "sampling.top_p", ["1.5", "above 0 up to 1"]),
    ("sampling.top_k", None, "sampling.top_k", ["not set"]),
    ("sampling.min_p", None, "sampling.min_p", ["not set"]),
    ("sampling.min_p", -1.0, "sampling.min_p", ["-1", "0 to 1"]),
    ("sampling.min_p", 1.25, "sampling.min_p", ["1.25", "0 to 1"]),
    ("sampling.presence_penalty", None, "sampling.presence_penalty", ["not set"]),
    ("sampling.presence_penalty", 2.5, "sampling.presence_penalty", ["2.5", "-2 to 2"]),
    ("sampling.frequency_penalty", None, "sampling.frequency_penalty", ["not set"]),
    ("sampling.frequency_penalty", -3.0, "sampling.frequency_penalty", ["-3", "-2 to 2"]),
    ("sampling.repetition_penalty", None, "sampling.repetition_penalty", ["not set"]),
    ("sampling.repetition_penalty", 0.0, "sampling.repetition_penalty", ["is 0", "above 0"]),
    ("sampling.repetition_penalty", math.inf, "sampling.repetition_penalty", ["inf"]),
    ("sampling.logit_bias", bias((260, 1.0)), "sampling.logit_bias[0]", ["260", "0 to 259"]),
    ("sampling.logit_bias", bias((1, math.nan)), "sampling.logit_bias[0]", ["nan", "100"]),
    (
        "sampling.logit_bias",
        bias(*((1, 0.5) for _ in range(1025))),
        "sampling.logit_bias",
        ["1025", "1024"],
    ),
    (
        "sampling.allowed_token_ids",
        [1, 300],
        "sampling.allowed_token_ids[1]",
        ["300", "0 to 259"],
    ),
    (
        "sampling.allowed_token_ids",
        [1] * 261,
        "sampling.allowed_token_ids",
        ["260 entries"],
    ),
    ("stopping.max_tokens", None, "stopping.max_tokens", ["not set", "1 or more"]),
    ("stopping.max_tokens", 0, "stopping.max_tokens", ["is 0", "1 or more"]),
    ("stopping.min_tokens", 65, "stopping.min_tokens", ["65", "64"]),
    ("stopping.stop_token_ids", [260], "stopping.stop_token_ids[0]", ["260", "0 to 259"]),
    ("stopping.stop_token_ids", [1] * 1025, "stopping.stop_token_ids", ["1025", "1024"]),
    ("stopping.eos_token_ids", [3, 999], "stopping.eos_token_ids[1]", ["999", "0 to 259"]),
    ("output.logprobs", 21, "output.logprobs", ["21", "0 to 20"]),
    ("output.logprobs", -1, "output.logprobs", ["-1", "0 to 20"]),
    ("output.logprob_token_ids", [1], "output.logprob_token_ids", ["needs output.logprobs"]),
    ("output.prompt_logprobs", 21, "output.prompt_logprobs", ["21", "0 to 20"]),
    ("output.prompt_logprobs", -2, "output.prompt_logprobs", ["-2", "0 to 20"]),
    ("n", None, "n", ["not set", "1 to 128"]),
    ("n", 0, "n", ["is 0", "1 to 128"]),
    ("n", 129, "n", ["129", "1 to 128"]),
    ("n", 2, "n", ["2", "greedy"]),
]


# ids of a request that asks for log-probabilities, field named by the error, words of the message
INVALID_SCORED = [
    ([1, 260], "output.logprob_token_ids[1]", ["260", "0 to 259"]),
    ([1] * 129, "output.logprob_token_ids", ["129", "128"]),
]


@pytest.mark.parametrize(("ids", "field", "words"), INVALID_SCORED)
def test_tokens_to_score_are_checked(ids: list[int], field: str, words: list[str]) -> None:
    error = failure(make_request(output__logprobs=0, output__logprob_token_ids=ids))
    assert (error.reason, error.field) == (INVALID, field)
    assert all(word in error.message for word in words)


def test_tokens_to_score_reach_the_core() -> None:
    request = make_request(output__logprobs=2, output__logprob_token_ids=[3, 1])
    validate(request, LIMITS)
    found = to_request(CoreSubmit(request_id="r", request=request))
    assert (found.logprobs, found.logprob_token_ids) == (2, (3, 1))


def failure(request: pb.GenerateRequest) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        validate(request, LIMITS)
    return caught.value


@pytest.mark.parametrize(("path", "value", "field", "words"), INVALID_FIELDS)
def test_invalid_field_is_named_with_value_and_range(
    path: str, value: Any, field: str, words: list[str]
) -> None:
    error = failure(make_request(**{path.replace(".", "__"): value}))
    assert error.reason == INVALID
    assert error.field == field
    for word in (field, *words):
        assert word in error.message


def test_token_outside_the_vocabulary_is_named_with_its_place() -> None:
    error = failure(make_request([0, 259, 260, 7]))
    assert (error.reason, error.field) == (INVALID, "prompt_token_ids[2]")
    assert "260" in error.message
    assert "0 to 259" in error.message


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"),
    [
        (MAX_MODEL_LEN, 1, "prompt_token_ids"),
        (MAX_MODEL_LEN - 1, 2, "stopping.max_tokens"),
        (1, MAX_MODEL_LEN, "stopping.max_tokens"),
    ],
)
def test_too_long_names_the_maximum_context_length_and_the_counts(
    prompt: int, max_tokens: int, field: str
) -> None:
    error = failure(make_request([1] * prompt, stopping__max_tokens=max_tokens))
    assert (error.reason, error.field) == (TOO_LONG, field)
    for word in ("maximum context length", str(MAX_MODEL_LEN), str(prompt + max_tokens)):
        assert word in error.message


def test_unknown_model_is_not_found() -> None:
    error = failure(make_request(model="other"))
    assert error.reason == ErrorReason.ERROR_REASON_MODEL_NOT_FOUND
    assert "other" in error.message
    assert MODEL in error.message


def test_images_are_unsupported() -> None:
    error = failure(make_request(images=[ImageInput()]))
    assert (error.reason, error.field) == (ErrorReason.ERROR_REASON_UNSUPPORTED, "images")


def edge_requests() -> list[pb.GenerateRequest]:
    return [
        make_request(),
        make_request(model="alias"),
        make_request([VOCAB - 1] * (MAX_MODEL_LEN - 1), stopping__max_tokens=1),
        make_request(sampling__temperature=2.0, n=128),
        make_request(sampling__top_p=1e-6, sampling__min_p=1.0, sampling__top_k=1 << 30),
        make_request(sampling__presence_penalty=-2.0, sampling__frequency_penalty=2.0),
        make_request(stopping__max_tokens=0, output__prompt_logprobs=0),
        make_request(stopping__min_tokens=64),
        make_request(output__logprobs=0),
        make_request(output__logprobs=20, priority=-(1 << 63)),
        make_request(sampling__seed=-(1 << 63), cache_salt="s" * 128),
    ]


@pytest.mark.parametrize("request_", edge_requests())
def test_values_at_the_edge_of_their_range_pass(request_: pb.GenerateRequest) -> None:
    before = request_.SerializeToString()
    validate(request_, LIMITS)
    assert request_.SerializeToString() == before


def test_absent_seed_is_drawn_and_bias_is_clamped() -> None:
    first = make_request(sampling__seed=None, sampling__logit_bias=bias((1, 300), (2, -math.inf)))
    second = make_request(sampling__seed=None)
    validate(first, LIMITS)
    validate(second, LIMITS)
    assert first.sampling.HasField("seed")
    assert first.sampling.seed != second.sampling.seed
    assert [b.bias for b in first.sampling.logit_bias] == [100.0, -100.0]
