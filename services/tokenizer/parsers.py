"""Makes parse sessions: which parser, which markers, which start, for one choice."""

from __future__ import annotations

from collections.abc import Sequence

from warhorse.v1 import tokenizer_pb2

from services.common.errors import StartupError
from services.tokenizer.detokenizer import Detokenizer
from services.tokenizer.folder import TokenizerFolder
from services.tokenizer.parsing import registry
from services.tokenizer.parsing.calls import CallPolicy
from services.tokenizer.parsing.parser import (
    THINK_CLOSE,
    THINK_OPEN,
    ParserSetup,
    StreamParser,
)
from services.tokenizer.parsing.registry import NONE, ParserNames, UnknownParserError
from services.tokenizer.parsing.schema import ToolTable
from services.tokenizer.rendering.conversation import json_object, refuse
from services.tokenizer.session import (
    ParseSession,
    PlainText,
    StopSetup,
    Treatment,
    treatments,
)
from services.tokenizer.wire import unpack_ids

MAX_STOPS = 256
MAX_STOP_CHARS = 4096

Treatments = dict[int, tuple[Treatment, str]]


def parsers_of(folder: TokenizerFolder, tools: str, reasoning: str) -> ParserNames:
    """Return the parsers to use with a checkpoint.

    tools, reasoning: names asked for; empty means what the checkpoint says. Raises StartupError
    for an unknown name.
    """
    template = folder.template or ""
    vocabulary = folder.vocabulary.control
    shows = folder.dialect is not None or THINK_OPEN in template
    thinks = shows and THINK_CLOSE in vocabulary
    found = folder.family.parsers
    if found == ParserNames() and "<function=" in template:
        found = ParserNames("qwen3", "qwen3_xml")
    elif found == ParserNames() and thinks:
        found = ParserNames("qwen3", NONE)
    try:
        return ParserNames(
            registry.reasoning_parser(reasoning or (found.reasoning if thinks else NONE)),
            registry.tool_parser(tools or found.tools),
        )
    except UnknownParserError as error:
        raise StartupError(str(error)) from error


class SessionFactory:
    """Opens parse sessions with one checkpoint. Safe to share; sessions are independent."""

    def __init__(
        self, folder: TokenizerFolder, defaults: ParserNames, *, strict: bool = False
    ) -> None:
        """strict: no call is made of broken markup."""
        self._strict = strict
        self._folder = folder
        self._vocabulary = folder.vocabulary
        self._defaults = defaults
        self._shown = registry.markup_texts() | set(folder.family.shown)
        self._treatments: dict[tuple[frozenset[str], bool], Treatments] = {}
        control = folder.vocabulary.control
        self._think_open = control.get(THINK_OPEN, -1)

    def open(self, message: tokenizer_pb2.ParseOpen) -> ParseSession:
        """Start a choice. Raises ServiceError naming the field at fault."""
        tail = unpack_ids(message.prompt_tail, "prompt_tail")
        stop = StopSetup(_stops(message), message.include_stop_str_in_output)
        skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
        detokenizer = Detokenizer(self._vocabulary, tail)
        named = message.tool_choice == tokenizer_pb2.TOOL_CHOICE_NAMED
        if message.start_state == tokenizer_pb2.PARSE_STATE_TEXT:
            table = self._table(frozenset(), skip, message.hidden_token_ids)
            return ParseSession(detokenizer, PlainText(), table, stop)
        names = self._names(message)
        grammar = registry.grammar(names.tools)
        markers = {THINK_OPEN, THINK_CLOSE} if names.reasoning != NONE else set()
        markers.update(grammar.specials if grammar else ())
        by_id = frozenset(markers & self._vocabulary.control.keys())
        setup = self._setup(message, names, tail, by_id)
        table = self._table(by_id, skip, message.hidden_token_ids)
        return ParseSession(detokenizer, StreamParser(setup, grammar), table, stop, named=named)

    def _names(self, message: tokenizer_pb2.ParseOpen) -> ParserNames:
        names, field = self._defaults, "reasoning_parser"
        try:
            reasoning = registry.reasoning_parser(message.reasoning_parser or names.reasoning)
            field = "tool_call_parser"
            tools = registry.tool_parser(message.tool_call_parser or names.tools)
        except UnknownParserError as error:
            raise refuse(str(error), field) from error
        return ParserNames(reasoning, tools)

    def _setup(
        self,
        message: tokenizer_pb2.ParseOpen,
        names: ParserNames,
        tail: Sequence[int],
        by_id: frozenset[str],
    ) -> ParserSetup:
        parallel = message.parallel_tool_calls if message.HasField("parallel_tool_calls") else True
        emit = bool(message.tools) and message.tool_choice != tokenizer_pb2.TOOL_CHOICE_NONE
        in_reasoning = message.start_state == tokenizer_pb2.PARSE_STATE_REASONING
        return ParserSetup(
            _tool_table(message.tools),
            CallPolicy(emit, parallel, message.call_id_seed),
            reasoning=names.reasoning != NONE,
            starts_in_reasoning=in_reasoning,
            continues_reasoning=in_reasoning and self._reasoning_has_text(tail),
            by_id=by_id,
            strict=self._strict,
        )

    def _reasoning_has_text(self, tail: Sequence[int]) -> bool:
        """Return whether the prompt goes on behind its `<think>`. An empty tail does not say."""
        behind: list[int] = []
        for token_id in reversed(tail):
            if token_id == self._think_open:
                break
            behind.append(token_id)
        text = self._vocabulary.decode(behind, skip_special=False)
        return bool(text.strip())

    def _table(
        self, markers: frozenset[str], skip_special: bool, hidden: Sequence[int]
    ) -> Treatments:
        """Return the treatment of all added and hidden tokens; shared when nothing is special
        about this request."""
        key = markers, skip_special
        table = self._treatments.get(key)
        if table is None:
            table = treatments(self._vocabulary, markers, self._shown, skip_special=skip_special)
            for token_id in self._folder.stop_token_ids:
                table[token_id] = (Treatment.DROP, "")
            self._treatments[key] = table
        if not hidden:
            return table
        return table | dict.fromkeys(hidden, (Treatment.DROP, ""))


def _stops(message: tokenizer_pb2.ParseOpen) -> tuple[str, ...]:
    if len(message.stop) > MAX_STOPS:
        raise refuse(f"stop takes at most {MAX_STOPS} strings, got {len(message.stop)}", "stop")
    for index, stop in enumerate(message.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise refuse(
                f"stop[{index}] must have 1 to {MAX_STOP_CHARS} characters, got {len(stop)}",
                f"stop[{index}]",
            )
    return tuple(message.stop)


def _tool_table(tools: Sequence[tokenizer_pb2.Tool]) -> ToolTable:
    texts: dict[str, str] = {}
    for index, tool in enumerate(tools):
        if tool.parameters_json:
            json_object(tool.parameters_json, f"tools[{index}].parameters_json")
        texts[tool.name] = tool.parameters_json
    return ToolTable(texts)


def start_state(
    ids: Sequence[int], folder: TokenizerFolder, names: ParserNames
) -> tokenizer_pb2.ParseState:
    """Return where the output of a prompt begins, told from its last turn alone."""
    if names.reasoning == NONE:
        return tokenizer_pb2.PARSE_STATE_CONTENT
    control = folder.vocabulary.control
    boundaries = {control[text] for text in folder.family.boundaries if text in control}
    opener, closer = control.get(THINK_OPEN), control.get(THINK_CLOSE)
    for token_id in reversed(ids):
        if token_id == opener:
            return tokenizer_pb2.PARSE_STATE_REASONING
        if token_id == closer or token_id in boundaries:
            break
    return tokenizer_pb2.PARSE_STATE_CONTENT
