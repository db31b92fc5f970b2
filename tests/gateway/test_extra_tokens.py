"""Tokens beside those of a prompt: the markers of a gap, and what stands around any text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from warhorse.v1 import tokenizer_pb2

from services.gateway.errors import ApiError
from services.gateway.extra_tokens import FIM_BEGIN, FIM_END, FIM_HOLE, filled_middle, framed
from services.gateway.plan import Prompt
from services.gateway.tokens import pack, unpack

MARKERS = {FIM_BEGIN: 300, FIM_HOLE: 301, FIM_END: 302}
BOS = 303


class Bytes:
    """One token per byte, and the markers where special texts are looked for."""

    info = SimpleNamespace(special_token_ids=[BOS, *MARKERS.values()])

    def __init__(self, markers: dict[str, int]) -> None:
        self._markers = markers

    async def encode(self, request: tokenizer_pb2.EncodeRequest) -> bytes:
        assert request.HasField("add_special_tokens") and not request.add_special_tokens
        if request.parse_special and request.text in self._markers:
            return pack([self._markers[request.text]])
        return pack(list(request.text.encode()))


@pytest.mark.parametrize("lead", [[], [BOS]])
async def test_the_gap_is_marked_behind_the_beginning_of_the_text(lead: list[int]) -> None:
    tokenizers: Any = Bytes(MARKERS)
    found = unpack(await filled_middle(pack([*lead, 97, 98]), "y", tokenizers))
    assert found == [*lead, 300, 97, 98, 301, 121, 302]


async def test_markers_in_a_users_suffix_stay_text() -> None:
    tokenizers: Any = Bytes(MARKERS)
    found = unpack(await filled_middle(pack([97]), FIM_HOLE, tokenizers))
    assert found == [300, 97, 301, *FIM_HOLE.encode(), 302]


async def test_vocabularies_without_markers_refuse_a_suffix() -> None:
    tokenizers: Any = Bytes({})
    with pytest.raises(ApiError, match="suffix is not currently supported"):
        await filled_middle(pack([97]), "y", tokenizers)


class Framing:
    """Puts tokens around every text that is encoded with special tokens."""

    def __init__(self, before: list[int], after: list[int]) -> None:
        self._around = (before, after)

    async def encode(self, request: tokenizer_pb2.EncodeRequest) -> bytes:
        before, after = self._around if request.add_special_tokens else ([], [])
        return pack([*before, *request.text.encode(), *after])


@pytest.mark.parametrize("after", [[], [305]])
@pytest.mark.parametrize("before", [[], [BOS], [BOS, 304]])
async def test_frame_of_a_text_is_put_around_a_prompt(before: list[int], after: list[int]) -> None:
    tokenizers: Any = Framing(before, after)
    image = tokenizer_pb2.ImageInput(offset=1, length=2)
    prompt = await framed(Prompt(pack([7, 9, 9, 8]), images=(image,)), tokenizers)
    assert unpack(prompt.token_ids) == [*before, 7, 9, 9, 8, *after]
    assert unpack(prompt.token_ids)[prompt.images[0].offset :][:2] == [9, 9]
