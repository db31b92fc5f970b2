"""Incremental decoding."""

from __future__ import annotations

import json
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.tokenizer.detokenizer import Detokenizer
from services.tokenizer.vocabulary import Vocabulary
from tests.tokenizer.support import (
    byte_fallback_definition,
    reference,
    vocabulary,
)

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def texts(vocab: Vocabulary, ids: list[int], tail: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(vocab, tail or ())
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@settings(max_examples=200, deadline=None)
@given(text=ANY_TEXT)
def test_valid_text_comes_back_without_replacement_characters(text: str) -> None:
    parts = texts(vocabulary(), vocabulary().encode(text))
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 255), max_size=30))
def test_any_bytes_decode_as_the_library_does(ids: list[int]) -> None:
    """The first 256 entries are single bytes, so that most sequences are no valid UTF-8."""
    assert "".join(texts(vocabulary(), ids)) == reference().decode(ids, skip_special_tokens=False)


def test_characters_of_two_to_four_bytes_one_byte_at_a_time() -> None:
    text = "ěščř 日本語 🐴👩‍👩‍👧"
    vocab = vocabulary()
    byte_id = {data: i for i, data in enumerate(vocab.bytes_of) if len(data) == 1}
    ids = [byte_id[bytes([byte])] for byte in text.encode()]
    parts = texts(vocab, ids)
    assert [part for part in parts if part] == list(text)


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("abcthe é字🐴,"), max_size=30))
def test_byte_fallback_vocabulary(text: str) -> None:
    definition = byte_fallback_definition()
    vocab = Vocabulary(definition)
    library = Tokenizer.from_str(json.dumps(definition))
    ids = vocab.encode(text)
    assert ids == library.encode(text, add_special_tokens=False).ids
    parts = texts(vocab, ids)
    assert "".join(parts) == text == library.decode(ids)
    assert all("\ufffd" not in part for part in parts)


def test_character_cut_by_the_end_of_the_prompt_is_completed_once() -> None:
    vocab = vocabulary()
    byte_id = {data: i for i, data in enumerate(vocab.bytes_of) if len(data) == 1}
    ids = [byte_id[bytes([byte])] for byte in "字".encode()]
    prompt = [*vocab.encode("a prompt "), *ids[:2]]
    assert texts(vocab, [ids[2], *vocab.encode("!")], prompt) == ["字", "!", ""]
    assert texts(vocab, vocab.encode("!"), prompt) == ["\ufffd!", ""]


def test_tail_that_begins_inside_a_character_leaves_nothing() -> None:
    vocab = vocabulary()
    byte_id = {data: i for i, data in enumerate(vocab.bytes_of) if len(data) == 1}
    tail = [byte_id[bytes([byte])] for byte in "字".encode()[1:]]
    assert texts(vocab, vocab.encode("ok"), tail)[0] == vocab.decode(
        list(islice(vocab.encode("ok"), 1)), skip_special=False
    )


def test_incomplete_character_at_the_end_is_replaced_once() -> None:
    vocab = vocabulary()
    byte_id = {data: i for i, data in enumerate(vocab.bytes_of) if len(data) == 1}
    ids = [byte_id[bytes([byte])] for byte in "🐴".encode()[:3]]
    assert texts(vocab, ids) == ["", "", "", "\ufffd"]


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    assert texts(vocabulary(), [vocabulary().size, 10**6]) == ["", "", ""]
