"""What fields of chat requests do that have no page of their own."""

from __future__ import annotations

import json
from typing import Any

from tests.gateway.conftest import MakeStack, Stack
from tests.gateway.fakes import text_reply

ODD: tuple[Any, ...] = (7, 1.5, True, [], ["x"], {}, {"a": {"b": [1]}}, "text")
# Fields of clients and of other servers that say nothing about the answer.
IGNORED = (
    *("user", "metadata", "store", "service_tier", "prediction", "modalities", "verbosity"),
    *("safety_identifier", "prompt_cache_key", "session_id", "kv_transfer_params", "vllm_xargs"),
)


async def test_fields_that_say_nothing_take_any_value(stack: Stack) -> None:
    prompt = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
    for path in ("/v1/chat/completions", "/v1/completions"):
        stack.engine.requests.clear()
        for value in ODD:
            answer = await stack.http.post(path, json={**prompt, **dict.fromkeys(IGNORED, value)})
            assert answer.status_code == 200, answer.text
        sizes = {request.ByteSize() for request in stack.engine.requests}
        assert len(sizes) == 1, "nothing of them reaches the engine"


async def test_a_response_is_sampled_as_a_chat_completion_is(stack: Stack) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.25, "seed": 3, "priority": 2,
        "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "stop": ["x"],
        "cache_salt": "s", "logit_bias": {"3": 1}, "ignore_eos": True, "min_tokens": 2,
        "stop_token_ids": [5], "allowed_token_ids": [1, 2], "bad_words": ["b"],
        "truncate_prompt_tokens": 3, "truncation_side": "right", "include_stop_str_in_output": True,
    }  # fmt: skip
    await stack.chat(**fields, max_tokens=9)
    body = {"input": "Hi", "max_output_tokens": 9, **fields}
    answer = await stack.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    for sent in (stack.engine.requests, stack.tokenizer.openings):
        for one in sent:
            one.request_id = ""
            if hasattr(one, "client_request_id"):
                one.client_request_id = ""
        assert sent[0] == sent[1]


async def test_special_tokens_are_shown_on_request(stack: Stack) -> None:
    for value in (True, False, None):
        await stack.chat(skip_special_tokens=value, spaces_between_special_tokens=value)
        opening = stack.tokenizer.openings[-1]
        assert opening.HasField("skip_special_tokens") == (value is not None)
        assert opening.skip_special_tokens == bool(value)


async def test_template_arguments_are_merged_over_those_of_the_server(
    make_stack: MakeStack,
) -> None:
    defaults = {"a": 1, "b": 1, "enable_thinking": False, "reasoning_effort": "low"}
    stack = await make_stack(default_chat_template_kwargs=json.dumps(defaults))
    await stack.chat(chat_template_kwargs={"b": 2, "c": 3}, reasoning_effort="high")
    sent = stack.tokenizer.renders[-1]
    assert json.loads(sent.template_kwargs_json) == {"a": 1, "b": 2, "c": 3}
    assert (sent.enable_thinking, sent.reasoning_effort) == (False, "high")


async def test_template_of_a_request_is_used_where_it_is_trusted(make_stack: MakeStack) -> None:
    stack = await make_stack(trust_request_chat_template=True)
    assert (await stack.chat(chat_template="{{ messages }}")).status_code == 200
    assert stack.tokenizer.renders[-1].chat_template == "{{ messages }}"


async def test_every_role_and_kind_of_text_reaches_the_renderer(stack: Stack) -> None:
    roles = ("developer", "system", "user", "latest_reminder")
    kinds = ({"type": "text", "text": "a"}, {"type": "input_text", "text": "b"})
    refusal = {"type": "refusal", "refusal": "no"}
    messages = [{"role": role, "content": list(kinds)} for role in roles]
    messages.append({"role": "assistant", "content": [refusal]})
    assert (await stack.chat(messages=messages)).status_code == 200
    sent = stack.tokenizer.renders[-1].messages
    assert [m.role for m in sent] == [*roles, "assistant"]
    assert [p.text for p in sent[0].content] == ["a", "b"] and sent[-1].content[0].text == "no"


async def test_a_stop_string_is_kept_on_request(stack: Stack) -> None:
    for kept in (True, False, None):
        await stack.chat(stop="x", include_stop_str_in_output=kept)
        opening = stack.tokenizer.openings[-1]
        assert (list(opening.stop), opening.include_stop_str_in_output) == (["x"], bool(kept))


async def test_only_the_first_call_is_kept_without_parallel_calls(stack: Stack) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    for value in (True, False, None):
        await stack.chat(tools=[tool], parallel_tool_calls=value)
        assert stack.tokenizer.openings[-1].parallel_tool_calls == (value is not False)


async def test_sampling_fields_of_the_least_common_kind_reach_the_engine(stack: Stack) -> None:
    stack.engine.replies = [text_reply("Hello!")]
    await stack.chat(top_k=5, min_p=0.25, repetition_penalty=1.5, seed=-3, top_p=0.5, n=2)
    sent = stack.engine.requests[-1]
    assert (sent.sampling.top_k, sent.sampling.min_p, sent.sampling.top_p) == (5, 0.25, 0.5)
    assert (sent.sampling.repetition_penalty, sent.sampling.seed, sent.n) == (1.5, -3, 2)
