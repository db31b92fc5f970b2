"""How a compiling process ends, and what its end means for the request."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.engine_pb2 import Grammar

from services.common.errors import ServiceError
from services.engine.grammar import worker
from services.engine.grammar.errors import GrammarError
from services.engine.grammar.service import GrammarCompiler
from tests.engine.grammar.support import NANO, VOCAB

QUESTION = {"seconds": 5.0, "form": "regex", "value": "a", "gap": False, "whitespace": {}}


class Panic(BaseException):
    """As llguidance has it."""


def raise_(error: BaseException) -> None:
    raise error


def kill(number: signal.Signals) -> None:
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)  # as in a worker
    os.kill(os.getpid(), number)
    signal.pause()


def spin() -> None:
    while True:
        pass


# What compiling does, with how much time of a processor, and the reply.
ENDS: list[tuple[Callable[[], Any], float, str]] = [
    (lambda: b"xyz", 5.0, '{"compiled": "eHl6"}'),
    (lambda: raise_(GrammarError("bad")), 5.0, '{"error": "bad"}'),
    (lambda: raise_(MemoryError()), 5.0, '{"error": "it needs too much memory"}'),
    (spin, 0.05, '{"late": true}'),
    (lambda: kill(signal.SIGALRM), 5.0, '{"late": true}'),
    (lambda: kill(signal.SIGKILL), 5.0, '{"fault": "status -9 of the compiling process"}'),
    (lambda: kill(signal.SIGSEGV), 5.0, '{"fault": "status -11 of the compiling process"}'),
    (lambda: raise_(KeyError("k")), 5.0, '{"fault": "status 1 of the compiling process"}'),
    (lambda: raise_(Panic()), 5.0, '{"fault": "status 1 of the compiling process"}'),
    (lambda: os._exit(0), 5.0, '{"fault": "status 0 of the compiling process"}'),
]


@pytest.mark.parametrize(("compiling", "seconds", "reply"), ENDS)
def test_reply_says_how_compiling_ended(
    monkeypatch: pytest.MonkeyPatch, compiling: Callable[[], Any], seconds: float, reply: str
) -> None:
    monkeypatch.setattr(worker, "compile_grammar", lambda **_: compiling())
    question = json.dumps({**QUESTION, "seconds": seconds}).encode()
    assert worker._in_child(question, NANO, VOCAB, seconds=5.0).decode() == reply


@pytest.mark.asyncio
async def test_fault_is_an_internal_error_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = GrammarCompiler(NANO, VOCAB)
    replies = [b'{"fault": "status -11"}', b'{"compiled": "eHl6"}']

    async def ask(request: bytes, rank: int = 0) -> bytes:
        return replies.pop(0)

    monkeypatch.setattr(compiler._workers, "ask", ask)
    grammar = Grammar(regex="a")
    with pytest.raises(ServiceError) as caught:
        await compiler.complete(grammar)
    assert caught.value.reason == ErrorReason.ERROR_REASON_INTERNAL
    assert "status -11" in caplog.text and "status" not in caught.value.message
    await compiler.complete(grammar)
    assert grammar.compiled == b"xyz" and replies == []
    await compiler.close()
