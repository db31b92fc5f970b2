"""Compiles the grammars of requests in the front, bounded in time and memory, and keeps them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.engine_pb2 import Grammar, ToolCallGrammar
from warhorse.v1.tokenizer_pb2 import TOOL_CHOICE_AUTO, TOOL_CHOICE_NAMED, TOOL_CHOICE_REQUIRED

from services.common.errors import ServiceError
from services.common.workers import WorkerEndedError, WorkerLimits, WorkerPool
from services.engine.grammar.forms import JSON_FORMS, MAX_TEXT

logger = logging.getLogger(__name__)

# On the clock, of a worker. Memory beyond the libraries' own.
LIMITS = WorkerLimits(seconds=5.0, memory_bytes=1 << 30)
# Of a processor. Nearly all grammars are done in the first time; the others begin again, with the
# second one, when no first attempt waits: so few wait long for a slow or hostile one.
CPU_SECONDS = (0.15, 0.75)
WORKERS = 2
MAX_KEPT_BYTES = 64 << 20
MAX_REFUSALS = 256  # remembered, so that the same hostile grammar costs its time once
_WORKER = "services.engine.grammar.worker"
FIXED_WHITESPACE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_CHOICES = {
    TOOL_CHOICE_AUTO: "auto",
    TOOL_CHOICE_REQUIRED: "required",
    TOOL_CHOICE_NAMED: "required",
}


class GrammarCompiler:
    """Completes the grammars of requests. Event loop only; `close` ends its workers."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        flags = ("--folder", str(folder), "--vocab-size", str(vocab_size))
        self._workers = WorkerPool(_WORKER, LIMITS, WORKERS, flags)
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._refusals: OrderedDict[bytes, str] = OrderedDict()
        self._compiling: dict[bytes, asyncio.Task[bytes]] = {}

    async def complete(self, grammar: Grammar) -> None:
        """Set `grammar.compiled`.

        Raises ServiceError: INVALID_FIELD naming what is wrong, INTERNAL for a fault of ours.
        """
        question = _question(grammar)
        key = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).digest()
        if key in self._refusals:
            raise refused(self._refusals[key])
        if key in self._kept:
            self._kept.move_to_end(key)
            grammar.compiled = self._kept[key]
            return
        if key not in self._compiling:
            task = asyncio.create_task(self._compile(key, question))
            task.add_done_callback(lambda _: self._compiling.pop(key))
            self._compiling[key] = task
        # One that goes away leaves it to those who ask for the same.
        grammar.compiled = await asyncio.shield(self._compiling[key])

    async def close(self) -> None:
        """End the workers."""
        for task in self._compiling.values():
            task.cancel()
        await self._workers.close()

    async def _compile(self, key: bytes, question: dict[str, Any]) -> bytes:
        reply = await self._ask(question)
        if "compiled" in reply:
            compiled = base64.b64decode(reply["compiled"])
            self._keep(key, compiled)
            return compiled
        if "fault" in reply:  # it says nothing of the grammar, so nothing is remembered
            logger.error("a grammar could not be compiled: %s", reply["fault"])
            reason = ErrorReason.ERROR_REASON_INTERNAL
            raise ServiceError(reason, "The grammar could not be compiled.")
        problem = reply.get("error", "takes too much time or memory to compile")
        self._refusals[key] = problem
        if len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)
        raise refused(problem)

    async def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The worker's reply; empty or `late` alone for a grammar that was ended."""
        reply: dict[str, Any] = {}
        for rank, seconds in enumerate(CPU_SECONDS):
            request = json.dumps({"seconds": seconds, **question}).encode()
            try:
                reply = json.loads(await self._workers.ask(request, rank))
            except WorkerEndedError:
                return {}
            if "late" not in reply:
                break
        return reply

    def _keep(self, key: bytes, compiled: bytes) -> None:
        self._kept[key] = compiled
        self._kept_bytes += len(compiled)
        while self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
            _, old = self._kept.popitem(last=False)
            self._kept_bytes -= len(old)


def _question(grammar: Grammar) -> dict[str, Any]:
    form = grammar.WhichOneof("form")
    if form is None:
        raise refused("no form is set")
    size = grammar.ByteSize()
    if size > MAX_TEXT:
        raise refused(f"has {size} bytes; at most {MAX_TEXT} are taken")
    value = getattr(grammar, form)
    if isinstance(value, ToolCallGrammar):
        value = _tool_calls(value)
    gap = grammar.HasField("after_token_id")
    return {"form": form, "value": value, "gap": gap, "whitespace": _whitespace(grammar)}


def _whitespace(grammar: Grammar) -> dict[str, Any]:
    """Rules of the whitespace between parts of JSON, in the names of llguidance."""
    has_pattern = grammar.HasField("whitespace_pattern")
    if not (has_pattern or grammar.fixed_whitespace):
        return {}
    if has_pattern and grammar.fixed_whitespace:
        raise refused("whitespace_pattern and fixed_whitespace exclude each other")
    if grammar.WhichOneof("form") not in JSON_FORMS:
        raise refused("whitespace can be ruled in JSON alone")
    return {"whitespace_pattern": grammar.whitespace_pattern} if has_pattern else FIXED_WHITESPACE


def _tool_calls(calls: ToolCallGrammar) -> dict[str, Any]:
    if calls.choice not in _CHOICES:
        raise refused("tool_calls.choice must be AUTO, REQUIRED or NAMED")
    return {
        "parser": calls.parser,
        "tools": [
            {"name": tool.name, "parameters": tool.parameters_json or '{"type":"object"}'}
            for tool in calls.tools
        ],
        "choice": _CHOICES[calls.choice],
        "tool_name": calls.tool_name if calls.choice == TOOL_CHOICE_NAMED else None,
        "parallel": not calls.HasField("parallel") or calls.parallel,
    }


def refused(problem: str) -> ServiceError:
    """The error of a grammar that is not taken."""
    reason = ErrorReason.ERROR_REASON_INVALID_FIELD
    return ServiceError(reason, f"grammar: {problem}", field="grammar")
