"""Bodies and SSE frames of completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from services.gateway.chat_options import Envelope
from services.gateway.config import GatewayConfig
from services.gateway.events import Content, Ended, Event, Reasoning, Restarted, Update
from services.gateway.frames import DONE, OpenAiFrames
from services.gateway.generation import EventStream, Generation
from services.gateway.logprobs import CompletionLogprobs, TokenNames, prompt_entries
from services.gateway.schema.completion import CompletionRequest
from services.gateway.tokens import unpack
from services.gateway.usage import usage_body

OBJECT = "text_completion"
_dumps = orjson.dumps


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """Resolved output options of a completion request."""

    echo: bool
    logprobs: bool
    prompt_logprobs: bool
    include_usage: bool
    continuous_usage: bool
    show_tokens: bool
    tokens_as_ids: bool
    prompt_details: bool

    @classmethod
    def of(cls, request: CompletionRequest, config: GatewayConfig) -> CompletionOptions:
        """Options of `request`."""
        force_usage = config.enable_force_include_usage
        options = request.stream_options
        return cls(
            echo=bool(request.echo),
            logprobs=request.logprobs is not None,
            prompt_logprobs=request.prompt_logprobs is not None,
            include_usage=force_usage or bool(options and options.include_usage),
            continuous_usage=force_usage or bool(options and options.continuous_usage_stats),
            show_tokens=bool(request.return_token_ids),
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
            prompt_details=config.enable_prompt_tokens_details,
        )

    def usage(self, stream: EventStream) -> dict[str, Any]:
        """The `usage` object of what was generated so far."""
        return usage_body(stream.usage(), reasoning=False, details=self.prompt_details)

    @property
    def echo_logprobs(self) -> bool:
        """Whether the echoed prompt carries log-probabilities too."""
        return self.echo and self.logprobs

    @property
    def plain(self) -> bool:
        """Whether a frame carries nothing but its text."""
        return not (self.logprobs or self.show_tokens or self.continuous_usage)


@dataclass(slots=True)
class _Choice:
    """Output of one choice that was not sent yet."""

    generation: Generation
    logprobs: CompletionLogprobs
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    started: bool = False
    ended: Ended | None = None

    def take_text(self) -> str:
        text = "".join(self.texts)
        self.texts.clear()
        return text


class _Writer(OpenAiFrames):
    """What both forms share: the choices and how events are added to them."""

    def __init__(self, envelope: Envelope, options: CompletionOptions, stream: EventStream) -> None:
        self._envelope = envelope
        self._head = envelope.head(OBJECT)
        self._options = options
        self._stream = stream
        self._names = TokenNames(stream.tokenizers, as_ids=options.tokens_as_ids)
        self._choices = {i: self._new_choice(g) for g in stream.generations for i in g.plan.choices}

    def _new_choice(self, generation: Generation) -> _Choice:
        return _Choice(generation, CompletionLogprobs(self._names))

    async def _add(self, choice: _Choice, update: Update) -> None:
        if not choice.started:
            await self._start(choice)
        choice.texts.extend(p.text for p in update.pieces if isinstance(p, Content | Reasoning))
        if self._options.show_tokens:
            choice.token_ids.extend(update.token_ids)
        if self._options.logprobs:
            await choice.logprobs.add(update.logprobs)

    async def _start(self, choice: _Choice) -> None:
        """Put the echoed prompt in front."""
        choice.started = True
        if not self._options.echo:
            return
        prompt = choice.generation.plan.prompt
        choice.texts.append(prompt.text)
        if self._options.logprobs:
            await choice.logprobs.add_first(unpack(prompt.token_ids[:4])[0])
            await choice.logprobs.add(choice.generation.report.logprobs)

    async def _end(self, choice: _Choice, ended: Ended) -> None:
        if not choice.started:
            await self._start(choice)
        choice.ended = ended


class CompletionStreamWriter(_Writer):
    """One frame per update and choice; no role frame."""

    async def feed(self, events: Sequence[Event]) -> bytes:
        """Frames for a batch of events."""
        frames: list[bytes] = []
        for event in events:
            if isinstance(event, Update):
                choice = self._choices[event.choice]
                await self._add(choice, event)
                if choice.texts:
                    frames.append(self._frame(event.choice, choice))
            elif isinstance(event, Ended):
                choice = self._choices[event.choice]
                await self._end(choice, event)
                frames.append(self._frame(event.choice, choice))
        return b"".join(frames)

    async def finish(self) -> bytes:
        """Usage, when asked for, and the end mark."""
        if not self._options.include_usage:
            return DONE
        usage = _dumps(self._options.usage(self._stream))
        return self._head + b',"choices":[],"usage":' + usage + b"}\n\n" + DONE

    def _frame(self, index: int, choice: _Choice) -> bytes:
        head = self._head + b',"choices":[{"index":%d,"text":' % index
        text = _dumps(choice.take_text())
        if self._options.plain and choice.ended is None:
            return head + text + b',"logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
        logprobs = choice.logprobs.take() if choice.logprobs else None
        finish = choice.ended.finish_reason if choice.ended else None
        stop = choice.ended.stop_reason if choice.ended else None
        rest: dict[str, Any] = {"logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}
        if self._options.show_tokens:
            rest["token_ids"], choice.token_ids = choice.token_ids, []
        return head + text + b"," + _dumps(rest)[1:] + b"]" + self._usage() + b"}\n\n"

    def _usage(self) -> bytes:
        if not self._options.continuous_usage:
            return b""
        return b',"usage":' + _dumps(self._options.usage(self._stream))


class CompletionBodyWriter(_Writer):
    """Collects all events and writes one JSON body at the end."""

    async def feed(self, events: Sequence[Event]) -> bytes:
        """Collect; nothing is sent before the end."""
        for event in events:
            match event:
                case Update():
                    await self._add(self._choices[event.choice], event)
                case Ended():
                    await self._end(self._choices[event.choice], event)
                case Restarted(choices):
                    for i in choices:
                        self._choices[i] = self._new_choice(self._choices[i].generation)
        return b""

    async def finish(self) -> bytes:
        """The whole body."""
        body = self._envelope.body(OBJECT)
        body["choices"] = [await self._choice(i, c) for i, c in self._choices.items()]
        body["usage"] = self._options.usage(self._stream)
        return _dumps(body)

    async def _choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": index,
            "text": choice.take_text(),
            "logprobs": choice.logprobs.take() if self._options.logprobs else None,
            "finish_reason": choice.ended.finish_reason if choice.ended else None,
            "stop_reason": choice.ended.stop_reason if choice.ended else None,
        }
        if self._options.show_tokens:
            body["token_ids"] = choice.token_ids
            body["prompt_token_ids"] = unpack(choice.generation.plan.prompt.token_ids)
        if self._options.prompt_logprobs:
            report = choice.generation.report
            body["prompt_logprobs"] = await prompt_entries(self._names, report.logprobs)
        return body
