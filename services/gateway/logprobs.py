"""Log-probabilities in the forms of chat completions, completions and prompt_logprobs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from warhorse.v1 import engine_pb2

from services.gateway.tokenizers import Tokenizers

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say

Entry = dict[str, Any]


class TokenNames:
    """Text and bytes of tokens, fetched from a tokenizer in one call per batch."""

    def __init__(self, tokenizers: Tokenizers, *, as_ids: bool) -> None:
        self._tokenizers = tokenizers
        self._as_ids = as_ids

    async def bytes_of(self, logprobs: Sequence[engine_pb2.TokenLogprob]) -> dict[int, bytes]:
        """Bytes of every token that `logprobs` mention."""
        ids = list({t for entry in logprobs for t in _mentioned(entry)})
        return dict(zip(ids, await self._tokenizers.token_bytes(ids), strict=True))

    def text(self, token_id: int, known: Mapping[int, bytes]) -> str:
        """How the token is shown: its text, or `token_id:N` on request."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return known[token_id].decode("utf-8", "replace")


def _mentioned(entry: engine_pb2.TokenLogprob) -> Iterable[int]:
    yield entry.token_id
    for top in entry.top:
        yield top.token_id


def finite(logprob: float) -> float:
    """`logprob`, with a number for minus infinity and NaN."""
    return logprob if math.isfinite(logprob) else LOWEST


async def chat_entries(
    names: TokenNames, logprobs: Sequence[engine_pb2.TokenLogprob]
) -> list[Entry]:
    """Items of `logprobs.content` of a chat choice."""
    known = await names.bytes_of(logprobs)

    def entry(token_id: int, logprob: float) -> Entry:
        return {
            "token": names.text(token_id, known),
            "logprob": finite(logprob),
            "bytes": list(known[token_id]),
        }

    return [
        entry(one.token_id, one.logprob)
        | {"top_logprobs": [entry(top.token_id, top.logprob) for top in one.top]}
        for one in logprobs
    ]


class CompletionLogprobs:
    """Builds the four parallel lists of a completion choice, with running text offsets."""

    def __init__(self, names: TokenNames, offset: int = 0) -> None:
        self._names = names
        self._offset = offset
        self._clear()

    def _clear(self) -> None:
        self._body: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }

    def __bool__(self) -> bool:
        return bool(self._body["tokens"])

    def take(self) -> dict[str, list[Any]]:
        """What was added since the last `take`."""
        body = self._body
        self._clear()
        return body

    async def add_first(self, token_id: int) -> None:
        """The first token of an echoed prompt, which has no probability."""
        known = await self._names.bytes_of([engine_pb2.TokenLogprob(token_id=token_id)])
        self._add(token_id, known, None, None)

    async def add(self, logprobs: Sequence[engine_pb2.TokenLogprob]) -> None:
        """Tokens in order."""
        known = await self._names.bytes_of(logprobs)
        for one in logprobs:
            text = self._names.text(one.token_id, known)
            top = {self._names.text(t.token_id, known): finite(t.logprob) for t in one.top}
            self._add(one.token_id, known, finite(one.logprob), top | {text: finite(one.logprob)})

    def _add(
        self,
        token_id: int,
        known: Mapping[int, bytes],
        logprob: float | None,
        top: dict[str, float] | None,
    ) -> None:
        self._body["tokens"].append(self._names.text(token_id, known))
        self._body["token_logprobs"].append(logprob)
        self._body["top_logprobs"].append(top)
        self._body["text_offset"].append(self._offset)
        self._offset += len(known[token_id].decode("utf-8", "replace"))


async def prompt_entries(
    names: TokenNames, logprobs: Sequence[engine_pb2.TokenLogprob]
) -> list[dict[str, Entry] | None]:
    """`prompt_logprobs`: null for the first token, then objects by token id."""
    known = await names.bytes_of(logprobs)
    entries: list[dict[str, Entry] | None] = [None]
    for one in logprobs:
        ranked = {
            top.token_id: {"logprob": finite(top.logprob), "rank": rank}
            for rank, top in enumerate(one.top, start=1)
        }
        ranked[one.token_id] = {"logprob": finite(one.logprob), "rank": one.rank}
        entries.append(
            {
                str(token): entry | {"decoded_token": names.text(token, known)}
                for token, entry in ranked.items()
            }
        )
    return entries
