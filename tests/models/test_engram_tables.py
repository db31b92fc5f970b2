"""Engram's hash: the release's constants, the vendor's golden row ids, any cut of the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from services.common.checkpoint import CheckpointError
from services.common.ngram_table import EngramParameters, engram_parameters
from services.engine.models.ngram import EngramHash
from services.engine.models.token_map import token_keys, token_map

FOLDER = Path(__file__).parent / "engram"
GOLDEN: dict[str, Any] = json.loads((FOLDER / "golden.json").read_text())
LAYERS = GOLDEN["config"]["engram_layer_ids"]
IMAGE, PAD = 500, 2

# Constants of the released DeepSeek-V4.1-Flash.
RELEASE = {
    "engram_layer_ids": [1, 14],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_vocab_size": 16_000_000,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99_092,
    "image_token_id": 129_264,
}
RELEASE_ROWS = {1: 384_006_168, 14: 384_016_682}


@pytest.fixture(scope="module")
def hashes() -> list[EngramHash]:
    """Of the golden configuration, by its layers."""
    codes = token_map(FOLDER, GOLDEN["config"]["engram_compressed_vocab_size"])
    parameters = engram_parameters(GOLDEN["config"])
    return [EngramHash.from_parameters(f"t{i}", p, codes) for i, p in parameters.items()]


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def rows_of(ngram: EngramHash, *text: int) -> torch.Tensor:
    return ngram.row_ids(ids(*text), ids())


def test_constants_of_the_release() -> None:
    found = engram_parameters(RELEASE)
    assert found[1].multipliers == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert found[14].multipliers == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    assert found[1].head_sizes[:8] == (
        *(16000057, 16000079, 16000081, 16000097, 16000121, 16000129, 16000133, 16000183),
    )
    assert (found[1].head_sizes[-1], found[14].head_sizes[0]) == (16000463, 16000477)
    assert found[14].head_sizes[-1] == 16000889
    for layer, rows in RELEASE_ROWS.items():
        assert sum(found[layer].head_sizes) == rows
        assert len(found[layer].head_sizes) == 24


def test_hash_vector_of_the_release() -> None:
    codes = torch.arange(RELEASE["engram_compressed_vocab_size"])
    ngram = EngramHash.from_parameters("t", engram_parameters(RELEASE)[1], codes)
    (rows,) = ngram.row_ids(ids(5), ids(99, 42, 17)).tolist()
    assert rows[:3] == [3889985, 30570021, 40268302]
    assert (len(rows), rows[-1]) == (24, 379183168)


def test_ids_of_the_release_never_overflow() -> None:
    largest = RELEASE["engram_compressed_vocab_size"] - 1
    for layer, parameters in engram_parameters(RELEASE).items():
        codes = torch.arange(largest + 1)
        ngram = EngramHash.from_parameters("t", parameters, codes)
        rows = rows_of(ngram, *[largest] * 4)
        assert max(parameters.multipliers) * largest < 1 << 63
        assert 0 <= int(rows.min()) <= int(rows.max()) < RELEASE_ROWS[layer]


def test_constants_equal_the_vendor_s() -> None:
    found = list(engram_parameters(GOLDEN["config"]).values())
    assert [list(p.multipliers) for p in found] == GOLDEN["multipliers"]
    assert [list(p.head_sizes) for p in found] == GOLDEN["primes"]
    assert [list(p.head_offsets) for p in found] == GOLDEN["offsets"]
    assert [sum(p.head_sizes) for p in found] == GOLDEN["config"]["engram_num_embeddings"]


def test_token_map_equals_the_vendor_s() -> None:
    assert token_map(FOLDER, 311).tolist() == GOLDEN["token_map"]


@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_row_ids_equal_the_vendor_s_at_every_cut(hashes: list[EngramHash], case: str) -> None:
    text = GOLDEN["cases"][case]["input_ids"]
    for ngram, expected in zip(hashes, GOLDEN["cases"][case]["hash_ids"], strict=True):
        for cut in range(len(text)):
            context = text[max(0, cut - ngram.context_tokens) : cut]
            after = ngram.row_ids(ids(*text[cut:]), ids(*context))
            assert after.tolist() == expected[cut:]


def test_context_longer_than_needed_is_cut(hashes: list[EngramHash]) -> None:
    long = hashes[0].row_ids(ids(5), ids(9, 9, 9, 100, 200, 300))
    assert torch.equal(long, hashes[0].row_ids(ids(5), ids(100, 200, 300)))


def test_an_image_token_hides_itself_and_all_before_it(hashes: list[EngramHash]) -> None:
    for ngram in hashes:
        alone = rows_of(ngram, 100, 200)
        assert torch.equal(rows_of(ngram, 7, IMAGE, 100, 200)[2:], alone)
        # An image token reads as padding all the way back.
        inside = rows_of(ngram, PAD)
        assert torch.equal(rows_of(ngram, 7, IMAGE, IMAGE)[1:], inside.repeat(2, 1))


def test_padding_in_the_text_hides_nothing(hashes: list[EngramHash]) -> None:
    text = rows_of(hashes[0], 100, PAD, 200)[2]
    assert not torch.equal(text, rows_of(hashes[0], PAD, 200)[1])


def test_ids_beyond_the_tokenizer_count_as_padding(hashes: list[EngramHash]) -> None:
    text, padded = (100, 5000, 200, 300), (100, PAD, 200, 300)
    assert torch.equal(rows_of(hashes[1], *text), rows_of(hashes[1], *padded))


def test_tokens_that_differ_in_form_only_share_a_key() -> None:
    same = ["a", "A", "á", "Á", " a", "a\n", "\N{FULLWIDTH LATIN SMALL LETTER A}"]
    blanks = [" ", "\n", " \t\r\n", "\N{IDEOGRAPHIC SPACE}"]
    own = ["b", "a b", "\N{COMBINING ACUTE ACCENT}", "x\N{REPLACEMENT CHARACTER}", ""]
    entries = [*same, *blanks, *own]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate(entries)}, unk_token="b"))
    tokenizer.decoder = decoders.Fuse()
    keys = token_keys(tokenizer)
    assert keys == ["a"] * 7 + [" "] * 4 + own
    # A run of spaces inside is one space.
    assert token_keys(_of("a \n b")) == ["a b"]


def _of(text: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({text: 0}, unk_token=text))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def test_a_part_of_a_character_is_compared_by_its_entry() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    keys = token_keys(tokenizer)
    parts = [t for t in range(512) if "\N{REPLACEMENT CHARACTER}" in tokenizer.decode([t])]
    assert len(parts) > 100
    assert all(keys[t] == tokenizer.id_to_token(t) for t in parts)


def test_another_tokenizer_is_refused() -> None:
    message = (
        r"311 distinct normalised tokens.*engram_compressed_vocab_size is 310.*tokenizer\.json"
    )
    with pytest.raises(CheckpointError, match=message):
        token_map(FOLDER, 310)


@pytest.mark.parametrize("content", [None, b"{", b"\xff\xfe"])
def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot be read.*tokenizer\.json"):
        token_map(tmp_path, 311)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engram_max_ngram_size", 1),
        ("engram_n_heads", 0),
        ("engram_vocab_size", "many"),
        ("engram_compressed_vocab_size", None),
        ("engram_pad_token_id", -1),
        ("engram_layer_ids", [1, True]),
        ("image_token_id", 1.5),
    ],
)
def test_a_bad_setting_is_refused_by_its_name(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=key):
        engram_parameters(RELEASE | {key: value})


def test_a_padding_token_that_the_tokenizer_lacks_is_refused() -> None:
    parameters: EngramParameters = engram_parameters(RELEASE)[1]
    with pytest.raises(ValueError, match="engram_pad_token_id is 2, the tokenizer has 2 tokens"):
        EngramHash.from_parameters("t", parameters, torch.arange(2))
