"""Requests to a running tokenizer service, for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc
import pytest
from warhorse.v1 import tokenizer_pb2

from services.common.errors import ServiceError, from_rpc_error
from services.tokenizer.wire import unpack_ids
from tests.tokenizer.support import TOOLS

Stub = Any
OPEN = tokenizer_pb2.PARSE_STATE_REASONING


def message(role: str, *texts: str, **fields: Any) -> tokenizer_pb2.ChatMessage:
    parts = [tokenizer_pb2.ContentPart(text=text) for text in texts]
    return tokenizer_pb2.ChatMessage(role=role, content=parts, **fields)


def tools(*names: str) -> list[tokenizer_pb2.Tool]:
    return [tokenizer_pb2.Tool(name=n, parameters_json=json.dumps(TOOLS[n])) for n in names]


def render(stub: Stub, *messages: tokenizer_pb2.ChatMessage, **fields: Any) -> Any:
    return stub.Render(tokenizer_pb2.RenderRequest(messages=messages, **fields))


def refusal(call: Callable[[], object]) -> ServiceError:
    """The error that a call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return from_rpc_error(caught.value)


def encode(stub: Stub, text: str) -> list[int]:
    request = tokenizer_pb2.EncodeRequest(text=text, parse_special=True)
    return list(unpack_ids(stub.Encode(request).token_ids, "token_ids"))


def events(
    opening: tokenizer_pb2.ParseOpen,
    batches: Iterable[list[int]],
    reason: tokenizer_pb2.FinishReason = tokenizer_pb2.FINISH_REASON_STOP,
) -> Iterator[tokenizer_pb2.ParseRequest]:
    yield tokenizer_pb2.ParseRequest(open=opening)
    for ids in batches:
        yield tokenizer_pb2.ParseRequest(tokens=tokenizer_pb2.ParseTokens(token_ids=ids))
    yield tokenizer_pb2.ParseRequest(finish=tokenizer_pb2.ParseFinish(reason=reason))


def joined(answers: Iterable[tokenizer_pb2.ParseResponse]) -> dict[str, Any]:
    """All deltas added up."""
    out: dict[str, Any] = {"reasoning": "", "content": "", "calls": {}}
    for answer in answers:
        for delta in answer.deltas:
            kind = delta.WhichOneof("kind")
            if kind == "tool_call":
                call = out["calls"].setdefault(delta.tool_call.index, [delta.tool_call.name, ""])
                call[1] += delta.tool_call.arguments
            else:
                out[kind] += getattr(delta, kind)
    return out
