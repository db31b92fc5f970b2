"""Programs of other people as clients of a whole stack: what they read out of its answers is right.

Held-out questions of the trained nano model, over every interface that such programs use.
"""

from __future__ import annotations

import json
import os
import re
from itertools import islice
from typing import Any

import anthropic
import httpx
import openai
import pydantic
import pytest

from services.engine.checkpoints.nano.conversation import Conversation
from services.engine.checkpoints.nano.corpus import held_out
from tests.stack.conftest import Stack

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("idle")]

MODEL = "nano-qwen3.8-flash-next"
SUM = "What is 23 + 58?"
WEATHER = "What is the weather in Oslo?"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
ABOUT = "Get the weather of a city."
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": ABOUT, "parameters": PARAMETERS},
}
ANTHROPIC_TOOL: Any = {"name": "get_weather", "description": ABOUT, "input_schema": PARAMETERS}
GREEDY: Any = {"model": MODEL, "temperature": 0}
SETTINGS: Any = {"model": MODEL, "extra_body": {"temperature": 0}}  # of the anthropic SDK


def last_number(text: str | None) -> int:
    return int(re.findall(r"-?\d+", text or "")[-1])


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture
def claude(stack: Stack) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0, timeout=60)


class TestOpenAi:
    """Chat completions and responses through the openai SDK."""

    def test_a_streamed_answer_is_the_one_that_is_not_streamed(self, stack: Stack) -> None:
        client = stack.client()
        whole = client.chat.completions.create(messages=user(SUM), **GREEDY)
        with client.chat.completions.stream(messages=user(SUM), **GREEDY) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion()
        assert last_number(whole.choices[0].message.content) == 81
        assert streamed.choices[0].message.content == whole.choices[0].message.content

    def test_streamed_call_has_its_name_and_arguments(self, stack: Stack) -> None:
        with stack.client().chat.completions.stream(
            messages=user(WEATHER), tools=[TOOL], **GREEDY
        ) as stream:
            for _ in stream:
                pass
            (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments) == {"city": "Oslo"}

    def test_response_answers_and_goes_on_from_a_stored_one(self, stack: Stack) -> None:
        client = stack.client()
        first = client.responses.create(input=SUM, **GREEDY)
        assert last_number(first.output_text) == 81
        assert client.responses.retrieve(first.id).output_text == first.output_text
        second = client.responses.create(
            input="What is 11 + 35?", previous_response_id=first.id, **GREEDY
        )
        assert last_number(second.output_text) == 46
        assert second.usage and first.usage
        assert second.usage.input_tokens > first.usage.input_tokens

    def test_streamed_response_makes_a_call_and_reports_its_output(self, stack: Stack) -> None:
        client = stack.client()
        tool: Any = {"type": "function", **TOOL["function"], "strict": None}
        items: list[Any] = user(WEATHER)
        with client.responses.stream(input=items, tools=[tool], **GREEDY) as stream:
            names = [event.type for event in stream]
            response = stream.get_final_response()
        assert names[0] == "response.created" and names[-1] == "response.completed"
        (call,) = [item for item in response.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
        items += [item.to_dict() for item in response.output]
        items.append(
            {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
        )
        assert (
            "12 degrees" in client.responses.create(input=items, tools=[tool], **GREEDY).output_text
        )

    def test_response_is_parsed_into_a_model(self, stack: Stack) -> None:
        class Sum(pydantic.BaseModel):
            answer: int = pydantic.Field(ge=0, le=999)

        response = stack.client().responses.parse(
            input=SUM, text_format=Sum, max_output_tokens=200, **GREEDY
        )
        assert isinstance(response.output_parsed, Sum)

    def test_errors_are_the_exceptions_of_the_sdk(self, stack: Stack) -> None:
        client = stack.client()
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.chat.completions.create(model="other", messages=user(SUM))
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.chat.completions.create(messages=user("x" * 1_000_000), **GREEDY)
        with pytest.raises(openai.NotFoundError, match="no embeddings"):
            client.embeddings.create(model=MODEL, input="x")


class TestAnthropic:
    """Messages through the anthropic SDK."""

    def test_message_and_stream_give_the_same_right_answer(
        self, claude: anthropic.Anthropic
    ) -> None:
        asked: Any = {"max_tokens": 300, "messages": user(SUM), **SETTINGS}
        whole = claude.messages.create(**asked)
        assert last_number(_text(whole)) == 81
        with claude.messages.stream(**asked) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_message()
        assert _text(streamed) == _text(whole)
        assert streamed.usage.output_tokens == whole.usage.output_tokens

    @pytest.mark.parametrize("choice", ["auto", "any", "tool"])
    def test_tool_is_called_and_its_result_reported(
        self, claude: anthropic.Anthropic, choice: str
    ) -> None:
        named = {"name": "get_weather"} if choice == "tool" else {}
        asked: Any = {"max_tokens": 300, "tools": [ANTHROPIC_TOOL], **SETTINGS}
        messages = user(WEATHER)
        first = claude.messages.create(
            messages=messages, tool_choice={"type": choice, **named}, **asked
        )
        (use,) = [block for block in first.content if block.type == "tool_use"]
        assert (use.name, use.input, first.stop_reason) == (
            "get_weather",
            {"city": "Oslo"},
            "tool_use",
        )
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "12 degrees"}
        messages += [
            {"role": "assistant", "content": first.to_dict()["content"]},
            {"role": "user", "content": [result]},
        ]
        last = claude.messages.create(messages=messages, **asked)
        assert "12 degrees" in _text(last)

    def test_counted_tokens_are_those_that_a_message_uses(
        self, claude: anthropic.Anthropic
    ) -> None:
        asked: Any = {"model": MODEL, "messages": user(WEATHER), "tools": [ANTHROPIC_TOOL]}
        counted = claude.messages.count_tokens(**asked).input_tokens
        usage = claude.messages.create(max_tokens=5, **asked).usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def _text(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_langchain_binds_tools_runs_them_and_streams(stack: Stack) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        return "12 degrees"

    model = ChatOpenAI(
        base_url=f"{stack.url}/v1", api_key="none", model=MODEL, temperature=0, max_retries=0
    )  # type: ignore[arg-type]  # the keys are taken as plain text too
    assert last_number(str(model.invoke(SUM).content)) == 81
    assert last_number("".join(str(chunk.content) for chunk in model.stream(SUM))) == 81
    with_tools = model.bind_tools([get_weather])
    history: list[Any] = [HumanMessage(WEATHER)]
    answer = with_tools.invoke(history)
    (call,) = answer.tool_calls  # type: ignore[attr-defined]
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
    history += [answer, ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])]
    assert "12 degrees" in str(with_tools.invoke(history).content)


def test_litellm_answers_streams_and_calls_tools(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the network
    import litellm

    asked: Any = {
        "model": f"hosted_vllm/{MODEL}",
        "api_base": f"{stack.url}/v1",
        "api_key": "none",
        "temperature": 0,
    }
    whole = litellm.completion(messages=user(SUM), **asked)
    assert last_number(whole.choices[0].message.content) == 81
    chunks = litellm.completion(messages=user(SUM), stream=True, **asked)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert last_number(streamed) == 81
    answer = litellm.completion(messages=user(WEATHER), tools=[TOOL], **asked)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Oslo"},
    )


def test_reasoning_ends_at_its_budget_and_an_answer_follows(stack: Stack) -> None:
    def ask(budget: int) -> Any:
        return stack.client().chat.completions.create(
            messages=user(SUM),
            max_tokens=200,
            extra_body={"reasoning_effort": "high", "thinking_token_budget": budget},
            **GREEDY,
        )

    free, bounded, none = ask(-1), ask(5), ask(0)
    thought = [a.usage.completion_tokens_details.reasoning_tokens for a in (free, bounded, none)]
    assert thought[0] > 6 and thought[1] <= 6 and thought[2] <= 1, thought
    for answer in (bounded, none):
        assert answer.choices[0].finish_reason == "stop"
        assert re.search(r"\d", answer.choices[0].message.content)


def test_bad_words_are_not_written(stack: Stack) -> None:
    def ask(**fields: Any) -> str:
        answer = stack.client().chat.completions.create(
            messages=user(SUM), max_tokens=60, extra_body=fields, **GREEDY
        )
        return answer.choices[0].message.content or ""

    fields = {"reasoning_effort": "none"}
    assert "81" in ask(**fields)
    assert "81" not in ask(bad_words=["81"], **fields)


@pytest.mark.parametrize("task", ["arithmetic", "tools"])
def test_tokenize_counts_the_tokens_of_a_generation(stack: Stack, task: str) -> None:
    def body(conversation: Conversation) -> dict[str, Any]:
        fields = {"messages": conversation.openai_messages()[:-1], "model": MODEL}
        tools = {"tools": conversation.tools} if conversation.tools else {}
        return fields | tools | {"reasoning_effort": conversation.effort}

    with httpx.Client(base_url=stack.url, timeout=60) as client:
        for conversation in islice(held_out(task, 29, True), 6):
            tokens = client.post("/tokenize", json=body(conversation)).json()
            given = client.post(
                "/v1/chat/completions", json=body(conversation) | {"max_tokens": 1}
            ).json()
            assert tokens["count"] == given["usage"]["prompt_tokens"]
            alone = {"token_ids": tokens["tokens"], "sampling_params": {"max_tokens": 1}}
            native = client.post("/inference/v1/generate", json=alone).json()
            assert native["usage"]["prompt_tokens"] == tokens["count"]


def test_second_turn_finds_the_first_in_the_prefix_cache(claude: anthropic.Anthropic) -> None:
    """As a coding client works: a long system text, the same history again, one turn more."""
    manual = " ".join(f"Rule {i}: answer with {i} words." for i in range(150))
    asked: Any = {"max_tokens": 4, "system": f"{os.urandom(8).hex()} {manual}", **SETTINGS}
    first = claude.messages.create(messages=user(SUM), **asked).usage
    again = claude.messages.create(messages=user(SUM), **asked).usage
    assert first.cache_read_input_tokens == 0
    total = first.input_tokens
    assert again.input_tokens + (again.cache_read_input_tokens or 0) == total
    assert (again.cache_read_input_tokens or 0) > 0.9 * total, (again, total)
