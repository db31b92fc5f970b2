"""The process that renders templates, so that a template can be stopped for certain.

Requests and replies are JSON. In: {"template", "context"}; without a context (null) the template is
compiled alone. Out: {"text"} or {"error", "kind"} where
kind is "refused" (raise_exception) or "failed". Run by `rendering.pool`.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import jinja2

from services.common.worker_process import answer_requests, arguments
from services.tokenizer.rendering.environment import TemplateRefusalError, make_environment

_MAX_MESSAGE_CHARS = 300


class _TooLongError(Exception):
    """The output is longer than allowed."""


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return make_environment().from_string(source)


def _render(source: str, context: dict[str, Any] | None, max_chars: int) -> str:
    if context is None:
        _compiled(source)
        return ""
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


def main() -> None:
    """Answer requests until the input ends."""
    parser = arguments()
    parser.add_argument("--max-chars", type=int, required=True)
    given = parser.parse_args()

    def reply(request: bytes) -> bytes:
        return json.dumps(answer(json.loads(request), given.max_chars)).encode()

    answer_requests(reply, given.seconds, given.memory_bytes)


if __name__ == "__main__":
    main()
