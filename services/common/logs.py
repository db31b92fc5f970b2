"""Log lines as JSON objects on stderr, each with the id of the request it belongs to."""

from __future__ import annotations

import json
import logging
import os
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

LogLevel = Literal["debug", "info", "warning", "error"]

request_id_var: ContextVar[str] = ContextVar("request_id", default="")

_STANDARD_FIELDS = frozenset(
    logging.LogRecord("", 0, "", 0, "", (), None).__dict__.keys()
    | {"message", "asctime", "taskName"}
)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object; `extra=` fields become keys of the object."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "service": self._service,
            "pid": os.getpid(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := request_id_var.get():
            line["request_id"] = request_id
        extra = record.__dict__.keys() - _STANDARD_FIELDS - line.keys()
        line.update((key, record.__dict__[key]) for key in sorted(extra))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def setup_logging(service: str, level: str = "info") -> None:
    """Send all log records of this process to stderr as JSON lines; replaces earlier handlers.

    `level` is debug, info, warning or error; anything else raises ValueError.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"log level {level!r} is not one of debug, info, warning, error")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    logging.basicConfig(level=number, handlers=[handler], force=True)
    logging.captureWarnings(True)
