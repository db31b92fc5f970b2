"""Prompts by a chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.tokenizer.images.placing import with_images
from services.tokenizer.rendering.conversation import Conversation, ImagePart, Message, refuse
from services.tokenizer.rendering.history import argument_object
from services.tokenizer.rendering.pool import RenderError, RenderPool
from services.tokenizer.rendering.prompt import Prompt, encodable
from services.tokenizer.rendering.rules import FamilyRules
from services.tokenizer.rendering.shield import Shield, ShieldExhaustedError, strings_in
from services.tokenizer.vocabulary import Segment, Vocabulary


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template's text. `takes_parts`: it reads content given as a list of parts."""

    source: str
    takes_parts: bool

    @classmethod
    def of(cls, source: str) -> ChatTemplate:
        """Return a template, telling from its text whether it reads lists of parts."""
        reads_parts = re.search(r"\.text\b|\[['\"]text['\"]\]", source)
        return cls(source, bool("is string" in source and reads_parts))


class TemplateRenderer:
    """The renderer of one chat template with one checkpoint's vocabulary."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        rules: FamilyRules,
        template_variables: Mapping[str, Any],
        template: ChatTemplate,
        pool: RenderPool,
        placeholder: str | None = None,
    ) -> None:
        """template_variables: what templates see besides the request (bos_token and the like).
        pool: where the template is run. placeholder: the control token that templates write for an
        image."""
        self._vocabulary = vocabulary
        self._rules = rules
        self._variables = dict(template_variables)
        self._template = template
        self._pool = pool
        self._placeholder = placeholder

    async def render(self, conversation: Conversation) -> Prompt:
        """Return the prompt. Raises RenderError, or ServiceError for a field at fault."""
        _refuse_foreign(conversation)
        prepared = self._rules.prepare(conversation)
        context = self._context(prepared)
        try:
            shield = Shield(self._vocabulary.control, strings_in(context))
        except ShieldExhaustedError as error:
            raise refuse(str(error), "messages") from error
        sent = {**self._variables, **shield.value(context)}
        sent["add_generation_prompt"] = prepared.add_generation_prompt
        if prepared.continue_final_message:
            _mark_end(sent["messages"][-1], shield.end_mark)
        try:
            text = await self._pool.render(self._template.source, sent)
        except RenderError as error:
            raise RenderError(shield.restore(str(error)).replace(shield.end_mark, "")) from error
        if prepared.continue_final_message:
            text = _cut(text, shield.end_mark)
        return self._prompt(text, shield, prepared)

    def _prompt(self, text: str, shield: Shield, conversation: Conversation) -> Prompt:
        segments = []
        for segment in self._vocabulary.split(text):
            if not segment.is_special:
                segment = Segment(encodable(shield.restore(segment.text)), False)
            segments.append(segment)
        pieces = with_images(segments, self._placeholder, conversation.images())
        return Prompt(pieces, self._placeholder or "")

    def _context(self, conversation: Conversation) -> dict[str, Any]:
        context = self._rules.arguments(conversation)
        context["messages"] = [_as_dict(m, self._template) for m in conversation.messages]
        context["tools"] = list(conversation.tools) or None
        return context


def _refuse_foreign(conversation: Conversation) -> None:
    """Refuse what only DeepSeek's formats have."""
    if conversation.task:
        raise refuse("task is known to DeepSeek models only", "task")
    for index, message in enumerate(conversation.messages):
        if message.role == "latest_reminder":
            raise refuse(
                "the role latest_reminder is known to DeepSeek models only",
                f"messages[{index}].role",
            )


def _as_dict(message: Message, template: ChatTemplate) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message.role, "content": _content(message, template)}
    if message.reasoning:
        shown["reasoning_content"] = message.reasoning
    if message.calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": argument_object(call.arguments)},
            }
            for call in message.calls
        ]
    if message.call_id:
        shown["tool_call_id"] = message.call_id
    if message.name:
        shown["name"] = message.name
    return shown


def _content(message: Message, template: ChatTemplate) -> str | list[dict[str, str]]:
    if message.images and not template.takes_parts:
        raise refuse("the chat template takes no images", message.images[0].where)
    if message.images or (len(message.parts) > 1 and template.takes_parts):
        return [
            {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part}
            for part in message.parts
        ]
    return "\n".join(message.texts)


def _mark_end(message: dict[str, Any], mark: str) -> None:
    """Put a mark behind the last text of the message that is to be continued."""
    if message["content"] or "reasoning_content" not in message:
        content = message["content"]
        if isinstance(content, str):
            message["content"] = content + mark
        elif "text" in content[-1]:
            content[-1]["text"] += mark
        else:
            content.append({"type": "text", "text": mark})
    else:
        message["reasoning_content"] += mark


def _cut(text: str, mark: str) -> str:
    end = text.rfind(mark)
    if end < 0:
        raise RenderError("it does not write the final message, which cannot be continued")
    return text[:end]
