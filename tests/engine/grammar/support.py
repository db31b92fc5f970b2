"""Grammars in the tokens of the nano checkpoint, and walks through them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from services.common.cli.up import DEFAULT_MODEL as NANO
from services.engine.grammar.compiled import compile_grammar, make_matcher
from services.engine.sampling.grammar import GrammarState, allowed
from services.engine.sampling.params import GrammarUse

TOKENIZER = Tokenizer.from_file(str(NANO / "tokenizer.json"))
VOCAB = 1024
END = TOKENIZER.token_to_id("<|im_end|>")
# What ends parts of JSON, and values that are short.
_ENDINGS = frozenset(map(TOKENIZER.token_to_id, '{}[]",:1a0')) | {TOKENIZER.token_to_id('":')}


def compiled(form: str, value: Any, *, gap: bool = False) -> bytes:
    return compile_grammar(form, value, gap=gap, folder=NANO, vocab_size=VOCAB)


def state(data: bytes, after: int | None = None, outputs: Sequence[int] = ()) -> GrammarState:
    return GrammarState(GrammarUse(data, after), make_matcher(data, NANO, VOCAB, [END]), outputs)


def wander(data: bytes, seed: int, most: int = 400, hurry: float = 0.0) -> str:
    """A random output that the grammar allows, up to its end token; empty for a longer one.

    `hurry`: how often a token is taken that brings JSON to its end, if one is allowed.
    """
    rng, grammar, ids = random.Random(seed), state(data), []
    while len(ids) < most:
        (mask,) = grammar.masks(())
        assert mask is not None
        choices = np.flatnonzero(allowed(mask, VOCAB)).tolist()
        assert choices, "a dead end"
        token = _chosen(rng, choices, hurry)
        grammar.advance([token])
        if token == END:
            return TOKENIZER.decode(ids, skip_special_tokens=False)
        ids.append(token)
    return ""


def _chosen(rng: random.Random, choices: list[int], hurry: float) -> int:
    if END in choices and rng.random() < 0.5:
        return END
    endings = [token for token in choices if token in _ENDINGS] if rng.random() < hurry else []
    return rng.choice(endings or choices)


def fits(data: bytes, text: str) -> bool:
    """Whether the grammar allows a whole output."""
    matcher = make_matcher(data, NANO, VOCAB, [END])
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    return all(map(matcher.accept, ids)) and not matcher.stuck and matcher.accept(END)
