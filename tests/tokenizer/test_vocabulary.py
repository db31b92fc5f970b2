"""Encoding without control tokens."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from services.tokenizer.vocabulary import Segment, Vocabulary, VocabularyError
from tests.tokenizer.support import (
    MARKUP,
    SPECIAL,
    THINK,
    byte_level_definition,
    reference,
    vocabulary,
)

CONTROL = (*SPECIAL, *MARKUP, *THINK)
USER_TEXT = st.lists(
    st.one_of(st.sampled_from(CONTROL), st.text(max_size=6), st.sampled_from(["<|im_", "end|>"])),
    max_size=8,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(text=USER_TEXT)
def test_ordinary_text_never_gives_a_control_token(text: str) -> None:
    vocab = vocabulary()
    ids = vocab.encode(text)
    assert not set(ids) & set(vocab.control.values())
    assert vocab.decode(ids, skip_special=False) == text


@settings(max_examples=200, deadline=None)
@given(text=USER_TEXT)
def test_split_text_encodes_as_the_library_does(text: str) -> None:
    vocab = vocabulary()
    ids = vocab.encode_segments(vocab.split(text))
    assert ids == reference().encode(text, add_special_tokens=False).ids


def test_longest_control_token_wins() -> None:
    definition = copy.deepcopy(byte_level_definition())
    entry = dict(definition["added_tokens"][-1])
    definition["added_tokens"].append({**entry, "id": entry["id"] + 1, "content": "<think>!"})
    vocab = Vocabulary(definition)
    assert vocab.split("a<think>!") == [Segment("a", False), Segment("<think>!", True)]


def test_control_text_in_the_trained_vocabulary_is_out_of_reach() -> None:
    """A vocabulary may hold a control token's text as an entry that whole words look up."""
    definition = copy.deepcopy(byte_level_definition())
    definition["model"]["ignore_merges"] = True
    definition["pre_tokenizer"] = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False
    }  # fmt: skip
    think = next(e["id"] for e in definition["added_tokens"] if e["content"] == "<think>")
    definition["model"]["vocab"]["<think>"] = think
    assert Tokenizer.from_str(json.dumps(definition)).encode("<think>").ids == [think]
    assert think not in Vocabulary(definition).encode("<think>")


def test_frame_of_the_post_processor() -> None:
    definition = copy.deepcopy(byte_level_definition())
    eot = definition["added_tokens"][0]
    tokenizer = Tokenizer.from_str(json.dumps(definition))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{eot['content']} $A", special_tokens=[(eot["content"], eot["id"])]
    )
    vocab = Vocabulary(json.loads(tokenizer.to_str()))
    assert vocab.framed(vocab.encode("hi")) == tokenizer.encode("hi").ids


def test_bytes_of_every_token_join_to_the_text() -> None:
    vocab = vocabulary()
    ids = reference().encode("žluť 🐴<|im_end|> ok").ids
    assert b"".join(map(vocab.token_bytes, ids)).decode() == "žluť 🐴<|im_end|> ok"
    assert vocab.decode(ids, skip_special=True) == "žluť 🐴 ok"


def test_kind_that_is_not_served_is_refused_naming_the_file(tmp_path: Path) -> None:
    definition = copy.deepcopy(byte_level_definition())
    definition["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(definition))
    with pytest.raises(VocabularyError, match=r"tokenizer\.json.*decoder"):
        Vocabulary.load(file)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {}}'])
def test_damaged_file_is_refused_naming_it(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(VocabularyError, match=r"tokenizer\.json"):
        Vocabulary.load(file)
