"""What a family's template needs of a conversation before it can render it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.tokenizer.rendering.conversation import Conversation, Message, refuse
from services.tokenizer.rendering.efforts import NONE, refuse_effort, requested_effort


class FamilyRules(ABC):
    """The preparation of conversations for the templates of one family. Stateless."""

    # Roles that are rewritten before rendering; all families know no `developer` of their own.
    system_roles = ("system", "developer")

    def __init__(self, renamed_efforts: Mapping[str, str] | None = None) -> None:
        """renamed_efforts: other names for the efforts of requests (`efforts.effort_map`)."""
        self._renamed = dict(renamed_efforts or {})

    @abstractmethod
    def prepare(self, conversation: Conversation) -> Conversation:
        """Return the conversation as the template can take it. Raises ServiceError."""

    @abstractmethod
    def arguments(self, conversation: Conversation) -> dict[str, Any]:
        """Return the template arguments of the request, its fields and its own ones together.

        Raises ServiceError.
        """


class PlainRules(FamilyRules):
    """For templates of which nothing is known: developer messages become system messages."""

    def prepare(self, conversation: Conversation) -> Conversation:
        messages = [_as_system(message) for message in conversation.messages]
        if any(message.images for message in messages if message.role == "tool"):
            # A template that puts results in order would otherwise take their images out of it.
            messages = order_results(messages)
        return replace(conversation, messages=tuple(messages))

    def arguments(self, conversation: Conversation) -> dict[str, Any]:
        given = dict(conversation.arguments)
        effort = requested_effort(conversation, self._renamed)
        if conversation.enable_thinking is not None:
            given.setdefault("enable_thinking", conversation.enable_thinking)
        if effort is not None:
            given["reasoning_effort"] = effort
            given.setdefault("enable_thinking", effort != NONE)
        return given


class GlmRules(FamilyRules):
    """GLM-5.3: always thinks, three efforts, system messages anywhere, results in the order of
    calls."""

    efforts = {  # noqa: RUF012
        "none": "low",
        "minimal": "low",
        "low": "low",
        "medium": "high",
        "high": "high",
        "xhigh": "max",
        "max": "max",
        "ultra": "max",
    }

    def prepare(self, conversation: Conversation) -> Conversation:
        messages = [_as_system(message) for message in conversation.messages]
        return replace(conversation, messages=tuple(order_results(messages)))

    def arguments(self, conversation: Conversation) -> dict[str, Any]:
        given = dict(conversation.arguments)
        effort = requested_effort(conversation, self._renamed)
        given.pop("reasoning_effort", None)
        if effort is not None:
            if effort not in self.efforts:
                refuse_effort(effort, ", ".join(self.efforts))
            given["reasoning_effort"] = self.efforts[effort]
        return given


class QwenRules(FamilyRules):
    """Qwen3.8: one system message at the start, three efforts, results in the order of calls."""

    efforts = {  # noqa: RUF012
        "minimal": "low",
        "low": "low",
        "medium": "medium",
        "high": "xhigh",
        "xhigh": "xhigh",
        "max": "xhigh",
        "ultra": "xhigh",
    }

    def prepare(self, conversation: Conversation) -> Conversation:
        refuse_system_images(conversation.messages)
        messages = order_results(merge_system(conversation.messages))
        return replace(conversation, messages=tuple(messages))

    def arguments(self, conversation: Conversation) -> dict[str, Any]:
        given = dict(conversation.arguments)
        effort = requested_effort(conversation, self._renamed)
        given.pop("reasoning_effort", None)
        if effort is not None and effort != NONE and effort not in self.efforts:
            refuse_effort(effort, ", ".join([NONE, *self.efforts]))
        thinking = self._thinking(given.get("enable_thinking"), effort, conversation)
        if thinking is not None:
            given["enable_thinking"] = thinking
        if effort in self.efforts and thinking is not False:
            given["reasoning_effort"] = self.efforts[effort]
        return given

    @staticmethod
    def _thinking(explicit: Any, effort: str | None, conversation: Conversation) -> bool | None:
        """Return the thinking switch: a template argument wins, then the effort "none", then the
        request's field; None leaves it to the template."""
        if explicit is not None:
            if not isinstance(explicit, bool):
                raise refuse("enable_thinking must be true or false", "template_kwargs_json")
            return explicit
        return False if effort == NONE else conversation.enable_thinking


def _as_system(message: Message) -> Message:
    return replace(message, role="system") if message.role == "developer" else message


def refuse_system_images(messages: Sequence[Message]) -> None:
    """Refuse an image in a system message, naming it. Raises ServiceError."""
    for message in messages:
        if message.role in FamilyRules.system_roles and message.images:
            raise refuse("a system message takes no images", message.images[0].where)


def merge_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with every system text in one message at the start."""
    system = [m for m in messages if m.role in FamilyRules.system_roles]
    others = [m for m in messages if m.role not in FamilyRules.system_roles]
    if not system:
        return others
    texts = [text for text in ("".join(m.texts).strip() for m in system) if text]
    first = replace(system[0], role="system", parts=("\n\n".join(texts),))
    return [first if len(system) > 1 else _as_system(system[0]), *others]


def order_results(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with each run of tool results in the order of its calls.

    Templates show no ids, so the order is what ties a result to its call. A run of which an id is
    missing, unknown or repeated stays as it is.
    """
    ordered: list[Message] = []
    index = 0
    while index < len(messages):
        end = index
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        if end > index:
            calls = _calls_before(messages, index)
            ordered += _sorted_run(messages[index:end], calls)
            index = end
        else:
            ordered.append(messages[index])
            index += 1
    return ordered


def _calls_before(messages: Sequence[Message], index: int) -> list[str]:
    before = messages[index - 1] if index else None
    return [call.id for call in before.calls] if before else []


def _sorted_run(run: Sequence[Message], calls: list[str]) -> list[Message]:
    ids = [message.call_id for message in run]
    known = all(ids) and set(ids) <= set(calls)
    if not known or len(set(ids)) != len(ids) or len(set(calls)) != len(calls):
        return list(run)
    return sorted(run, key=lambda message: calls.index(message.call_id))
