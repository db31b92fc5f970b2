"""Token ids to text, token by token, without ever showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenTable(Protocol):
    """What a detokenizer reads of a vocabulary."""

    # Bytes of each token by id.
    bytes_of: list[bytes]
    # Text of each token by id; None where its bytes are not whole characters.
    text_of: list[str | None]


_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of one stream of tokens. Constant memory, constant cost per token.

    A token that ends inside a character gives the text before it; the character follows with the
    token that completes it. Bytes that can never become a character give U+FFFD once per maximal
    invalid sequence, as a decode of all the bytes together would.
    """

    def __init__(self, table: TokenTable, prompt_tail: Iterable[int] = ()) -> None:
        """prompt_tail: the last tokens of the prompt, whose last character may be incomplete."""
        self._bytes = table.bytes_of
        self._text = table.text_of
        self._size = len(table.bytes_of)
        self._decoder = _new_decoder("replace")
        self._clean = True
        for token_id in prompt_tail:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Return the text that is certain with this token. Unknown ids have none."""
        if token_id >= self._size:
            return ""
        text = self._text[token_id]
        if text is not None and self._clean:
            return text
        text = self._decoder.decode(self._bytes[token_id])
        self._clean = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        """Return U+FFFD if a character was left incomplete. The stream may go on."""
        if self._clean:
            return ""
        self._clean = True
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
