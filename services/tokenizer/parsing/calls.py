"""Writes tool calls as JSON while they are generated."""

from __future__ import annotations

import hashlib
import secrets
import string
from dataclasses import dataclass

from services.tokenizer.parsing.coerce import coerce, json_string
from services.tokenizer.parsing.output import Output
from services.tokenizer.parsing.schema import STRING, ToolTable, Types

_ID_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 24


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """Which calls are given out.

    emit: False removes calls altogether. parallel: False keeps the first one. id_seed: where ids
    are derived from; empty draws them at random.
    """

    emit: bool = True
    parallel: bool = True
    id_seed: str = ""

    def call_id(self, index: int) -> str:
        """Return the id of the call with this index."""
        if not self.id_seed:
            return "call_" + "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))
        digest = hashlib.sha256(f"{self.id_seed}/{index}".encode()).digest()
        letters = (_ID_ALPHABET[byte % len(_ID_ALPHABET)] for byte in digest)
        return "call_" + "".join(letters)[:_ID_LENGTH]


class CallWriter:
    """The arguments of one call after the other. String values stream, others wait for their end.

    Order of use: begin, (begin_value, value_text*, end_value)*, end.
    """

    def __init__(self, output: Output, tools: ToolTable, policy: CallPolicy) -> None:
        self._output = output
        self._tools = tools
        self._policy = policy
        self._index = -1
        self._name = ""
        self._muted = True
        self._values = 0
        self._value: _Value | None = None
        self.is_open = False

    def begin(self, name: str) -> None:
        """Open a call. A call without a name is swallowed."""
        self._name, self._values, self.is_open = name, 0, True
        policy = self._policy
        self._muted = not name or not policy.emit
        self._muted = self._muted or (not policy.parallel and self._output.calls > 0)
        if not self._muted:
            call_id = policy.call_id(self._output.calls)
            self._index = self._output.open_call(call_id, name)

    def begin_value(self, key: str, *, trim: bool) -> None:
        """Open the value of a key.

        trim: one newline at the start and one at the end belong to the markup.
        """
        types = self._tools.types(self._name, key)
        streams = not types or types == STRING
        self._value = _Value(key, types, streams, trim)
        if streams:
            self._write(self._key(key) + '"')

    def value_text(self, text: str) -> None:
        """Add raw text to the open value."""
        value = self._value
        if value is None:
            return
        text = value.trimmed(text)
        if value.streams:
            self._write(json_string(text)[1:-1])
        else:
            value.pieces.append(text)

    def end_value(self) -> None:
        """Close the open value, if there is one."""
        value, self._value = self._value, None
        if value is None:
            return
        if value.streams:
            self._write('"')
        else:
            self._write(self._key(value.key) + coerce("".join(value.pieces), value.types))

    def end(self) -> None:
        """Close the open call, if there is one, with its open value."""
        if not self.is_open:
            return
        self.end_value()
        self._write("}" if self._values else "{}")
        self.is_open = False

    def cut(self) -> None:
        """Leave the open call as it is: what has been written stays, an unfinished value that
        does not stream is dropped."""
        value, self._value = self._value, None
        if value is not None and value.streams and value.newline:
            self._write("\\n")

    def _key(self, key: str) -> str:
        opening = ", " if self._values else "{"
        self._values += 1
        return f"{opening}{json_string(key)}: "

    def _write(self, text: str) -> None:
        if text and not self._muted:
            self._output.arguments(self._index, text)


class _Value:
    """An open value; with `trim` it keeps one newline back, because it may be the markup's."""

    __slots__ = ("_fresh", "_trim", "key", "newline", "pieces", "streams", "types")

    def __init__(self, key: str, types: Types, streams: bool, trim: bool) -> None:
        self.key = key
        self.types = types
        self.streams = streams
        self.pieces: list[str] = []
        self.newline = False
        self._trim = trim
        self._fresh = True

    def trimmed(self, text: str) -> str:
        """Return what of the kept newline and the new text is certainly part of the value."""
        if not self._trim or not text:
            return text
        if self._fresh:
            self._fresh = False
            text = text.removeprefix("\n")
        if not text:
            return ""
        text = "\n" + text if self.newline else text
        self.newline = text.endswith("\n")
        return text[:-1] if self.newline else text
