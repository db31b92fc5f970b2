"""How a chat response looks: what the request's output fields ask for, and its fixed head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from services.gateway.config import GatewayConfig
from services.gateway.generation import EventStream
from services.gateway.pieces import ReasoningPolicy
from services.gateway.plan import Prompt
from services.gateway.schema.chat import ChatRequest
from services.gateway.tokens import unpack
from services.gateway.usage import usage_body


@dataclass(frozen=True, slots=True)
class Envelope:
    """Fields that are equal in every frame of a response."""

    id: str
    created: int  # seconds since 1970
    model: str
    fingerprint: str

    def body(self, kind: str) -> dict[str, Any]:
        """The fields as an object of type `kind`."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def head(self, kind: str) -> bytes:
        """The beginning of an SSE frame: an object that is still open."""
        return b"data: " + orjson.dumps(self.body(kind))[:-1]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Resolved output options of a chat request."""

    reasoning_field: str
    role: str
    prompt_details: bool
    include_reasoning: bool
    separate_reasoning: bool
    hold_reasoning: bool
    include_usage: bool
    continuous_usage: bool
    show_logprobs: bool
    show_tokens: bool
    show_prompt_text: bool
    tokens_as_ids: bool
    echo: str = ""  # text in front of the answer

    @classmethod
    def of(cls, request: ChatRequest, config: GatewayConfig) -> ChatOptions:
        """Options of `request`. Hidden reasoning also hides what would give it away."""
        force_usage = config.enable_force_include_usage
        options = request.stream_options
        include = request.include_reasoning is not False
        return cls(
            reasoning_field=config.reasoning_field,
            role=config.response_role,
            prompt_details=config.enable_prompt_tokens_details,
            include_reasoning=include,
            separate_reasoning=request.separate_reasoning is not False,
            hold_reasoning=request.stream_reasoning is False,
            include_usage=force_usage or bool(options and options.include_usage),
            continuous_usage=force_usage or bool(options and options.continuous_usage_stats),
            show_logprobs=bool(request.logprobs) and include,
            show_tokens=bool(request.return_token_ids) and include,
            show_prompt_text=bool(request.return_prompt_text),
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
            echo=_echo(request),
        )

    @property
    def plain(self) -> bool:
        """Whether a delta frame carries nothing but its delta."""
        return not (self.show_logprobs or self.show_tokens or self.continuous_usage)

    def usage(self, stream: EventStream) -> dict[str, Any]:
        """The `usage` object of what was generated so far."""
        return usage_body(stream.usage(), reasoning=True, details=self.prompt_details)

    def policy(self) -> ReasoningPolicy:
        """A fresh policy for one choice."""
        return ReasoningPolicy(self.include_reasoning, self.separate_reasoning, self.hold_reasoning)

    def prompt_fields(self, prompt: Prompt) -> dict[str, Any]:
        """What was asked to be shown of the prompt."""
        fields: dict[str, Any] = {}
        if self.show_tokens:
            fields["prompt_token_ids"] = unpack(prompt.token_ids)
        if self.show_prompt_text:
            fields["prompt_text"] = prompt.text
        return fields


def _echo(request: ChatRequest) -> str:
    """The text that the answer goes on with, where the request wants it in front."""
    last = request.messages[-1]
    if not request.echo or last.role != "assistant":
        return ""
    return "".join(part.plain or "" for part in last.content or ())
