"""Turns parse answers into pieces, and leaves out what a lost parser had already sent."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, field

from warhorse.v1 import tokenizer_pb2

from services.gateway.events import CallArguments, CallOpened, Content, Piece, Reasoning

_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 24
_REASONING, _CONTENT = -2, -1  # channels; the arguments of call i are channel i >= 0


def new_call_id() -> str:
    """`call_` and 24 letters or digits."""
    return "call_" + "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))


@dataclass(slots=True)
class ReplayFilter:
    """Position of one choice's output per channel (reasoning, content, arguments of each call).

    The concatenated text of a channel does not depend on how the tokens are cut into messages,
    so after `rewind` the same tokens bring the same text again and the part that was sent is
    recognised by its length alone.
    """

    _seen: dict[int, int] = field(default_factory=dict)
    _sent: dict[int, int] = field(default_factory=dict)
    _opened: set[int] = field(default_factory=set)

    def rewind(self) -> None:
        """A new parser starts from the first token."""
        self._seen.clear()

    def pieces(self, deltas: Iterable[tokenizer_pb2.Delta]) -> list[Piece]:
        """New pieces in `deltas`, in order."""
        pieces: list[Piece] = []
        for delta in deltas:
            kind = delta.WhichOneof("kind")
            if kind == "content":
                if text := self._fresh(_CONTENT, delta.content):
                    pieces.append(Content(text))
            elif kind == "reasoning":
                if text := self._fresh(_REASONING, delta.reasoning):
                    pieces.append(Reasoning(text))
            elif kind == "tool_call":
                self._add_call(delta.tool_call, pieces)
        return pieces

    def _add_call(self, call: tokenizer_pb2.ToolCallDelta, pieces: list[Piece]) -> None:
        if call.name and call.index not in self._opened:
            self._opened.add(call.index)
            pieces.append(CallOpened(call.index, new_call_id(), call.name))
        if text := self._fresh(call.index, call.arguments):
            pieces.append(CallArguments(call.index, text))

    def _fresh(self, channel: int, text: str) -> str:
        """The end of `text` that lies beyond what was sent on this channel."""
        seen = self._seen.get(channel, 0) + len(text)
        self._seen[channel] = seen
        fresh = seen - self._sent.get(channel, 0)
        if fresh <= 0:
            return ""
        self._sent[channel] = seen
        return text if fresh >= len(text) else text[-fresh:]
