"""Request fields that need tokens beside those of the prompt: bad words, a suffix, frames."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from warhorse.v1 import engine_pb2, tokenizer_pb2

from services.gateway.errors import unsupported
from services.gateway.plan import Prompt
from services.gateway.tokenizers import Tokenizers
from services.gateway.tokens import count, pack, unpack

_PROBE = "a"  # any text: only what stands around it is used
# Around the text before and after a gap, in DeepSeek's vocabularies.
FIM_BEGIN, FIM_HOLE, FIM_END = "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"


async def bad_word_tokens(
    words: Sequence[str] | None, tokenizers: Tokenizers
) -> list[engine_pb2.TokenSequence]:
    """Each word as the tokens that it has at the start of a text and behind a space."""
    forms = [form for word in words or () for form in (word.strip(), " " + word.strip())]
    encoded = await asyncio.gather(*(_plain(form, tokenizers) for form in forms))
    return [engine_pb2.TokenSequence(token_ids=ids) for ids in dict.fromkeys(encoded)]


async def _plain(text: str, tokenizers: Tokenizers) -> tuple[int, ...]:
    request = tokenizer_pb2.EncodeRequest(text=text)
    request.add_special_tokens = False
    return tuple(unpack(await tokenizers.encode(request)))


async def framed(prompt: Prompt, tokenizers: Tokenizers) -> Prompt:
    """`prompt` with the special tokens that the tokenizer puts around any text."""
    request = tokenizer_pb2.EncodeRequest(text=_PROBE)
    request.add_special_tokens = True
    plain, whole = await asyncio.gather(_plain(_PROBE, tokenizers), tokenizers.encode(request))
    ids = unpack(whole)
    size = len(plain)
    starts = (i for i in range(len(ids)) if tuple(ids[i : i + size]) == plain)
    start = next(starts, 0)
    before, after = ids[:start], ids[start + size :]
    for image in prompt.images:
        image.offset += len(before)
    return replace(prompt, token_ids=pack(before) + prompt.token_ids + pack(after))


async def filled_middle(before: bytes, suffix: str, tokenizers: Tokenizers) -> bytes:
    """A prompt for the text between `before`, packed tokens, and `suffix`.

    The marker of the beginning stands behind a token that begins a text, if `before` has one.
    Raises ApiError 400 when the vocabulary has no markers of a gap.
    """
    texts = (FIM_BEGIN, FIM_HOLE, FIM_END)
    begin, hole, end = await asyncio.gather(*(_marker(text, tokenizers) for text in texts))
    special = tokenizers.info.special_token_ids if tokenizers.info else ()
    first = unpack(before[:4])
    lead = before[:4] if first and first[0] in special else b""
    after = pack(await _plain(suffix, tokenizers))
    return lead + begin + before[len(lead) :] + hole + after + end


async def _marker(text: str, tokenizers: Tokenizers) -> bytes:
    request = tokenizer_pb2.EncodeRequest(text=text, parse_special=True)
    request.add_special_tokens = False
    token = await tokenizers.encode(request)
    if count(token) != 1:
        raise unsupported("suffix", "suffix")
    return token
