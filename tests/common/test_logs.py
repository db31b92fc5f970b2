"""Log lines are JSON objects that carry the request they belong to."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from services.common.logs import JsonFormatter, request_id_var, setup_logging


def record(message: str, **extra: object) -> logging.LogRecord:
    return logging.getLogger("x").makeRecord(
        "x", logging.WARNING, "f.py", 1, message, (), None, extra=extra
    )


def test_a_line_has_service_level_message_and_extra_fields() -> None:
    line = json.loads(JsonFormatter("engine").format(record("two\nlines", pages=3)))
    assert line["service"] == "engine"
    assert line["level"] == "warning"
    assert line["message"] == "two\nlines"
    assert line["pages"] == 3
    assert "request_id" not in line


def test_the_request_id_of_the_context_is_in_the_line() -> None:
    token = request_id_var.set("req-1")
    try:
        line = json.loads(JsonFormatter("engine").format(record("x")))
    finally:
        request_id_var.reset(token)
    assert line["request_id"] == "req-1"


def test_a_traceback_stays_on_one_line() -> None:
    entry = record("failed")
    try:
        raise KeyError("k")
    except KeyError:
        entry.exc_info = sys.exc_info()
    text = JsonFormatter("engine").format(entry)
    assert "\n" not in text
    assert "KeyError: 'k'" in json.loads(text)["exception"]


def test_an_extra_field_cannot_replace_a_standard_one() -> None:
    line = json.loads(JsonFormatter("engine").format(record("x", service="fake")))
    assert line["service"] == "engine"


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="'loud' is not one of"):
        setup_logging("engine", "loud")
