"""The body of a chat completion that is not streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from warhorse.v1 import engine_pb2

from services.gateway.chat_options import ChatOptions, Envelope
from services.gateway.events import (
    CallArguments,
    CallOpened,
    Content,
    Ended,
    Event,
    Piece,
    Reasoning,
    Restarted,
    Update,
)
from services.gateway.frames import OpenAiFrames
from services.gateway.generation import EventStream
from services.gateway.logprobs import TokenNames, chat_entries, prompt_entries


class _Collected:
    """Output of one choice so far."""

    def __init__(self, options: ChatOptions) -> None:
        self.policy = options.policy()
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.arguments: list[list[str]] = []
        self.token_ids: list[int] = []
        self.logprobs: list[engine_pb2.TokenLogprob] = []
        self.ended: Ended | None = None

    def add(self, pieces: list[Piece]) -> None:
        """Append pieces in order."""
        for piece in pieces:
            match piece:
                case Content(text):
                    self.content.append(text)
                case Reasoning(text):
                    self.reasoning.append(text)
                case CallArguments(_, text):
                    self.arguments[-1].append(text)
                case CallOpened(_, call_id, name):
                    function = {"name": name, "arguments": ""}
                    self.calls.append({"id": call_id, "type": "function", "function": function})
                    self.arguments.append([])

    def tool_calls(self) -> list[dict[str, Any]]:
        """Calls with their joined arguments."""
        for call, pieces in zip(self.calls, self.arguments, strict=True):
            call["function"]["arguments"] = "".join(pieces)
        return self.calls


class ChatBodyWriter(OpenAiFrames):
    """Collects all events and writes one JSON body at the end."""

    def __init__(self, envelope: Envelope, options: ChatOptions, stream: EventStream) -> None:
        self._envelope = envelope
        self._options = options
        self._stream = stream
        self._names = TokenNames(stream.tokenizers, as_ids=options.tokens_as_ids)
        self._choices = {i: _Collected(options) for g in stream.generations for i in g.plan.choices}

    async def feed(self, events: Sequence[Event]) -> bytes:
        """Collect; nothing is sent before the end."""
        for event in events:
            match event:
                case Update():
                    self._update(self._choices[event.choice], event)
                case Ended():
                    choice = self._choices[event.choice]
                    choice.ended = event
                    choice.add(choice.policy.flush())
                case Restarted(choices):
                    self._choices.update({i: _Collected(self._options) for i in choices})
        return b""

    def _update(self, choice: _Collected, update: Update) -> None:
        choice.add(choice.policy.apply(update.pieces))
        if self._options.show_tokens:
            choice.token_ids.extend(update.token_ids)
        if self._options.show_logprobs:
            choice.logprobs.extend(update.logprobs)

    async def finish(self) -> bytes:
        """The whole body."""
        body = self._envelope.body("chat.completion")
        body["choices"] = [await self._choice(i, c) for i, c in self._choices.items()]
        body["usage"] = self._options.usage(self._stream)
        body["service_tier"] = None
        generation = self._stream.generations[0]
        body.update(self._options.prompt_fields(generation.plan.prompt))
        if generation.plan.request.output.HasField("prompt_logprobs"):
            body["prompt_logprobs"] = await prompt_entries(self._names, generation.report.logprobs)
        return orjson.dumps(body)

    async def _choice(self, index: int, choice: _Collected) -> dict[str, Any]:
        logprobs = None
        if self._options.show_logprobs:
            logprobs = {"content": await chat_entries(self._names, choice.logprobs)}
        body: dict[str, Any] = {
            "index": index,
            "message": self._message(choice),
            "logprobs": logprobs,
            "finish_reason": choice.ended.finish_reason if choice.ended else None,
            "stop_reason": choice.ended.stop_reason if choice.ended else None,
        }
        if self._options.show_tokens:
            body["token_ids"] = choice.token_ids
        return body

    def _message(self, choice: _Collected) -> dict[str, Any]:
        calls = choice.tool_calls()
        content = self._options.echo + "".join(choice.content)
        message: dict[str, Any] = {
            "role": self._options.role,
            "content": None if calls and not content else content,
            "refusal": None,
        }
        reasoning = "".join(choice.reasoning) or None
        field = self._options.reasoning_field
        names = ("reasoning", "reasoning_content") if field == "both" else (field,)
        message.update(dict.fromkeys(names, reasoning))
        if calls:
            message["tool_calls"] = calls
        return message
