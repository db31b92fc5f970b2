"""Every wrong value is refused with its field, value and range, before an engine sees it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from warhorse.v1 import common_pb2

from services.common.errors import ServiceError
from tests.gateway.conftest import Stack
from tests.gateway.fakes import Reply
from tests.gateway.vocabulary import ids

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MAX_REPLY = 2048
TOOL = {"type": "function", "function": {"name": "f"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


# path (None: both), fields, param, words of the message
INVALID: list[tuple[str | None, dict[str, Any], str, tuple[str, ...]]] = [
    (CHAT, {"messages": []}, "messages", ("non-empty", "empty list")),
    (CHAT, {"messages": None}, "messages", ("messages", "null")),
    (CHAT, {"messages": "Hi"}, "messages", ("list", '"Hi"')),
    (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role", ("required",)),
    (CHAT, {"messages": [{"role": "god", "content": "x"}]}, "messages.0.role", ("user", "god")),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content", ("required",)),
    (CHAT, {"messages": user(7)}, "messages.0.content", ("7",)),
    (CHAT, {"messages": user([{"type": "text"}])}, "messages.0.content.0.text", ("required",)),
    (CHAT, {"messages": user([{"type": "video"}])}, "messages.0.content.0.type", ("video",)),
    (CHAT, {"messages": user([IMAGE])}, "messages.0.content.0", ("not currently supported",)),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages.0.tool_calls.0.function.name",
        ("required",),
    ),
    (None, {"model": "gpt-9"}, "model", ("gpt-9", "does not exist")),
    (None, {"model": 5}, "model", ("5",)),
    (None, {"temperature": -0.1}, "temperature", ("0 to 2", "-0.1")),
    (None, {"temperature": 2.01}, "temperature", ("0 to 2", "2.01")),
    (None, {"temperature": "hot"}, "temperature", ("number", '"hot"')),
    (None, {"temperature": True}, "temperature", ("number", "true")),
    (None, {"top_p": 0}, "top_p", ("above 0", "0")),
    (None, {"top_p": 1.1}, "top_p", ("at most 1", "1.1")),
    (None, {"top_k": -2}, "top_k", ("-1", "-2")),
    (None, {"top_k": 1.5}, "top_k", ("integer", "1.5")),
    (None, {"min_p": -1}, "min_p", ("0 to 1", "-1")),
    (None, {"min_p": 1.5}, "min_p", ("0 to 1", "1.5")),
    (None, {"presence_penalty": 3}, "presence_penalty", ("-2 to 2", "3")),
    (None, {"frequency_penalty": -3}, "frequency_penalty", ("-2 to 2", "-3")),
    (None, {"repetition_penalty": 0}, "repetition_penalty", ("above 0", "0")),
    (None, {"seed": 2**63}, "seed", ("64-bit", str(2**63))),
    (None, {"seed": "x"}, "seed", ("integer", "x")),
    (None, {"n": 0}, "n", ("1 to 128", "0")),
    (None, {"n": 129}, "n", ("1 to 128", "129")),
    (None, {"n": 2, "temperature": 0}, "n", ("temperature", "2")),
    (None, {"stop": [""]}, "stop", ("empty",)),
    (None, {"stop": ["x"] * 17}, "stop", ("16", "17")),
    (None, {"stop": 5}, "stop", ("text", "5")),
    (None, {"stop": [5]}, "stop.0", ("5",)),
    (None, {"stop_token_ids": [300]}, "stop_token_ids", ("0 to 299", "300")),
    (None, {"stop_token_ids": [-1]}, "stop_token_ids.0", ("-1",)),
    (None, {"min_tokens": 9, "max_tokens": 4}, "min_tokens", ("0 to max_tokens (4)", "9")),
    (None, {"min_tokens": -1}, "min_tokens", ("0", "-1")),
    (None, {"max_tokens": -1}, "max_tokens", ("at least", "-1")),
    (None, {"max_tokens": 1.5}, "max_tokens", ("integer", "1.5")),
    (None, {"max_tokens": 511}, "max_tokens", ("maximum context length", "512", "511")),
    (CHAT, {"max_tokens": 0}, "max_tokens", ("at least 1", "0")),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", ("at least 1", "0")),
    (None, {"logit_bias": {"a": 1}}, "logit_bias", ("token ids", "object")),
    (None, {"logit_bias": {"300": 1}}, "logit_bias", ("0 to 299", "300")),
    (None, {"logit_bias": {"1": "x"}}, "logit_bias.1", ("x",)),
    (None, {"allowed_token_ids": []}, "allowed_token_ids", ("non-empty",)),
    (None, {"allowed_token_ids": [300]}, "allowed_token_ids", ("0 to 299", "300")),
    (None, {"prompt_logprobs": 21}, "prompt_logprobs", ("0 to 20", "21")),
    (None, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", ("stream",)),
    (None, {"prompt_logprobs": -1, "stream": True}, "prompt_logprobs", ("stream",)),
    (None, {"logprob_token_ids": [1]}, "logprob_token_ids", ("logprobs",)),
    (CHAT, {"logprob_token_ids": [1], "logprobs": False}, "logprob_token_ids", ("logprobs",)),
    (CHAT, {"logprob_token_ids": [300], "logprobs": True}, "logprob_token_ids", ("299", "300")),
    (TEXT, {"logprob_token_ids": [300], "logprobs": 0}, "logprob_token_ids", ("299", "300")),
    (None, {"logprob_token_ids": [1] * 129}, "logprob_token_ids", ("128",)),
    (None, {"logprob_token_ids": ["a"]}, "logprob_token_ids.0", ("a",)),
    (
        TEXT,
        {"logprob_token_ids": [1], "logprobs": 0, "echo": True, "max_tokens": 0},
        "logprob_token_ids",
        ("max_tokens",),
    ),
    (CHAT, {"logprobs": 1}, "logprobs", ("true or false", "1")),
    (CHAT, {"top_logprobs": 1}, "top_logprobs", ("logprobs",)),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", ("0 to 20", "21")),
    (TEXT, {"logprobs": 21}, "logprobs", ("0 to 20", "21")),
    (TEXT, {"logprobs": True}, "logprobs", ("integer", "true")),
    (None, {"stream": "yes"}, "stream", ("true or false", '"yes"')),
    (None, {"stream_options": {"include_usage": True}}, "stream_options", ("stream",)),
    (None, {"stream": True, "stream_options": 1}, "stream_options", ("object", "1")),
    (
        None,
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        ("1",),
    ),
    (None, {"stream_interval": 0}, "stream_interval", ("1 to 1024", "0")),
    (None, {"priority": 2**63}, "priority", ("64-bit",)),
    (None, {"priority": 1.5}, "priority", ("integer", "1.5")),
    (None, {"cache_salt": ""}, "cache_salt", ("1 to 128",)),
    (None, {"cache_salt": "a@b"}, "cache_salt", ("@", "a@b")),
    (None, {"cache_salt": "x" * 129}, "cache_salt", ("128",)),
    (None, {"request_id": "a b"}, "request_id", ("without spaces", "a b")),
    (None, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", ("at least 1", "0")),
    (None, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ("-1", "-2")),
    (None, {"truncation_side": "up"}, "truncation_side", ("left", "up")),
    (CHAT, {"tools": {}}, "tools", ("list", "object")),
    (CHAT, {"tools": [{}]}, "tools.0.function", ("required",)),
    (CHAT, {"tools": [{"function": {"name": ""}}]}, "tools.0.function.name", ('""',)),
    (CHAT, {"tools": [{"type": "web"}]}, "tools.0.type", ("function", "web")),
    (CHAT, {"tool_choice": "auto"}, "tool_choice", ("tools",)),
    (CHAT, {"tool_choice": "maybe"}, "tool_choice", ("auto", "maybe")),
    (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}},
        "tool_choice",
        ("'g'", "not in"),
    ),
    (CHAT, {"tools": [TOOL], "tool_choice": {}}, "tool_choice.function", ("required",)),
    (CHAT, {"reasoning_effort": "huge"}, "reasoning_effort", ("minimal", "huge")),
    (CHAT, {"reasoning_effort": -1}, "reasoning_effort", ("at least 0", "-1")),
    (CHAT, {"thinking": {"type": "on"}}, "thinking.type", ("enabled", "on")),
    (CHAT, {"reasoning": {"effort": "huge"}}, "reasoning.effort", ("minimal", "huge")),
    (
        CHAT,
        {"tools": [TOOL, {"function": {"name": "g", "parameters": nested(500)}}]},
        "tools.1.function.parameters",
        ("nested too deeply",),
    ),
    (
        CHAT,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": nested(500)}}],
                }
            ]
        },
        "messages.0.tool_calls.0.function.arguments",
        ("nested too deeply",),
    ),
    (
        CHAT,
        {"chat_template_kwargs": nested(500)},
        "chat_template_kwargs",
        ("nested too deeply",),
    ),
    (CHAT, {"chat_template": "x"}, "chat_template", ("switched off",)),
    (CHAT, {"chat_template_kwargs": []}, "chat_template_kwargs", ("object",)),
    (
        CHAT,
        {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
        ("both",),
    ),
    (None, {"response_format": {"type": "xml"}}, "response_format.type", ("json_schema",)),
    (
        None,
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        ("schema",),
    ),
    (None, {"structured_outputs": {}}, "structured_outputs", ("exactly one", "regex")),
    (None, {"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", ("one",)),
    (None, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", ("1 to",)),
    (
        None,
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
        ("`json` or `json_object`", "regex"),
    ),
    (
        None,
        {"structured_outputs": {"json_object": True, "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
        ("`json`", "json_object"),
    ),
    (
        None,
        {"structured_outputs": {"choice": ["a"], "whitespace_pattern": "b"}},
        "structured_outputs.whitespace_pattern",
        ("`json` or `json_object`", "choice"),
    ),
    (
        None,
        {
            "structured_outputs": {
                "json": {},
                "disable_any_whitespace": True,
                "whitespace_pattern": "b",
            }
        },
        "structured_outputs.whitespace_pattern",
        ("exclude",),
    ),
    (
        None,
        {"structured_outputs": {"json": nested(500), "disable_additional_properties": True}},
        "structured_outputs.json",
        ("nested too deeply",),
    ),
    (None, {"guided_json": 5}, "guided_json", ("object",)),
    (None, {"guided_regex": ""}, "guided_regex", ("non-empty",)),
    (None, {"guided_regex": "a", "ebnf": "b"}, "ebnf", ("together",)),
    (None, {"guided_json": {"description": "x" * 300_000}}, "guided_json", ("262144",)),
    (None, {"use_beam_search": True}, "use_beam_search", ("not currently",)),
    (None, {"length_penalty": 2}, "length_penalty", ("not currently",)),
    (None, {"bad_words": ["x", " "]}, "bad_words.1", ('" "',)),
    (None, {"bad_words": ["x"] * 129}, "bad_words", ("128",)),
    (None, {"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", ("not currently",)),
    (None, {"media_io_kwargs": {"a": 1}}, "media_io_kwargs", ("not currently",)),
    (CHAT, {"task": 5}, "task", ("quick instruction", "5")),
    (CHAT, {"thinking_token_budget": True}, "thinking_token_budget", ("integer", "true")),
    (CHAT, {"chat_template_kwargs": "x"}, "chat_template_kwargs", ("object",)),
    (None, {"return_hidden_states": True}, "return_hidden_states", ("not currently",)),
    (CHAT, {"thinking_token_budget": -2}, "thinking_token_budget", ("at least 0", "-2")),
    (TEXT, {"suffix": "x"}, "suffix", ("suffix is not currently supported",)),
    (TEXT, {"best_of": 2}, "best_of", ("not currently",)),
    (TEXT, {"prompt": ""}, "prompt", ("non-empty", '""')),
    (TEXT, {"prompt": []}, "prompt", ("non-empty", "empty list")),
    (TEXT, {"prompt": [[]]}, "prompt", ("token ids",)),
    (TEXT, {"prompt": ["a", 1]}, "prompt", ("token ids",)),
    (TEXT, {"prompt": [1.5]}, "prompt", ("token ids",)),
    (TEXT, {"prompt": [True]}, "prompt", ("token ids",)),
    (TEXT, {"prompt": None}, "prompt", ("non-empty", "null")),
    (TEXT, {"prompt": ["x"] * 1025}, "prompt", ("1024",)),
    (TEXT, {"prompt": [1, 300]}, "prompt", ("0 to 299", "300")),
    (TEXT, {"prompt": [-1]}, "prompt", ("token ids",)),
    (TEXT, {"prompt": [5] * 512}, "prompt", ("maximum context length", "512")),
]

FLAGS = (
    *("ignore_eos", "include_stop_str_in_output", "add_special_tokens", "return_token_ids"),
    *("return_tokens_as_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
)
CHAT_FLAGS = (
    *("parallel_tool_calls", "echo", "include_reasoning", "separate_reasoning"),
    *("stream_reasoning", "add_generation_prompt", "continue_final_message"),
    "return_prompt_text",
)
INVALID += [(None, {name: 1}, name, ("true or false", "1")) for name in FLAGS]
INVALID += [(CHAT, {name: "yes"}, name, ("true or false", "yes")) for name in CHAT_FLAGS]

CASES = [
    pytest.param(path, fields, param, words, id=f"{path.split('/')[2]}-{i}-{param}")
    for i, (where, fields, param, words) in enumerate(INVALID)
    for path in ([where] if where else [CHAT, TEXT])
]


def check_error(response: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    """The error object, after checks of its shape and size."""
    assert response.status_code == status, response.text
    assert len(response.content) <= MAX_REPLY
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status
    assert body["error"]["param"] == param
    return body["error"]


async def test_invalid_values_are_refused_by_field(stack: Stack) -> None:
    """All rows against one gateway, which goes on; failures are listed together."""
    failures = []
    for case in CASES:
        path, fields, param, words = case.values
        default = {"messages": user("Hi")} if path == CHAT else {"prompt": "Hi"}
        response = await stack.http.post(path, json={**default, **fields})
        try:
            error = check_error(
                response, 404 if param == "model" and words[0] != "5" else 400, param
            )
            missing = [word for word in words if word not in error["message"]]
            assert not missing, f"{missing} not in {error['message']!r}"
        except AssertionError as problem:
            failures.append(f"{case.id}: {problem}")
    assert not failures, "\n".join(failures)
    assert stack.engine.requests == []
    assert (await stack.chat()).status_code == 200


HARMLESS: list[dict[str, Any]] = [
    {"unknown_field": {"a": 1}, "user": "me", "metadata": {}, "store": True},
    {"tools": []},
    {"tools": [], "tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": None, "parallel_tool_calls": False},
    {"response_format": {"type": "text"}, "length_penalty": 1.0, "bad_words": []},
    {"kv_transfer_params": {"x": 1}, "vllm_xargs": {}, "service_tier": "auto"},
    {"prediction": {}, "verbosity": "low", "prompt_cache_key": "k", "safety_identifier": "s"},
    {"thinking_token_budget": -1, "use_beam_search": False, "model": None},
    {"temperature": None, "top_p": None, "n": None, "stop": None, "logit_bias": None},
    {"model": ""},
    {"logprob_token_ids": []},
    {"prompt_logprobs": 0, "stream": True},
    {"modalities": ["text", "audio"]},
    {"model": "fake-model", "temperature": 1, "top_p": 1},
]


async def test_harmless_fields_are_accepted(stack: Stack) -> None:
    for fields in HARMLESS:
        response = await stack.chat(**fields)
        assert response.status_code == 200, (fields, response.text)


async def test_huge_values_are_not_echoed(stack: Stack) -> None:
    for fields in (
        {"model": "m" * 100_000},
        {"stop": ["x" * 100_000] * 17},
        {"reasoning_effort": "y" * 100_000},
        {"messages": [{"role": "z" * 10_000}] * 500},
        {"messages": [{"k" * 10_000: 1}] * 500},
        {"logit_bias": {"w" * 100_000: 1}},
        {"stream_options": {"include_usage": "x" * 100_000}, "stream": True},
    ):
        response = await stack.chat(**fields)
        assert 400 <= response.status_code < 500
        assert len(response.content) <= MAX_REPLY, fields.keys()


@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [
        (common_pb2.ERROR_REASON_INVALID_FIELD, 400, "BadRequestError"),
        (common_pb2.ERROR_REASON_TEMPLATE, 400, "BadRequestError"),
        (common_pb2.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED, 400, "BadRequestError"),
        (common_pb2.ERROR_REASON_UNSUPPORTED, 501, "NotImplementedError"),
        (common_pb2.ERROR_REASON_QUEUE_FULL, 503, "Service Unavailable"),
    ],
)
async def test_refusals_of_services_keep_their_meaning(
    stack: Stack, reason: Any, status: int, kind: str
) -> None:
    stack.tokenizer.refusal = ServiceError(reason, "no such thing", field="tools")
    error = check_error(await stack.chat(), status, "tools")
    assert (error["type"], error["message"]) == (kind, "no such thing")


async def test_fields_of_the_engine_are_named_as_the_client_knows_them(stack: Stack) -> None:
    reason = common_pb2.ERROR_REASON_INVALID_FIELD
    refusal = ServiceError(reason, "too much", field="sampling.top_k")
    stack.engine.replies = [Reply([[]], error=refusal)]
    check_error(await stack.chat(), 400, "top_k")


async def test_faults_of_services_do_not_show_their_insides(stack: Stack) -> None:
    reason = common_pb2.ERROR_REASON_INTERNAL
    stack.tokenizer.refusal = ServiceError(reason, "KeyError at line 5")
    error = check_error(await stack.chat(), 500, None)
    assert "KeyError" not in json.dumps(error) and error["type"] == "InternalServerError"


async def test_the_sdk_raises_its_own_exceptions(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await stack.sdk.chat.completions.create(model="", messages=user("x"), temperature=9)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await stack.sdk.completions.create(model="nope", prompt=ids("x"))
