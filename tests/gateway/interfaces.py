"""The three chat interfaces in one form: what to send, what a stream says, how it may end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Interface:
    """One way to ask for the same thing.

    `body` makes the body of a request with a text and a limit of tokens; `text` takes the answer's
    text out of an event, `whole` out of a body; `error` is the status that a failure names, `end`
    the last event of a stream that came to its end.
    """

    path: str
    body: Callable[[str, int], dict[str, Any]]
    text: Callable[[dict[str, Any]], str]
    whole: Callable[[dict[str, Any]], str]
    error: Callable[[dict[str, Any]], Any]
    end: Callable[[dict[str, Any]], bool]
    has_done: bool = False


@dataclass(frozen=True, slots=True)
class Stream:
    """What one stream said: its text and its events."""

    interface: Interface
    events: list[dict[str, Any]]
    done: bool

    @property
    def text(self) -> str:
        return "".join(map(self.interface.text, self.events))

    def assert_complete(self) -> None:
        """It came to its end and says so once."""
        assert sum(map(self.interface.end, self.events)) == 1, self.events[-3:]
        assert not any(map(self.interface.error, self.events))
        assert self.done is self.interface.has_done

    def assert_failed(self, error: object) -> None:
        """It ends with one error of this kind and never says that it was complete."""
        assert self.interface.error(self.events[-1]) == error, self.events[-1]
        assert not any(map(self.interface.error, self.events[:-1]))
        assert not any(map(self.interface.end, self.events))
        assert self.done is self.interface.has_done


def read_stream(interface: Interface, text: str) -> Stream:
    """Parse a stream strictly: every block is a comment or an event with data."""
    assert text.endswith("\n\n"), text[-80:]
    events: list[dict[str, Any]] = []
    done = False
    for block in text[:-2].split("\n\n"):
        assert not done, f"data after [DONE]: {block}"
        *named, data = block.split("\n")
        if data == "data: [DONE]":
            done = True
        elif not data.startswith(":"):
            event = json.loads(data.removeprefix("data: "))
            assert named in ([], [f"event: {event.get('type')}"]), block
            if event.get("type") != "ping":
                events.append(event)
    return Stream(interface, events, done)


def _chat_text(event: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


def _turns(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


CHAT = Interface(
    "/v1/chat/completions",
    body=lambda text, most: {
        "messages": _turns(text), "max_tokens": most, "reasoning_effort": "none"
    },
    text=_chat_text,
    whole=lambda body: body["choices"][0]["message"]["content"],
    error=lambda event: (event.get("error") or {}).get("code"),
    end=lambda event: any(c["finish_reason"] for c in event.get("choices", ())),
    has_done=True,
)  # fmt: skip
RESPONSES = Interface(
    "/v1/responses",
    body=lambda text, most: {
        "input": text, "max_output_tokens": most, "reasoning": {"effort": "none"}
    },
    text=lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    whole=lambda body: body["output"][0]["content"][0]["text"],
    error=lambda event: (event.get("response", {}).get("error") or {}).get("code"),
    end=lambda event: event["type"] in ("response.completed", "response.incomplete"),
)  # fmt: skip
MESSAGES = Interface(
    "/v1/messages",
    body=lambda text, most: {
        "messages": _turns(text), "max_tokens": most, "thinking": {"type": "disabled"}
    },
    text=lambda event: event.get("delta", {}).get("text", ""),
    whole=lambda body: body["content"][0]["text"],
    error=lambda event: event.get("error", {}).get("type"),
    end=lambda event: event["type"] == "message_stop",
)  # fmt: skip
INTERFACES = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
# What each of them says when a peer was lost, as HTTP 503 would be said in a stream.
LOST = {"chat": 503, "responses": "server_error", "messages": "overloaded_error"}
