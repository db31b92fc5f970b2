"""Shared cases of all families: every cut of the stream gives the right output."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.tokenizer.detokenizer import Detokenizer
from services.tokenizer.parsing.calls import CallPolicy
from services.tokenizer.parsing.deltas import Finish
from services.tokenizer.parsing.registry import markup_texts
from services.tokenizer.parsing.schema import ToolTable
from services.tokenizer.session import ParseSession, StopSetup, treatments
from services.tokenizer.vocabulary import Vocabulary
from tests.tokenizer.support import FORMATS, Result, chunks, cut_pieces, make_parser, parse

FILES = ("deepseek", "glm", "qwen", "public_bugs")
CASES = [
    json.loads(line)
    for name in FILES
    for line in (Path(__file__).parent / "cases" / f"{name}.jsonl").read_text("utf-8").splitlines()
]
# One token may hold several characters, and several markers may come at once (1, 3, all).
SIZES = [1, 3, 7, 10**6]


@pytest.fixture(params=CASES, ids=lambda case: case["id"])
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@cache
def tokenizer(family: str) -> tuple[Vocabulary, Tokenizer]:
    definition = FORMATS[family].definition()
    return Vocabulary(definition), Tokenizer.from_str(json.dumps(definition))


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    tools = case.get("tools")
    options: dict[str, Any] = {"family": case["family"], "thinking": case["thinking"]}
    if tools is not None:
        options["tools"] = ToolTable({name: json.dumps(schema) for name, schema in tools.items()})
    emits = case["tool_choice"] != "none" and tools != {}
    return {**options, "policy": CallPolicy(emit=emits)}


@pytest.mark.parametrize("size", SIZES)
def test_text_with_special_tokens_by_id(case: dict[str, Any], size: int) -> None:
    parts = cut_pieces(case["input"], size, case["family"])
    result = parse(parts, case["engine_finish"], **options_of(case))
    assert result.as_case() == case["right"]


@pytest.mark.parametrize("size", SIZES)
def test_text_alone(case: dict[str, Any], size: int) -> None:
    parts = chunks(case["input"], size)
    result = parse(parts, case["engine_finish"], by_id=False, **options_of(case))
    assert result.as_case() == case["right"]


@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_token_ids(case: dict[str, Any], size: int) -> None:
    vocabulary, library = tokenizer(case["family"])
    ids = library.encode(case["input"], add_special_tokens=False).ids
    markers = frozenset(FORMATS[case["family"]].structural)
    table = treatments(vocabulary, markers, markup_texts(), skip_special=True)
    session = ParseSession(
        Detokenizer(vocabulary), make_parser(**options_of(case)), table, StopSetup()
    )
    result = Result()
    for start in range(0, len(ids), size):
        result.add(session.push(ids[start : start + size]).deltas)
    last = session.finish(Finish(case["engine_finish"]))
    result.add(last.deltas)
    assert last.finish is not None
    result.finish = last.finish.value
    assert result.as_case() == case["right"]


def test_all_cases_are_here() -> None:
    counts = {"DS": 25, "DX": 2, "GL": 16, "QW": 15}
    names = {case["id"] for case in CASES}
    assert {f"{kind}{i:02}" for kind, n in counts.items() for i in range(1, n + 1)} <= names
    assert {"B1", "B4", "B6", "B8", "B10-dsml", "B10-glm", "B10-qwen"} <= names
