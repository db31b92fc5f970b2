"""Conversations and their text in the family's chat format.

`render` writes what chat_template.jinja writes (a test compares the two) and marks which pieces the
model has to produce, which a template cannot say.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

EFFORT_TEXT = {"low": "Think briefly.", "medium": "", "xhigh": "Think carefully."}


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `reasoning` and `calls` belong to the assistant alone."""

    role: str  # user, assistant or tool
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of prompt text; `produced` marks what the model must write itself."""

    text: str
    produced: bool


@dataclass(slots=True)
class Conversation:
    """A whole conversation with its rendering options."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    system: str = ""
    thinking: bool = True
    effort: str = "medium"

    def openai_messages(self) -> list[dict[str, Any]]:
        """Return the messages as the chat template takes them."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + [_openai(message, self.thinking) for message in self.messages]


def _openai(message: Message, thinking: bool) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning and thinking:
        out["reasoning_content"] = message.reasoning
    if message.calls:
        out["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.calls
        ]
    return out


def call_text(call: Call) -> str:
    """Return the call in the family's markup."""
    lines = ["<tool_call>", f"<function={call.name}>"]
    for key, value in call.arguments.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"<parameter={key}>", shown, "</parameter>"]
    return "\n".join([*lines, "</function>", "</tool_call>"])


def answer_text(message: Message) -> str:
    """Return content and calls of an assistant message."""
    parts = [message.content] if message.content else []
    if message.calls:
        parts.append("\n".join(call_text(call) for call in message.calls))
    return "\n\n".join(parts)


def _system_text(conversation: Conversation) -> str:
    parts = [EFFORT_TEXT[conversation.effort]] if conversation.thinking else []
    if conversation.tools:
        listed = "".join("\n" + json.dumps(t, ensure_ascii=False) for t in conversation.tools)
        parts.append(f"# Tools\n\nYou can call these functions:\n<tools>{listed}\n</tools>")
    parts.append(conversation.system.strip())
    return "\n\n".join(part for part in parts if part)


def render(conversation: Conversation) -> list[Piece]:
    """Return the pieces of the whole conversation, in order."""
    thinking = conversation.thinking
    system = _system_text(conversation)
    prompt = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    pieces: list[Piece] = []
    previous = ""
    for message in conversation.messages:
        if previous == "tool" and message.role != "tool":
            prompt += "<|im_end|>\n"
        if message.role == "user":
            prompt += f"<|im_start|>user\n{message.content.strip()}<|im_end|>\n"
        elif message.role == "tool":
            prompt += "" if previous == "tool" else "<|im_start|>user"
            prompt += f"\n<tool_response>\n{message.content.strip()}\n</tool_response>"
        else:
            start = "<think>\n" if thinking else "<think>\n\n</think>\n\n"
            pieces.append(Piece(f"{prompt}<|im_start|>assistant\n{start}", produced=False))
            written = f"{message.reasoning}\n</think>\n\n" if thinking else ""
            pieces.append(Piece(f"{written}{answer_text(message)}<|im_end|>", produced=True))
            prompt = "\n"
        previous = message.role
    pieces.append(Piece(prompt, produced=False))
    return pieces
