"""Bodies and heads that are broken, endless or too large are refused before they are read whole."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.http_protocol import MAX_HEAD_BYTES
from tests.gateway.conftest import MakeStack, Stack
from tests.gateway.test_bad_input import CHAT, TEXT, check_error, user


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"messages": [}', "not valid JSON"),
        (b'{"messages": "\xff\xfe"}', "not valid UTF-8"),
        (b'{"messages": "\\ud800"}', "not valid JSON"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b"[1]", "JSON object"),
        (b"null", "JSON object"),
        (b'"x"', "JSON object"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
async def test_broken_bodies_are_refused(stack: Stack, body: bytes, words: str) -> None:
    headers = {"content-type": "application/json"}
    response = await stack.http.post(CHAT, content=body, headers=headers)
    assert words in check_error(response, 400, None)["message"]


async def test_other_content_types_are_refused(stack: Stack) -> None:
    response = await stack.http.post(CHAT, data={"a": "b"})
    assert "application/json" in check_error(response, 400, None)["message"]


async def test_ten_megabytes_of_prompt_are_too_long(stack: Stack) -> None:
    response = await stack.chat(messages=user("word " * 2_000_000))
    assert "maximum context length" in check_error(response, 400, "messages")["message"]
    text = await stack.http.post(TEXT, json={"prompt": "word " * 2_000_000})
    assert "maximum context length" in check_error(text, 400, "prompt")["message"]
    assert stack.tokenizer.renders == []


async def test_a_prompt_just_too_long_names_the_limit(stack: Stack) -> None:
    error = check_error(await stack.chat(messages=user("x" * 600)), 400, "messages")
    assert "maximum context length of 512" in error["message"] and "606" in error["message"]


@pytest.mark.parametrize("mebibytes", [1, 3])
async def test_bodies_above_the_limit_get_an_answer(make_stack: MakeStack, mebibytes: int) -> None:
    stack = await make_stack(max_body_mb=1)
    response = await stack.chat(messages=user("x" * (mebibytes << 20)))
    assert check_error(response, 413, None)["type"] == "request_too_large"


async def test_more_messages_than_tokens_are_refused_unread(stack: Stack) -> None:
    error = check_error(await stack.chat(messages=user("x") * 513), 400, "messages")
    assert "513 messages" in error["message"] and "maximum context length" in error["message"]
    assert stack.tokenizer.renders == []


@pytest.mark.parametrize(
    ("path", "field", "value", "words"),
    [
        (CHAT, "messages", user("x") * 33_333, "33333 messages"),
        (CHAT, "messages", user("x") * 33_334, "may hold 100000 fields and items"),
        (CHAT, "messages", [{"content": [{}] * 99_999}], "may hold 100000 fields and items"),
        (CHAT, "chat_template_kwargs", dict.fromkeys(map(str, range(100_001))), "hold 100000"),
        (TEXT, "prompt", [[1]] * 100_001, "hold 100000"),
        (TEXT, "prompt", [1] * 100_001, "maximum context length"),
    ],
)
async def test_bodies_that_take_long_to_check_are_refused(
    stack: Stack, path: str, field: str, value: object, words: str
) -> None:
    response = await stack.http.post(path, json={"messages": user("x"), field: value})
    assert words in check_error(response, 400, field)["message"]
    assert stack.tokenizer.renders == []


async def test_an_endless_chunked_body_is_cut_at_the_limit(make_stack: MakeStack) -> None:
    stack = await make_stack(max_body_mb=1)
    host, port = stack.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(17):
        writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)
    assert b" 413 " in answer
    writer.close()


async def test_an_endless_header_is_cut_at_the_limit(stack: Stack) -> None:
    host, port = stack.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: ")
    for _ in range(MAX_HEAD_BYTES // 65536 + 1):
        writer.write(b"x" * 65536)
    assert b" 400 " in await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)
    writer.close()


async def test_requests_of_one_connection_have_a_head_each(stack: Stack) -> None:
    host, port = stack.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    size = MAX_HEAD_BYTES * 2 // 3
    for _ in range(3):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"x" * size + b"\r\n\r\n")
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    writer.close()


async def test_a_client_that_leaves_during_its_body_is_no_fault_of_ours(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = stack.url.removeprefix("http://").split(":")
    caplog.set_level("INFO", "services.gateway.access")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Content-Length: 100\r\n\r\n{")
    await asyncio.sleep(0.2)
    writer.close()
    await asyncio.sleep(0.2)
    assert (await stack.chat()).status_code == 200
    assert any("/chat/completions 400" in record.message for record in caplog.records)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
