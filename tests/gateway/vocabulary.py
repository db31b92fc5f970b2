"""The vocabulary of the fakes: bytes, and a few markers."""

from __future__ import annotations

EOS = 256
END_THINK = 257
CALL = 258  # then the name, ARGUMENTS, the JSON text, END_CALL
ARGUMENTS = 259
END_CALL = 260
VOCAB_SIZE = 300
MARKERS = frozenset({EOS, END_THINK, CALL, ARGUMENTS, END_CALL})


def ids(text: str) -> list[int]:
    """One token per UTF-8 byte."""
    return list(text.encode())


def call(name: str, arguments: str) -> list[int]:
    """The tokens of a tool call."""
    return [CALL, *ids(name), ARGUMENTS, *ids(arguments), END_CALL]


def token_bytes(token: int) -> bytes:
    """A token's own bytes; markers show as their number."""
    return bytes([token]) if token < 256 else f"<{token}>".encode()
