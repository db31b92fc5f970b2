"""The scripted engine behind the real service."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import pytest
from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.engine_pb2 import LoadRequest, LoadResponse
from warhorse.v1.tokenizer_pb2 import FinishReason

from services.common.errors import StartupError
from services.engine.replay import Replay
from services.engine.script import ScriptLine
from services.engine.scripted import ScriptedLink, open_scripted
from tests.front.helpers import (
    EOS,
    Served,
    failure_of,
    kinds,
    make_request,
    read_all,
    serve_front,
    tokens_of,
    wait_until,
    write_script,
)


@pytest.fixture
def make_link(model_folder: Path, tmp_path: Path) -> Any:
    def make(*lines: dict[str, Any]) -> ScriptedLink:
        return open_scripted(model_folder, write_script(tmp_path / "script.jsonl", *lines), None)

    return make


def encode(text: str, model_folder: Path) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


async def test_text_comes_back_token_by_token_and_stops(make_link: Any, model_folder: Path) -> None:
    link = make_link({"when": {}, "text": "hello", "chunk": 1})
    async with serve_front(link, merge_tokens=False) as served:
        events = await read_all(served.stub.Generate(make_request(), timeout=10))
    assert kinds(events) == ["accepted", "prompt_done", *["chunk"] * 5, "finished"]
    assert events[0].accepted.prompt_tokens == 3
    assert tokens_of(events) == encode("hello", model_folder)
    finished = events[-1].finished
    assert finished.reason == FinishReason.FINISH_REASON_STOP
    assert finished.completion_tokens == 5
    assert not finished.HasField("stop_token_id")


async def test_empty_answer_finishes_without_a_token(make_link: Any) -> None:
    async with serve_front(make_link({"text": "", "delay_ms": 5})) as served:
        events = await read_all(served.stub.Generate(make_request(), timeout=10))
    assert kinds(events) == ["accepted", "prompt_done", "finished"]
    assert events[-1].finished.completion_tokens == 0


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
async def test_chunk_is_the_number_of_tokens_of_a_message(make_link: Any, chunk: int) -> None:
    ids = list(range(7))
    async with serve_front(
        make_link({"token_ids": ids, "chunk": chunk}), merge_tokens=False
    ) as served:
        events = await read_all(served.stub.Generate(make_request(), timeout=10))
    sizes = [len(e.chunk.token_ids) for e in events if e.HasField("chunk")]
    assert tokens_of(events) == ids
    assert sizes == [len(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]


async def test_first_matching_line_wins(make_link: Any, model_folder: Path) -> None:
    link = make_link(
        {"when": {"prompt_contains": "sum<|im_end|>"}, "token_ids": [1]},
        {"when": {"prompt_contains": "sum"}, "token_ids": [2]},
        {"when": {}, "token_ids": [3]},
    )
    answers = {"a sum<|im_end|>": 1, "a sum": 2, "nothing": 3}
    async with serve_front(link) as served:
        for prompt, token in answers.items():
            request = make_request(encode(prompt, model_folder))
            assert tokens_of(await read_all(served.stub.Generate(request, timeout=10))) == [token]


async def test_prompt_that_no_line_matches_is_an_invalid_field(make_link: Any) -> None:
    async with serve_front(
        make_link({"when": {"prompt_contains": "zebra"}, "token_ids": [1]})
    ) as served:
        error = await failure_of(served.stub.Generate(make_request(), timeout=10))
    assert error.reason == ErrorReason.ERROR_REASON_INVALID_FIELD
    assert error.field == "prompt_token_ids"
    assert "script" in error.message


async def test_max_tokens_cuts_with_reason_length(make_link: Any) -> None:
    link = make_link({"token_ids": [1, 2, 3, 4], "finish_reason": "stop"})
    async with serve_front(link) as served:
        request = make_request(stopping__max_tokens=3)
        events = await read_all(served.stub.Generate(request, timeout=10))
    assert tokens_of(events) == [1, 2, 3]
    assert events[-1].finished.reason == FinishReason.FINISH_REASON_LENGTH


async def test_script_says_length(make_link: Any) -> None:
    async with serve_front(make_link({"token_ids": [1], "finish_reason": "length"})) as served:
        events = await read_all(served.stub.Generate(make_request(), timeout=10))
    assert events[-1].finished.reason == FinishReason.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("changes", "expected", "stop_token"),
    [
        ({"stopping__eos_token_ids": [EOS]}, 3, EOS),
        ({"stopping__eos_token_ids": [EOS], "stopping__ignore_eos": True}, 4, None),
        ({"stopping__stop_token_ids": [ord("h") - 33]}, 1, ord("h") - 33),
        ({"stopping__eos_token_ids": [EOS], "stopping__min_tokens": 3}, 4, None),
        ({}, 4, None),
    ],
)
async def test_stop_token_in_the_text_ends_the_choice(
    make_link: Any, changes: dict[str, Any], expected: int, stop_token: int | None
) -> None:
    async with serve_front(make_link({"text": "hi<|im_end|>x"})) as served:
        events = await read_all(served.stub.Generate(make_request(**changes), timeout=10))
    finished = events[-1].finished
    assert len(tokens_of(events)) == finished.completion_tokens == expected
    assert finished.reason == FinishReason.FINISH_REASON_STOP
    assert (finished.stop_token_id if finished.HasField("stop_token_id") else None) == stop_token


async def test_every_choice_is_answered(make_link: Any) -> None:
    async with serve_front(make_link({"token_ids": [5, 6, 7]})) as served:
        request = make_request(n=3, sampling__temperature=1.0)
        events = await read_all(served.stub.Generate(request, timeout=10))
    assert [tokens_of(events, choice) for choice in range(3)] == [[5, 6, 7]] * 3
    assert sorted(e.finished.choice for e in events if e.HasField("finished")) == [0, 1, 2]


async def test_logprobs_of_a_scripted_token_are_certain(make_link: Any) -> None:
    async with serve_front(make_link({"token_ids": [5, 6]})) as served:
        request = make_request(output__logprobs=2, output__prompt_logprobs=0)
        events = await read_all(served.stub.Generate(request, timeout=10))
    entries = [entry for e in events for entry in e.chunk.logprobs]
    assert [(e.token_id, e.logprob, e.rank, len(e.top)) for e in entries] == [
        (5, 0.0, 1, 1),
        (6, 0.0, 1, 1),
    ]
    assert [e.token_id for e in events[1].prompt_done.prompt_logprobs] == [2, 3]


async def test_listed_tokens_take_the_place_of_the_likely_ones(make_link: Any) -> None:
    async with serve_front(make_link({"token_ids": [5, 6]})) as served:
        request = make_request(output__logprobs=0, output__logprob_token_ids=[6, 9])
        events = await read_all(served.stub.Generate(request, timeout=10))
    tops = [[(t.token_id, t.logprob) for t in s.top] for e in events for s in e.chunk.logprobs]
    assert tops == [[(6, -math.inf), (9, -math.inf)], [(6, 0.0), (9, -math.inf)]]


async def test_delay_spaces_messages(make_link: Any) -> None:
    async with serve_front(make_link({"token_ids": [1, 2, 3, 4], "delay_ms": 30})) as served:
        started = time.monotonic()
        events = await read_all(served.stub.Generate(make_request(), timeout=10))
        seconds = time.monotonic() - started
    assert tokens_of(events) == [1, 2, 3, 4]
    assert seconds >= 0.118


@pytest.mark.parametrize(
    ("aligned", "moment", "due"),
    [
        (False, 0.26, 0.31),
        (True, 0.26, 0.30),
        (True, 0.2999, 0.35),  # a step that came a little early is not given twice
        (True, 0.3001, 0.35),
    ],
)
def test_aligned_chunks_come_at_multiples_of_the_delay(
    aligned: bool, moment: float, due: float
) -> None:
    stop = FinishReason.FINISH_REASON_STOP
    line = ScriptLine(None, (1, 2), 1, delay_seconds=0.05, aligned=aligned, finish_reason=stop)
    assert Replay(1, 0, line, make_request()).due_after(moment) == pytest.approx(due)


async def test_cancel_ends_the_replay(make_link: Any) -> None:
    async with serve_front(make_link({"token_ids": [1] * 50, "delay_ms": 20})) as served:
        call = served.stub.Generate(make_request(), timeout=10)
        async for event in call:
            if event.HasField("chunk"):
                break
        call.cancel()
        await wait_until(lambda: served.front.live_requests == 0)
        load = await next_load(served, running=0)
    assert load.generation_tokens < 50


async def next_load(served: Served, running: int) -> LoadResponse:
    async for load in served.stub.Load(LoadRequest()):
        if load.running == running:
            return load
    raise AssertionError("the load stream ended")


async def test_many_at_once_get_their_own_answers(make_link: Any, model_folder: Path) -> None:
    lines = [
        {"when": {"prompt_contains": f"[{i}]"}, "token_ids": [i] * (i + 1), "delay_ms": i % 3}
        for i in range(64)
    ]
    async with serve_front(make_link(*lines)) as served:
        calls = [
            read_all(
                served.stub.Generate(
                    make_request(encode(f"[{i}]", model_folder), request_id="same"), timeout=20
                )
            )
            for i in range(64)
        ]
        answers = await asyncio.gather(*calls)
    for i, events in enumerate(answers):
        assert tokens_of(events) == ([i] * (i + 1))[:64]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"when": {}', ["line 2"]),
        ("[1]", ["line 2", "object"]),
        ('{"when": {}, "text": "a", "extra": 1}', ["line 2", "extra"]),
        ('{"when": {"prompt": "a"}, "text": "a"}', ["line 2", "prompt"]),
        ('{"when": {"prompt_contains": 3}, "text": "a"}', ["line 2", "prompt_contains", "3"]),
        ('{"when": [], "text": "a"}', ["line 2", "when"]),
        ('{"when": {}}', ["line 2", "text", "token_ids"]),
        ('{"text": "a", "token_ids": [1]}', ["line 2", "text", "token_ids"]),
        ('{"text": 4}', ["line 2", "text", "4"]),
        ('{"token_ids": [1, 260]}', ["line 2", "token_ids[1]", "260", "259"]),
        ('{"token_ids": [true]}', ["line 2", "token_ids[0]"]),
        ('{"token_ids": "1"}', ["line 2", "token_ids"]),
        ('{"text": "a", "chunk": 0}', ["line 2", "chunk", "0"]),
        ('{"text": "a", "chunk": 1.5}', ["line 2", "chunk", "1.5"]),
        ('{"text": "a", "delay_ms": -1}', ["line 2", "delay_ms", "-1"]),
        ('{"text": "a", "delay_ms": NaN}', ["line 2", "delay_ms", "nan"]),
        ('{"text": "a", "aligned": 1}', ["line 2", "aligned", "1"]),
        ('{"text": "a", "finish_reason": "tool_calls"}', ["line 2", "finish_reason"]),
    ],
)
def test_malformed_script_line_is_named(
    model_folder: Path, tmp_path: Path, line: str, words: list[str]
) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text('{"when": {}, "text": "fine"}\n' + line + "\n")
    with pytest.raises(StartupError) as caught:
        open_scripted(model_folder, path, None)
    for word in (*words, "script.jsonl"):
        assert word in str(caught.value)


def test_empty_and_missing_scripts_are_refused(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for name in ("empty.jsonl", "missing.jsonl"):
        with pytest.raises(StartupError, match=name):
            open_scripted(model_folder, tmp_path / name, None)
