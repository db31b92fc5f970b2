"""SSE frames of a streamed chat completion, from templates that are built once per choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.chat_options import ChatOptions, Envelope
from services.gateway.events import (
    CallArguments,
    CallOpened,
    Content,
    Ended,
    Event,
    Piece,
    Reasoning,
    Update,
)
from services.gateway.frames import DONE, OpenAiFrames
from services.gateway.generation import EventStream
from services.gateway.logprobs import TokenNames, chat_entries

OBJECT = "chat.completion.chunk"
_dumps = orjson.dumps
_PLAIN_TAIL = b',"logprobs":null,"finish_reason":null}]'


class _ChoiceFrames:
    """State and templates of one choice."""

    def __init__(self, envelope: Envelope, index: int, options: ChatOptions) -> None:
        self.head = envelope.head(OBJECT) + b',"choices":[{"index":%d,"delta":' % index
        self.policy = options.policy()
        self.started = False
        self.logprobs: list[dict[str, Any]] = []
        self.token_ids: list[int] = []


class ChatStreamWriter(OpenAiFrames):
    """One kind of delta per frame; log-probabilities and token ids ride on the next frame."""

    def __init__(self, envelope: Envelope, options: ChatOptions, stream: EventStream) -> None:
        self._envelope = envelope
        self._options = options
        self._stream = stream
        self._names = TokenNames(stream.tokenizers, as_ids=options.tokens_as_ids)
        self._keys = _reasoning_keys(options.reasoning_field)
        self._choices = [
            _ChoiceFrames(envelope, i, options) for g in stream.generations for i in g.plan.choices
        ]

    async def feed(self, events: Sequence[Event]) -> bytes:
        """Frames for a batch of events."""
        frames: list[bytes] = []
        for event in events:
            if isinstance(event, Update):
                await self._update(self._choices[event.choice], event, frames)
            elif isinstance(event, Ended):
                self._end(self._choices[event.choice], event, frames)
        return b"".join(frames)

    async def finish(self) -> bytes:
        """Usage, when asked for, and the end mark."""
        if not self._options.include_usage:
            return DONE
        usage = _dumps(self._options.usage(self._stream))
        head = self._envelope.head(OBJECT)
        return head + b',"choices":[],"usage":' + usage + b"}\n\n" + DONE

    async def _update(self, choice: _ChoiceFrames, update: Update, frames: list[bytes]) -> None:
        if not choice.started:
            self._start(choice, frames)
        if self._options.show_tokens:
            choice.token_ids.extend(update.token_ids)
        if update.logprobs and self._options.show_logprobs:
            choice.logprobs.extend(await chat_entries(self._names, update.logprobs))
        for piece in choice.policy.apply(update.pieces):
            self._append(choice, self._delta(piece), frames)

    def _start(self, choice: _ChoiceFrames, frames: list[bytes]) -> None:
        choice.started = True
        role, tail = _dumps(self._options.role), _PLAIN_TAIL
        if self._options.show_tokens or self._options.show_prompt_text:
            tail += self._prompt_fields()
        frames.append(
            choice.head + b'{"role":' + role + b',"content":""}' + tail + self._usage() + b"}\n\n"
        )
        if self._options.echo:
            self._append(choice, self._delta(Content(self._options.echo)), frames)

    def _prompt_fields(self) -> bytes:
        prompt = self._stream.generations[0].plan.prompt
        return b"," + _dumps(self._options.prompt_fields(prompt))[1:-1]

    def _append(self, choice: _ChoiceFrames, delta: bytes, frames: list[bytes]) -> None:
        if self._options.plain:
            frames.append(choice.head + delta + _PLAIN_TAIL + b"}\n\n")
        else:
            frames.append(choice.head + delta + self._tail(choice, b"null"))

    def _tail(self, choice: _ChoiceFrames, finish: bytes, stop: bytes = b"") -> bytes:
        """Everything after the delta: log-probabilities, finish, token ids, usage."""
        parts = [b',"logprobs":', self._take_logprobs(choice), b',"finish_reason":', finish, stop]
        if self._options.show_tokens:
            parts += [b',"token_ids":', _dumps(choice.token_ids)]
            choice.token_ids = []
        parts += [b"}]", self._usage(), b"}\n\n"]
        return b"".join(parts)

    def _take_logprobs(self, choice: _ChoiceFrames) -> bytes:
        if not choice.logprobs:
            return b"null"
        entries, choice.logprobs = choice.logprobs, []
        return _dumps({"content": entries})

    def _usage(self) -> bytes:
        if not self._options.continuous_usage:
            return b""
        return b',"usage":' + _dumps(self._options.usage(self._stream))

    def _end(self, choice: _ChoiceFrames, ended: Ended, frames: list[bytes]) -> None:
        if not choice.started:
            self._start(choice, frames)
        for piece in choice.policy.flush():
            self._append(choice, self._delta(piece), frames)
        stop = b',"stop_reason":' + _dumps(ended.stop_reason)
        frames.append(choice.head + b"{}" + self._tail(choice, _dumps(ended.finish_reason), stop))

    def _delta(self, piece: Piece) -> bytes:
        match piece:
            case Content(text):
                return b'{"content":' + _dumps(text) + b"}"
            case Reasoning(text):
                encoded = _dumps(text)
                return b"{" + b",".join(key + encoded for key in self._keys) + b"}"
            case CallArguments(index, text):
                call = b'{"index":%d,"function":{"arguments":' % index + _dumps(text) + b"}}"
            case CallOpened(index, call_id, name):
                call = _dumps(
                    {
                        "index": index,
                        "id": call_id,
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                )
        return b'{"tool_calls":[' + call + b"]}"


def _reasoning_keys(field: str) -> tuple[bytes, ...]:
    names = ("reasoning", "reasoning_content") if field == "both" else (field,)
    return tuple(b'"%s":' % name.encode() for name in names)
