"""The shared cases of the family: every cut of the stream gives the right output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer.detokenizer import Detokenizer
from services.tokenizer.parsing.deltas import Finish
from services.tokenizer.parsing.registry import markup_texts
from services.tokenizer.session import ParseSession, StopSetup, treatments
from tests.tokenizer.support import (
    STRUCTURAL,
    Result,
    chunks,
    make_parser,
    parse,
    pieces_of,
    reference,
    vocabulary,
)

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "cases" / "qwen.jsonl").read_text("utf-8").splitlines()
]


@pytest.fixture(params=CASES, ids=lambda case: case["id"])
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.mark.parametrize("size", [1, 3, 7, 10**6])
def test_text_with_special_tokens_by_id(case: dict[str, Any], size: int) -> None:
    parts = [
        chunk
        for piece in pieces_of(case["input"])
        for chunk in ([piece] if piece in (*STRUCTURAL, "<|im_end|>") else chunks(piece, size))
    ]
    result = parse(parts, case["engine_finish"], thinking=case["thinking"])
    assert result.as_case() == case["right"]


@pytest.mark.parametrize("size", [1, 3, 7, 10**6])
def test_text_alone(case: dict[str, Any], size: int) -> None:
    parts = chunks(case["input"], size)
    result = parse(parts, case["engine_finish"], thinking=case["thinking"], by_id=False)
    assert result.as_case() == case["right"]


@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_token_ids(case: dict[str, Any], size: int) -> None:
    ids = reference().encode(case["input"], add_special_tokens=False).ids
    table = treatments(vocabulary(), frozenset(STRUCTURAL), markup_texts(), skip_special=True)
    parser = make_parser(thinking=case["thinking"])
    session = ParseSession(Detokenizer(vocabulary()), parser, table, StopSetup())
    result = Result()
    for start in range(0, len(ids), size):
        result.add(session.push(ids[start : start + size]).deltas)
    last = session.finish(Finish(case["engine_finish"]))
    result.add(last.deltas)
    assert last.finish is not None
    result.finish = last.finish.value
    assert result.as_case() == case["right"]


def test_all_cases_of_the_family_are_here() -> None:
    assert [case["id"] for case in CASES] == [f"QW{i:02}" for i in range(1, 16)]
