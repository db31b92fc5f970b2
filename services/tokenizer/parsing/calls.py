"""Writes tool calls as JSON while they are generated."""

from __future__ import annotations

import hashlib
import secrets
import string
from dataclasses import dataclass

from services.tokenizer.parsing.coerce import (
    coerce,
    coerce_json,
    json_object_text,
    json_string,
    only_value,
)
from services.tokenizer.parsing.output import Output
from services.tokenizer.parsing.schema import STRING, ToolTable, Types

_ID_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 24
# Keys under which models put all arguments together; undone where the tool declares no such key.
_WRAPPERS = ("arguments", "input")


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

    Order of use: begin, (begin_value, value_text*, end_value)* or whole, end. A provisional call
    is given out when it is complete, or not at all. What never reaches the client is counted.
    """

    def __init__(self, output: Output, tools: ToolTable, policy: CallPolicy) -> None:
        self._output = output
        self._tools = tools
        self._policy = policy
        self._index = -1
        self._name = ""
        self._muted = True
        self._keys: list[str] = []
        self._value: _Value | None = None
        self._pending: list[str] | None = None
        self._wrapped: tuple[str, str] | None = None
        self.is_open = False
        self.refused = 0

    def begin(self, name: str, *, provisional: bool = False) -> None:
        """Open a call. A call without a name is swallowed."""
        self._name, self._keys, self.is_open = name, [], True
        self._value = self._wrapped = self._pending = None
        policy = self._policy
        self._muted = not name or not policy.emit
        self._muted = self._muted or (not policy.parallel and self._output.calls > 0)
        self.refused += not name
        if provisional:
            self._pending = []
        elif not self._muted:
            self._announce()

    def _announce(self) -> None:
        call_id = self._policy.call_id(self._output.calls)
        self._index = self._output.open_call(call_id, self._name)

    def begin_value(
        self,
        key: str,
        *,
        trim: bool = False,
        as_json: bool = False,
        unwrap: bool = False,
    ) -> None:
        """Open the value of a key.

        trim: one newline at the start and one at the end belong to the markup. as_json: the markup
        says that the value is JSON. unwrap: an object under a key that stands for all arguments,
        and that the tool does not declare, becomes the arguments.
        """
        types = self._tools.types(self._name, key)
        wraps = unwrap and as_json and not self._keys and self._may_wrap(key)
        streams = not as_json and (not types or types == STRING)
        self._flush_wrapped()
        self._value = _Value(key, types, streams=streams, trim=trim, as_json=as_json, wraps=wraps)
        if streams:
            self._write(self._key(key) + '"')

    def _may_wrap(self, key: str) -> bool:
        return key in _WRAPPERS and not self._tools.declares(self._name, key)

    def value_text(self, text: str) -> None:
        """Add raw text to the open value."""
        value = self._value
        if value is None:
            return
        text = value.taken(text)
        if value.streams:
            self._write(json_string(text)[1:-1])
        else:
            value.pieces.append(text)

    def end_value(self, *, closed: bool = True) -> None:
        """Close the open value, if there is one.

        closed: False when its closer is missing: a newline at its end belonged to the markup.
        """
        value, self._value = self._value, None
        if value is None:
            return
        rest = value.kept_newline(closed)
        if value.streams:
            self._write(json_string(rest)[1:-1] + '"')
            return
        raw = "".join(value.pieces) + rest
        text = (coerce_json if value.as_json else coerce)(raw, value.types)
        if value.wraps and json_object_text(text) is not None:
            self._wrapped = value.key, text
        else:
            self._write(self._key(value.key) + text)

    def whole(self, text: str) -> None:
        """Take all arguments of the open call at once, as JSON; text that is no object is lost."""
        found = json_object_text(text)
        if found is None:
            self.refused += 1
            return
        only = only_value(found)
        if only is not None and self._may_wrap(only[0]) and json_object_text(only[1]) is not None:
            self._wrapped = only
            found = self._unwrapped()
            self._wrapped = None
        self._write(found[:-1].rstrip() if found[1:-1].strip() else "{")
        self._keys.append("")

    def _unwrapped(self) -> str:
        """Return the arguments that a wrapped value stands for."""
        assert self._wrapped is not None
        key, text = self._wrapped
        if self._tools.declares_all(self._name, text):
            return text
        return f"{{{json_string(key)}: {text}}}"

    def _flush_wrapped(self) -> None:
        """Another value follows the one that looked like all arguments: it was none."""
        if self._wrapped is not None:
            key, text = self._wrapped
            self._wrapped = None
            self._write(self._key(key) + text)

    def end(self, *, closed: bool = True) -> None:
        """Close the open call, if there is one, with its open value.

        closed: False when the call's own closer is missing, which a provisional call needs.
        """
        if not self.is_open:
            return
        self.end_value(closed=False)
        if self._wrapped is not None:
            self._write(self._unwrapped())
        else:
            self._write("}" if self._keys else "{}")
        self.is_open = False
        self._settle(closed)

    def _settle(self, closed: bool) -> None:
        """Give a provisional call out if it is closed, declared and has what it requires."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        declared = self._name in self._tools
        if closed and declared and self._tools.required(self._name) <= set(self._keys):
            if not self._muted:
                self._announce()
                self._write("".join(pending))
        else:
            self.refused += 1

    def cut(self) -> None:
        """Leave the open call as it is: what has been written stays, an unfinished value that
        does not stream is dropped, and so is a provisional call."""
        value, self._value = self._value, None
        if self._pending is not None:
            self._pending, self._muted = None, True
            self.refused += 1
            self.is_open = False
        elif value is not None and value.streams and value.newline:
            self._write("\\n")
        self._flush_wrapped()

    def _key(self, key: str) -> str:
        opening = ", " if self._keys else "{"
        self._keys.append(key)
        return f"{opening}{json_string(key)}: "

    def _write(self, text: str) -> None:
        if self._pending is not None:
            self._pending.append(text)
        elif text and not self._muted:
            self._output.arguments(self._index, text)


class _Value:
    """An open value. It keeps one newline back, because it may be the markup's."""

    __slots__ = (
        "_fresh",
        "_trim",
        "as_json",
        "key",
        "newline",
        "pieces",
        "streams",
        "types",
        "wraps",
    )

    def __init__(
        self, key: str, types: Types, *, streams: bool, trim: bool, as_json: bool, wraps: bool
    ) -> None:
        self.key = key
        self.types = types
        self.streams = streams
        self.as_json = as_json
        self.wraps = wraps
        self.pieces: list[str] = []
        self.newline = False
        self._trim = trim
        self._fresh = trim

    def taken(self, text: str) -> str:
        """Return what of the kept newline and the new text is certainly part of the value."""
        if not text:
            return ""
        if self._fresh:
            self._fresh = False
            text = text.removeprefix("\n")
        if not text:
            return ""
        text = "\n" + text if self.newline else text
        self.newline = text.endswith("\n")
        return text[:-1] if self.newline else text

    def kept_newline(self, closed: bool) -> str:
        """Return the newline at the end if it is part of the value."""
        return "\n" if self.newline and closed and not self._trim else ""
