"""The process that compiles grammars, so that a hostile one can be stopped for certain.

Requests and replies are JSON. In: {"form", "value", "gap", "whitespace"}. Out: {"compiled"}
(base64) or {"error"}. Run by `grammar.service`.
"""

from __future__ import annotations

import base64
import json
import resource
import signal
from pathlib import Path
from typing import Any

from services.common.worker_process import answer_requests, arguments
from services.engine.grammar.compiled import compile_grammar
from services.engine.grammar.forms import GrammarError

# Of a processor, so that other work on the machine makes no grammar fail. A grammar that ends its
# worker is tried once more.
CPU_SECONDS = 0.4


def _answer(request: dict[str, Any], folder: Path, vocab_size: int) -> dict[str, Any]:
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # ends the process
    try:
        compiled = compile_grammar(**request, folder=folder, vocab_size=vocab_size)
    except GrammarError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "it needs too much memory"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"compiled": base64.b64encode(compiled).decode()}


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
        return json.dumps(_answer(json.loads(request), given.folder, given.vocab_size)).encode()

    answer_requests(reply, given.seconds, _address_space() + given.memory_bytes)


if __name__ == "__main__":
    main()
