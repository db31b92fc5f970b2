"""Checkpoint folders: templates, parsers, stop tokens, refusals at start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from warhorse.v1 import tokenizer_pb2

from services.common.errors import StartupError
from services.tokenizer.folder import TokenizerFolder
from services.tokenizer.parsers import parsers_of, start_state
from services.tokenizer.parsing.registry import ParserNames
from tests.tokenizer.conftest import write_folder
from tests.tokenizer.support import vocabulary

QWEN = ParserNames("qwen3", "qwen3_xml")


def folder_with(path: Path, **changes: Any) -> TokenizerFolder:
    return TokenizerFolder.open(write_folder(path, **changes))


def test_template_of_the_folder_wins_over_the_built_in_one(tmp_path: Path) -> None:
    bare = folder_with(tmp_path / "a")
    assert bare.template and not bare.template_is_own
    named = [{"name": "other", "template": "o"}, {"name": "default", "template": "d"}]
    settings = {"chat_template": named}
    assert folder_with(tmp_path / "b", **{"tokenizer_config.json": settings}).template == "d"
    file = {"chat_template.jinja": "j", "tokenizer_config.json": settings}
    assert folder_with(tmp_path / "c", **file).template == "j"
    given = tmp_path / "mine.jinja"
    given.write_text("m")
    assert TokenizerFolder.open(tmp_path / "c", given).template == "m"


def test_parsers_follow_the_model_type_and_the_template(tmp_path: Path) -> None:
    assert parsers_of(folder_with(tmp_path / "a"), "", "") == QWEN
    plain = folder_with(tmp_path / "b", **{"chat_template.jinja": "no thoughts"})
    assert parsers_of(plain, "", "") == ParserNames("none", "qwen3_xml")
    other = {"config.json": {"model_type": "other"}}
    assert parsers_of(folder_with(tmp_path / "c", **other), "", "") == ParserNames()
    thinking = {**other, "chat_template.jinja": "<think>"}
    assert parsers_of(folder_with(tmp_path / "d", **thinking), "", "") == ParserNames("qwen3")
    xml = {**other, "chat_template.jinja": "<think> <function="}
    assert parsers_of(folder_with(tmp_path / "e", **xml), "", "") == QWEN


def test_parsers_can_be_chosen_by_name_and_alias(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    assert parsers_of(folder, "qwen3_coder", "none") == ParserNames("none", "qwen3_xml")
    with pytest.raises(StartupError, match=r"'zzz'.*qwen3_coder, qwen3_xml, none"):
        parsers_of(folder, "zzz", "")
    with pytest.raises(StartupError, match=r"'zzz'.*qwen3, none"):
        parsers_of(folder, "", "zzz")


def test_stop_tokens_come_from_every_source_once(tmp_path: Path) -> None:
    end = vocabulary().control["<|im_end|>"]
    assert folder_with(tmp_path / "a").stop_token_ids == (end,)
    without = {"generation_config.json": None}
    assert folder_with(tmp_path / "b", **without).stop_token_ids == (0, end)
    assert folder_with(tmp_path / "b", **without).generation_config == ""


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", None),
        ("config.json", "{"),
        ("config.json", "[]"),
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("generation_config.json", "x"),
        ("tokenizer_config.json", "5"),
    ],
)
def test_damaged_folder_is_refused_naming_the_file(
    tmp_path: Path, name: str, content: str | None
) -> None:
    with pytest.raises(StartupError, match=name.replace(".", r"\.")):
        folder_with(tmp_path, **{name: content})


@pytest.mark.parametrize(
    ("prompt", "reasoning"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\nsome", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\nold<|im_end|>\n<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_start_comes_from_the_last_turn_of_the_prompt(
    tmp_path: Path, prompt: str, reasoning: bool
) -> None:
    folder = folder_with(tmp_path)
    ids = vocabulary().encode_segments(vocabulary().split(prompt))
    expected = (
        tokenizer_pb2.PARSE_STATE_REASONING if reasoning else tokenizer_pb2.PARSE_STATE_CONTENT
    )
    assert start_state(ids, folder, QWEN) == expected
    off = start_state(ids, folder, ParserNames("none", "qwen3_xml"))
    assert off == tokenizer_pb2.PARSE_STATE_CONTENT


@pytest.mark.parametrize(
    "values",
    [{"temperature": "hot"}, {"top_k": True}, {"eos_token_id": "x"}, {"eos_token_id": [1, 2.5]}],
)
def test_wrong_sampling_defaults_are_refused_by_file_and_field(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    with pytest.raises(StartupError, match=rf"generation_config\.json: {next(iter(values))}"):
        folder_with(tmp_path, **{"generation_config.json": values})
