"""Arguments of earlier tool calls as objects, whatever a client sends back."""

from __future__ import annotations

import json
from typing import Any

_CLOSERS = {"{": "}", "[": "]"}
_MAX_DECODES = 2


def argument_object(text: str) -> dict[str, Any]:
    """Return the arguments as an object.

    Also for JSON in a JSON string and for JSON that was cut off; other text is kept whole under
    the key "arguments", so that a conversation stays usable.
    """
    value: Any = text.strip()
    if not value:
        return {}
    for _ in range(_MAX_DECODES):
        if not isinstance(value, str):
            break
        value = _parsed(value)
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"arguments": text}


def _parsed(text: str) -> Any:
    """Return the value of JSON or of repaired JSON; False when it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        repaired = _completed(text)
    if repaired is None:
        return False
    try:
        return json.loads(repaired)
    except (ValueError, RecursionError):
        return False


def _completed(text: str) -> str | None:
    """Return a cut object with what is open closed and an unfinished member dropped."""
    if not text.startswith("{"):
        return None
    open_brackets: list[str] = []
    in_string = escaped = False
    # The last place at which everything so far is whole, with what closes it there.
    whole: tuple[int, str] | None = None
    for index, char in enumerate(text):
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
            continue
        match char:
            case '"':
                in_string = True
            case "{" | "[":
                open_brackets.append(_CLOSERS[char])
                whole = index + 1, _closing(open_brackets)
            case "}" | "]":
                if not open_brackets or open_brackets.pop() != char:
                    return None
                whole = index + 1, _closing(open_brackets)
            case ",":
                whole = index, _closing(open_brackets)
    closing = _closing(open_brackets)
    candidates = [text + '"' + closing] if in_string and not escaped else [text + closing]
    if whole is not None:
        candidates.append(text[: whole[0]] + whole[1])
    return next((candidate for candidate in candidates if _is_json(candidate)), None)


def _closing(open_brackets: list[str]) -> str:
    return "".join(reversed(open_brackets))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
