"""Bodies and SSE frames of POST /inference/v1/generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from warhorse.v1 import engine_pb2

from services.gateway.events import Ended, Event, Restarted, Update
from services.gateway.frames import DONE, OpenAiFrames
from services.gateway.generation import EventStream
from services.gateway.logprobs import TokenNames, chat_entries, prompt_entries
from services.gateway.usage import usage_body


@dataclass(frozen=True, slots=True)
class TokenOptions:
    """Resolved output options."""

    request_id: str
    logprobs: bool
    prompt_logprobs: bool
    include_usage: bool


@dataclass(slots=True)
class _Output:
    """What one choice has that was not sent yet."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[engine_pb2.TokenLogprob] = field(default_factory=list)
    ended: Ended | None = None


class _Writer(OpenAiFrames):
    def __init__(self, options: TokenOptions, stream: EventStream) -> None:
        self._options = options
        self._stream = stream
        self._names = TokenNames(stream.tokenizers, as_ids=True)
        self._outputs = {i: _Output() for g in stream.generations for i in g.plan.choices}

    def _take(self, event: Event) -> None:
        match event:
            case Update():
                self._outputs[event.choice].token_ids.extend(event.token_ids)
                self._outputs[event.choice].logprobs.extend(event.logprobs)
            case Ended():
                self._outputs[event.choice].ended = event
            case Restarted(choices):
                self._outputs.update({i: _Output() for i in choices})

    async def _choice(self, index: int) -> dict[str, Any]:
        """What choice `index` has now; it is then as if it had been sent."""
        output, self._outputs[index] = self._outputs[index], _Output()
        shown = None
        if self._options.logprobs:
            shown = {"content": await chat_entries(self._names, output.logprobs)}
        return {
            "index": index,
            "token_ids": output.token_ids,
            "logprobs": shown,
            "finish_reason": output.ended.finish_reason if output.ended else None,
            "stop_reason": output.ended.stop_reason if output.ended else None,
        }


class TokenStreamWriter(_Writer):
    """A frame per update and choice, then usage where it was asked for."""

    async def feed(self, events: Sequence[Event]) -> bytes:
        """Frames for a batch of events."""
        frames = []
        for event in events:
            self._take(event)
            if isinstance(event, Update | Ended):
                frames.append(self._frame({"choices": [await self._choice(event.choice)]}))
        return b"".join(frames)

    async def finish(self) -> bytes:
        """Usage, when asked for, and the end mark."""
        if not self._options.include_usage:
            return DONE
        usage = usage_body(self._stream.usage(), reasoning=False)
        return self._frame({"choices": [], "usage": usage}) + DONE

    def _frame(self, body: dict[str, Any]) -> bytes:
        return b"data: " + orjson.dumps({"request_id": self._options.request_id, **body}) + b"\n\n"


class TokenBodyWriter(_Writer):
    """Collects all events and writes one JSON body at the end."""

    async def feed(self, events: Sequence[Event]) -> bytes:
        """Collect; nothing is sent before the end."""
        for event in events:
            self._take(event)
        return b""

    async def finish(self) -> bytes:
        """The whole body."""
        body: dict[str, Any] = {
            "request_id": self._options.request_id,
            "choices": [await self._choice(index) for index in list(self._outputs)],
            "usage": usage_body(self._stream.usage(), reasoning=False),
        }
        if self._options.prompt_logprobs:
            report = self._stream.generations[0].report
            body["prompt_logprobs"] = await prompt_entries(self._names, report.logprobs)
        return orjson.dumps(body)
