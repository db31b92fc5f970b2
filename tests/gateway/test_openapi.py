"""Requests made up from our OpenAPI document, against the real gateway, tokenizer and front."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.gateway.pipeline import MODEL, running_pipeline

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
EXAMPLES = 8
SCRIPT: list[dict[str, Any]] = [{"when": {}, "token_ids": [65, 66, 67]}]
# A scripted engine refuses with 501, which is documented but is a server error by its number.
REFUSED = ("/start_profile", "/stop_profile")
OPERATIONS = 28  # documented ones at least; a document that lost its routes would test nothing


@pytest.fixture(scope="module")
def schema() -> Iterator[Any]:
    """The document as a running gateway serves it."""
    with running_pipeline(SCRIPT) as pipeline:
        yield schemathesis.openapi.from_url(f"{pipeline.url}/openapi.json")


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_meets_a_server_error_or_an_undocumented_answer(
    schema: Any, mode: GenerationMode
) -> None:
    operations = [one.ok() for one in schema.get_all_operations()]
    assert len(operations) >= OPERATIONS
    for operation in operations:
        if operation.path not in REFUSED and _can_be(mode, operation):
            statuses = _check(operation, mode)
            if mode is GenerationMode.POSITIVE and "{" not in operation.path:
                assert 200 in statuses, operation.path


def _can_be(mode: GenerationMode, operation: Any) -> bool:
    """An operation without any input has no wrong input."""
    return mode is GenerationMode.POSITIVE or bool(operation.body)


def _check(operation: Any, mode: GenerationMode) -> set[int]:
    """The statuses that were seen."""
    statuses: set[int] = set()

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES if operation.body else 1,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def run(case: Any) -> None:
        case.body = _sendable(case.body)
        response = case.call(timeout=20)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    run()
    return statuses


def _sendable(value: Any) -> Any:
    """Put right what no schema says: the model's name, 1.0 as an integer, fields that need others.

    Nearly every request would be refused for one of these before anything else is looked at.
    """
    if isinstance(value, dict):
        return {key: _sendable(item) for key, item in (value | _amendments(value)).items()}
    if isinstance(value, list):
        return [item % 256 if type(item) is int else _sendable(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _amendments(fields: dict[str, Any]) -> dict[str, Any]:
    amended: dict[str, Any] = {}
    if isinstance(fields.get("model"), str):
        amended["model"] = MODEL
    if "role" in fields and fields.get("content") is None:
        amended["content"] = "x"
    if fields.get("role") != "assistant" and "tool_calls" in fields:
        amended["tool_calls"] = None
    if isinstance(fields.get("messages"), list):
        amended["messages"] = [*fields["messages"], {"role": "user", "content": "x"}]
    if fields.get("top_logprobs") is not None:
        amended |= {"logprobs": True, "top_logprobs": 2}
    if fields.get("stream_options") is not None:
        amended["stream"] = True
    if "max_tokens" in fields:
        amended["max_tokens"] = 3
    return amended


@pytest.mark.parametrize("path", REFUSED)
def test_the_profiler_is_refused_with_a_reason(schema: Any, path: str) -> None:
    response = schema[path]["POST"].Case().call()
    assert response.status_code == 501
    assert "makes no traces" in response.json()["error"]["message"]
