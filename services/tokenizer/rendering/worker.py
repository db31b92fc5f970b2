"""The process that renders templates, so that a template can be stopped for certain.

A template can loop without end inside one operation, which nothing inside Python can interrupt.
Here the kernel ends the process: by an alarm when a rendering takes too long, by the limit of its
address space when it takes too much memory. The parent starts another one.

Frames in both directions: length (4 bytes, little-endian), then JSON. In: {"template", "context"}.
Out: {"text"} or {"error", "kind"} where kind is "refused" (raise_exception) or "failed".
Run by `rendering.pool`; the process ends at the end of its input.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import struct
import sys
from functools import lru_cache
from typing import Any, BinaryIO

import jinja2

from services.tokenizer.rendering.environment import TemplateRefusalError, make_environment

_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_CHARS = 300


class _TooLongError(Exception):
    """The output is longer than allowed."""


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return make_environment().from_string(source)


def _render(source: str, context: dict[str, Any], max_chars: int) -> str:
    parts: list[str] = []
    size = 0
    for part in _compiled(source).generate(context):
        size += len(part)
        if size > max_chars:
            raise _TooLongError
        parts.append(part)
    return "".join(parts)


def answer(request: dict[str, Any], max_chars: int) -> dict[str, Any]:
    """Return the reply to one request. Whatever a template does wrong is a reply."""
    try:
        return {"text": _render(request["template"], request["context"], max_chars)}
    except TemplateRefusalError as error:
        return _failure("refused", str(error))
    except _TooLongError:
        return _failure("failed", f"it writes more than {max_chars} characters")
    except jinja2.TemplateSyntaxError as error:
        return _failure("failed", f"line {error.lineno}: {error.message}")
    except MemoryError:
        return _failure("failed", "it needs too much memory")
    except Exception as error:  # a template is a program and may raise anything
        return _failure("failed", f"{type(error).__name__}: {error}")


def _failure(kind: str, message: str) -> dict[str, Any]:
    return {"kind": kind, "error": message[:_MAX_MESSAGE_CHARS]}


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    message: dict[str, Any] = json.loads(stream.read(_LENGTH.unpack(head)[0]))
    return message


def _write(stream: BinaryIO, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def main() -> None:
    """Answer requests until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--max-chars", type=int, required=True)
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (arguments.memory_bytes, arguments.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while (request := _read(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_REAL, arguments.seconds)
        reply = answer(request, arguments.max_chars)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(sys.stdout.buffer, reply)


if __name__ == "__main__":
    main()
