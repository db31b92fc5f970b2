"""The process that compiles grammars, so that a hostile one can be stopped for certain.

Requests and replies are JSON. In: {"seconds", "form", "value", "gap", "whitespace"}, the seconds
being those of a processor, so that other work on the machine makes no grammar fail. Out:
{"compiled"} (base64), {"error"}, {"late": true} where that time was not enough, or {"fault"} where
we or a library failed: how the child ended. Every grammar is compiled by a child of its own, which
has the libraries and the vocabulary from its start: one that is ended costs its own time alone. Run
by `grammar.service`.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import resource
import signal
from pathlib import Path
from typing import Any

from services.common.worker_process import answer_requests, arguments
from services.engine.grammar.compiled import compile_grammar
from services.engine.grammar.errors import GrammarError

logger = logging.getLogger(__name__)
_ALARMS = (signal.SIGPROF, signal.SIGALRM)


def _answer(request: dict[str, Any], folder: Path, vocab_size: int) -> dict[str, Any]:
    signal.setitimer(signal.ITIMER_PROF, request.pop("seconds"))  # ends the process
    try:
        compiled = compile_grammar(**request, folder=folder, vocab_size=vocab_size)
    except GrammarError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "it needs too much memory"}
    return {"compiled": base64.b64encode(compiled).decode()}


def _in_child(question: bytes, folder: Path, vocab_size: int, seconds: float) -> bytes:
    """The reply of a child, or how it ended without one. `seconds`: on the clock."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            reply = json.dumps(_answer(json.loads(question), folder, vocab_size)).encode()
            with open(writing, "wb") as pipe:
                pipe.write(reply)
            status = 0
        except BaseException:  # panics of llguidance are no Exception
            logger.exception("a grammar could not be compiled")
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, "rb") as pipe:
        reply = pipe.read()
    return _reply(reply, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _reply(reply: bytes, status: int) -> bytes:
    """`status`: of the child's exit, or less than zero: the signal that ended it."""
    if status == 0 and reply:
        return reply
    if -status in _ALARMS:
        return b'{"late": true}'
    return json.dumps({"fault": f"status {status} of the compiling process"}).encode()


def _address_space() -> int:
    """Bytes that the libraries have mapped by now."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _warm_up(folder: Path, vocab_size: int) -> None:
    """What the first grammars would wait for; the time of a request is limited."""
    for value in ('{"type": "integer"}', '{"type": "integer", "multipleOf": 2}'):
        compile_grammar("json_schema", value, gap=True, folder=folder, vocab_size=vocab_size)


def main() -> None:
    """Answer requests until the input ends."""
    parser = arguments()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    given = parser.parse_args()
    _warm_up(given.folder, given.vocab_size)

    def reply(request: bytes) -> bytes:
        return _in_child(request, given.folder, given.vocab_size, given.seconds)

    answer_requests(reply, given.seconds, _address_space() + given.memory_bytes)


if __name__ == "__main__":
    main()
