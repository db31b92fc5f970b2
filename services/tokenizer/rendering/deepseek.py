"""Prompts of DeepSeek V4 and V4.1, as DeepSeek's own encoder (`deepseek-recipe`) lays them out.

    BOS [effort] [system texts, tools, form of the answer]
    (<｜User｜>text | <｜Assistant｜>[<think>reasoning]</think>text EOS)*
    <｜Assistant｜>(<think>|</think>)

V4 has no token for system texts and moves them to the front; V4.1 has one and leaves them in place.
User messages and tool results that follow each other are one turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.tokenizer.rendering.conversation import Conversation, Message, PastCall, refuse
from services.tokenizer.rendering.deepseek_texts import DeepSeekTexts
from services.tokenizer.rendering.efforts import Thinking, refuse_effort, thinking_of
from services.tokenizer.rendering.prompt import Prompt, PromptBuilder
from services.tokenizer.rendering.rules import order_results, refuse_system_images
from services.tokenizer.vocabulary import Vocabulary

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, SYSTEM = "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
REMINDER = "<｜latest_reminder｜>"
THINK, THINK_END = "<think>", "</think>"
MARK = "｜DSML｜"
TASKS = ("action", "query", "authority", "domain", "title", "read_url")
# Text that V4.1 knows for grounding; the model writes it into answers.
GROUNDING = tuple(
    f"<｜{slash}{name}｜>" for name in ("ref", "box", "point", "polygon") for slash in ("", "/")
)
_SYSTEM_ROLES = ("system", "developer")
_GAP = "\n\n"
_NAMED_LEVELS = {"minimal": "low", "medium": "high", "xhigh": "high", "ultra": "max"}
_LEVELS = ("low", "high", "max")
_NUMBERS = {"low": 50, "high": 75, "max": 100}
_DEFAULT_LEVEL = "high"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What tells V4 and V4.1 apart.

    system: token of system messages; empty: their texts stand at the front. lead: what is in front
    of the words of tags. block: the word of a block of calls. bare_call: what is between the tags
    of a call without arguments. loop_keeps_reasoning: without tools in the request, the reasoning
    of calls behind the user's last message is shown. joins_empty: a user message without text is
    joined to the others of its turn all the same.
    """

    lead: str
    block: str
    bare_call: str
    system: str = ""
    loop_keeps_reasoning: bool = False
    joins_empty: bool = False

    @property
    def required(self) -> tuple[str, ...]:
        """Tokens without which no prompt can be written."""
        tokens = (BOS, EOS, USER, ASSISTANT, THINK, THINK_END)
        return (*tokens, self.system) if self.system else tokens

    def end_tag(self, word: str) -> str:
        """Return the closing tag of a word."""
        return f"</{MARK}{self.lead}{word}>"


V4 = Dialect(lead="", block="tool_calls", bare_call="\n")
V41 = Dialect(
    lead=" ",
    block="calls",
    bare_call="\n\n",
    system=SYSTEM,
    loop_keeps_reasoning=True,
    joins_empty=True,
)


class DeepSeekRenderer:
    """The renderer of one checkpoint. Immutable; safe to share."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        dialect: Dialect,
        texts: DeepSeekTexts,
        renamed_efforts: Mapping[str, str] | None = None,
        placeholder: str = "",
    ) -> None:
        """renamed_efforts: other names or numbers for the efforts of requests. placeholder: how the
        prompt's text shows an image."""
        self._vocabulary = vocabulary
        self._dialect = dialect
        self._texts = texts
        self._renamed = dict(renamed_efforts or {})
        self._placeholder = placeholder

    async def render(self, conversation: Conversation) -> Prompt:
        """Return the prompt. Raises ServiceError naming the field at fault."""
        messages = self._ordered(conversation)
        thinking = thinking_of(conversation, self._renamed)
        asked = replace(conversation, messages=tuple(messages))
        page = _Page(PromptBuilder(self._vocabulary), self._dialect, asked, thinking)
        page.out.own(BOS)
        page.begin(self._effort(thinking), self._sections(conversation))
        page.turns()
        page.end(self._task(conversation))
        return Prompt(page.out.pieces(), self._placeholder, plain=bool(conversation.task))

    def _ordered(self, conversation: Conversation) -> list[Message]:
        """Return the messages as they are shown: system texts in front, results in order."""
        messages = list(conversation.messages)
        _refuse_orphans(messages)
        refuse_system_images(messages)
        if self._dialect.system:
            messages = _without_repeated_reminders(m for m in messages if not _is_blank(m))
        else:
            messages = _system_in_front(messages)
        return order_results(messages)

    def _effort(self, thinking: Thinking) -> tuple[str, str, str]:
        """Return the text of the effort: the format's, the number, the format's."""
        if not thinking.enabled:
            return "", "", ""
        name = _DEFAULT_LEVEL if thinking.effort is None else thinking.effort
        level = _NAMED_LEVELS.get(name, name)
        efforts = self._texts.efforts
        if efforts is None:
            return DeepSeekTexts.filled(self._texts.effort, str(_number(level)))
        if level not in efforts:
            refuse_effort(name, ", ".join(["none", *sorted([*_NAMED_LEVELS, *_LEVELS])]))
        return efforts[level], "", ""

    def _sections(self, conversation: Conversation) -> list[tuple[str, str, str]]:
        """Return the sections about tools and the form of the answer."""
        sections = []
        if conversation.tools:
            schemas = "\n".join(_schema(tool["function"]) for tool in conversation.tools)
            sections.append(DeepSeekTexts.filled(self._texts.tools, schemas))
        form = conversation.response_format
        if form is not None and form["type"] == "json_object" and self._texts.json_object:
            sections.append((self._texts.json_object, "", ""))
        elif form is not None:
            shown = (form.get("json_schema") or {}).get("schema", {})
            schema = shown if form["type"] == "json_schema" else {"type": "json_object"}
            sections.append(DeepSeekTexts.filled(self._texts.response_format, _json(schema)))
        return sections

    def _task(self, conversation: Conversation) -> str:
        task = conversation.task
        if not task:
            return ""
        token = f"<｜{task}｜>"
        if task not in TASKS or token not in self._vocabulary.control:
            known = ", ".join(t for t in TASKS if f"<｜{t}｜>" in self._vocabulary.control)
            raise refuse(f"task must be one of {known or 'none'}; got {task[:64]!r}", "task")
        if conversation.messages[-1].role != "user":
            raise refuse("task needs a user message at the end", "task")
        return token


@dataclass(slots=True)
class _Page:
    """One prompt while it is written."""

    out: PromptBuilder
    dialect: Dialect
    conversation: Conversation
    thinking: Thinking
    last_user: int = field(default=-1, init=False)
    _users_have_text: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        messages = self.conversation.messages
        users = [i for i, message in enumerate(messages) if message.role == "user"]
        self.last_user = users[-1] if users else -1

    def begin(self, effort: tuple[str, str, str], sections: Sequence[tuple[str, str, str]]) -> None:
        """Write what is in front of the first turn, the first system message with it."""
        first = self.conversation.messages[0] if self.conversation.messages else None
        leads = first is not None and first.role in _SYSTEM_ROLES
        if self.dialect.system and (any(effort) or sections or leads):
            self.out.own(self.dialect.system)
        self._filled(effort)
        if first is not None and leads:
            self.out.parts(first.parts, _GAP)
        for section in sections:
            self._filled(section)

    def _filled(self, text: tuple[str, str, str]) -> None:
        before, value, behind = text
        self.out.own(before)
        self.out.foreign(value)
        self.out.own(behind)

    def turns(self) -> None:
        """Write all messages but a system message at the front."""
        messages = self.conversation.messages
        before = ""
        for index, message in enumerate(messages):
            match message.role:
                case "system" | "developer" if index:
                    self.out.own(self.dialect.system)
                    self.out.parts(message.parts, _GAP)
                case "user" | "tool":
                    self._user(message, before)
                case "latest_reminder":
                    self.out.own(REMINDER)
                    self.out.parts(message.parts, _GAP)
                case "assistant":
                    self._assistant(message, index)
            before = message.role

    def _user(self, message: Message, before: str) -> None:
        """Write a user message or a tool result; `before` is the role in front of it."""
        has_text = _has_text(message)
        if before not in ("user", "tool"):
            self.out.own(USER)
        elif before == "tool" or self.dialect.joins_empty or (has_text and self._users_have_text):
            self.out.own(_GAP)
        self._users_have_text = has_text or (before == "user" and self._users_have_text)
        if message.role == "tool":
            self.out.own("<tool_result>")
        self.out.parts(message.parts, _GAP)
        if message.role == "tool":
            self.out.own("</tool_result>")

    def _assistant(self, message: Message, index: int) -> None:
        last = index == len(self.conversation.messages) - 1
        continued = last and self.conversation.continue_final_message
        self.out.own(ASSISTANT)
        if self._shows_reasoning(message, index, continued):
            self.out.own(THINK)
            self.out.foreign(message.reasoning)
            if continued and not _has_text(message):
                return
        self.out.own(THINK_END)
        self.out.parts(message.parts, _GAP)
        if message.calls:
            self._calls(message.calls)
        if not continued:
            self.out.own(EOS)

    def _shows_reasoning(self, message: Message, index: int, continued: bool) -> bool:
        """Whether a turn is shown with its reasoning, be it empty."""
        if not self.thinking.enabled:
            return False
        if continued or self.conversation.tools:
            return True
        loops = bool(message.calls) and index > self.last_user
        return loops and self.dialect.loop_keeps_reasoning and bool(message.reasoning)

    def _calls(self, calls: Sequence[PastCall]) -> None:
        dialect, out = self.dialect, self.out
        out.own(f"{_GAP}<{MARK}{dialect.lead}{dialect.block}>\n")
        for call in calls:
            out.own(f'<{MARK}{dialect.lead}invoke name="')
            out.foreign(call.name)
            out.own('">')
            self._parameters(call.arguments)
            out.own(dialect.end_tag("invoke") + "\n")
        out.own(dialect.end_tag(dialect.block))

    def _parameters(self, arguments: str) -> None:
        values = _values(arguments)
        if not values:
            self.out.own(self.dialect.bare_call)
            return
        self.out.own("\n")
        for key, value in values.items():
            is_text = isinstance(value, str)
            self.out.own(f'<{MARK}{self.dialect.lead}parameter name="')
            self.out.foreign(key)
            self.out.own(f'" string="{"true" if is_text else "false"}">')
            self.out.foreign(value if is_text else _json(value))
            self.out.own(self.dialect.end_tag("parameter") + "\n")

    def end(self, task: str) -> None:
        """Write what the output follows."""
        if task and task != f"<｜{TASKS[0]}｜>":
            self.out.own(task)
        elif self.conversation.add_generation_prompt:
            self.out.own(ASSISTANT + (THINK if self.thinking.enabled else THINK_END) + task)


def _system_in_front(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with all system texts in one message at the front."""
    texts = [_GAP.join(m.texts) for m in messages if m.role in _SYSTEM_ROLES]
    others = [m for m in messages if m.role not in _SYSTEM_ROLES]
    if not texts:
        return others
    return [Message("system", (_GAP.join(text for text in texts if text),)), *others]


def _is_blank(message: Message) -> bool:
    """Whether a message is a system message that says nothing."""
    return message.role in _SYSTEM_ROLES and not _has_text(message)


def _without_repeated_reminders(messages: Iterable[Message]) -> list[Message]:
    """Return the messages with the first of each run of reminders."""
    kept: list[Message] = []
    for message in messages:
        if not (kept and message.role == kept[-1].role == "latest_reminder"):
            kept.append(message)
    return kept


def _has_text(message: Message) -> bool:
    return message.parts not in ((), ("",))


def _number(level: str) -> int:
    """Return the effort of V4.1 as its number from 1 to 100. Raises ServiceError."""
    if level in _NUMBERS:
        return _NUMBERS[level]
    if not (level.isascii() and level.isdecimal() and 1 <= int(level[:4]) <= 100):
        known = ", ".join(["none", *sorted([*_NAMED_LEVELS, *_LEVELS])])
        refuse_effort(level, f"{known}, a number from 1 to 100")
    return int(level)


def _refuse_orphans(messages: Sequence[Message]) -> None:
    """Refuse a tool result that answers no call: the format would show it as the user's words."""
    answers = False
    for index, message in enumerate(messages):
        if message.role == "tool" and not answers:
            raise refuse(
                "a tool message must follow the assistant message with its call",
                f"messages[{index}].role",
            )
        answers = bool(message.calls) or (answers and message.role == "tool")


def _schema(function: Mapping[str, Any]) -> str:
    """Return a tool as it is shown: three keys in this order, nothing else."""
    shown = {
        "name": function["name"],
        "description": function.get("description", ""),
        "parameters": function.get("parameters", {}),
    }
    return _json(shown)


def _values(arguments: str) -> dict[str, Any]:
    """Return the arguments of an earlier call; text that is no JSON object under one key."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
