"""The script of a scripted engine: JSON lines that say what to answer to which prompt.

Each line is an object {"when": {"prompt_contains": str} | {}, "text": str | null,
"token_ids": [int] | null, "chunk": int, "delay_ms": float, "aligned": bool,
"finish_reason": "stop" | "length"}; exactly one of text and token_ids is given. `chunk` tokens
travel in a message, each `delay_ms` milliseconds after the one before. With `aligned` they come at
multiples of `delay_ms` of the monotonic clock, as the steps of a batch do: for all requests at the
same moments. Left out: chunk 1, delay_ms 0, aligned false, finish_reason stop, when {}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warhorse.v1.tokenizer_pb2 import FinishReason

from services.common.errors import StartupError

REASONS = {
    "stop": FinishReason.FINISH_REASON_STOP,
    "length": FinishReason.FINISH_REASON_LENGTH,
}
KEYS = {"when", "text", "token_ids", "chunk", "delay_ms", "aligned", "finish_reason"}

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class ScriptLine:
    """One answer. `prompt_contains` None matches every prompt; `delay_seconds` is per message."""

    prompt_contains: str | None
    token_ids: tuple[int, ...]
    chunk: int
    delay_seconds: float
    aligned: bool
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Script:
    """Answers in the order of the file; the first that matches a prompt is given."""

    lines: tuple[ScriptLine, ...]

    @property
    def needs_text(self) -> bool:
        """Whether any line looks at the prompt's text."""
        return any(line.prompt_contains is not None for line in self.lines)

    def find(self, prompt_text: str) -> ScriptLine | None:
        """The first line that matches, or None."""
        for line in self.lines:
            if line.prompt_contains is None or line.prompt_contains in prompt_text:
                return line
        return None


def load_script(path: Path, encode: Encode, vocab_size: int) -> Script:
    """Read and check `path`. Raises StartupError naming the line, the key and its value."""
    try:
        rows = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"script {path}: {error}") from error
    lines = []
    for number, row in enumerate(rows, start=1):
        if not row.strip():
            continue
        try:
            lines.append(_parse_line(row, encode, vocab_size))
        except ValueError as error:
            raise StartupError(f"script {path}, line {number}: {error}") from error
    if not lines:
        raise StartupError(f"script {path} has no lines")
    return Script(tuple(lines))


def _parse_line(row: str, encode: Encode, vocab_size: int) -> ScriptLine:
    line = json.loads(row)
    if not isinstance(line, dict):
        raise ValueError(f"must be an object, is {row.strip()[:40]}")
    _refuse_unknown(line, KEYS, "key")
    reason = line.get("finish_reason", "stop")
    if not isinstance(reason, str) or reason not in REASONS:
        raise ValueError(f'finish_reason is {reason!r}; must be "stop" or "length"')
    return ScriptLine(
        prompt_contains=_condition(line.get("when", {})),
        token_ids=_tokens(line, encode, vocab_size),
        chunk=_chunk(line.get("chunk", 1)),
        delay_seconds=_delay(line.get("delay_ms", 0.0)),
        aligned=_flag(line, "aligned"),
        finish_reason=REASONS[reason],
    )


def _refuse_unknown(found: dict[str, Any], known: set[str], what: str) -> None:
    unknown = sorted(found.keys() - known)
    if unknown:
        raise ValueError(f"unknown {what} {unknown[0]!r}; known: {', '.join(sorted(known))}")


def _condition(when: object) -> str | None:
    if not isinstance(when, dict):
        raise ValueError(f"when is {when!r}; must be an object")
    _refuse_unknown(when, {"prompt_contains"}, "key of when")
    if "prompt_contains" not in when:
        return None
    wanted = when["prompt_contains"]
    if not isinstance(wanted, str):
        raise ValueError(f"when.prompt_contains is {wanted!r}; must be a string")
    return wanted


def _tokens(line: dict[str, Any], encode: Encode, vocab_size: int) -> tuple[int, ...]:
    text, ids = line.get("text"), line.get("token_ids")
    if (text is None) == (ids is None):
        raise ValueError("exactly one of text and token_ids must be given")
    if text is not None:
        if not isinstance(text, str):
            raise ValueError(f"text is {text!r}; must be a string")
        return tuple(encode(text))
    if not isinstance(ids, list):
        raise ValueError(f"token_ids is {ids!r}; must be a list of integers")
    for index, token in enumerate(ids):
        if not _is_integer(token) or not 0 <= token < vocab_size:
            raise ValueError(f"token_ids[{index}] is {token!r}; must be 0 to {vocab_size - 1}")
    return tuple(ids)


def _chunk(value: object) -> int:
    if not isinstance(value, int) or not _is_integer(value) or value < 1:
        raise ValueError(f"chunk is {value!r}; must be an integer of at least 1")
    return value


def _delay(value: object) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ValueError(f"delay_ms is {value!r}; must be a number of at least 0")
    return float(value) / 1000  # type: ignore[arg-type]


def _flag(line: dict[str, Any], key: str) -> bool:
    value = line.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}; must be true or false")
    return value


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
