"""Renders templates in worker processes, one request each at a time."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

from services.common.workers import WorkerEndedError, WorkerLimits, WorkerPool

_WORKER = "services.tokenizer.rendering.worker"

logger = logging.getLogger(__name__)


class RenderError(Exception):
    """A template did not give a prompt; the text says why and names no file."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one rendering may take."""

    seconds: float = 5.0
    memory_bytes: int = 2 << 30
    max_chars: int = 16_000_000
    max_template_chars: int = 262_144


class RenderPool:
    """Workers of one kind of template. Requests wait for a free worker in order of arrival."""

    def __init__(self, limits: RenderLimits, workers: int) -> None:
        self._limits = limits
        self._workers = WorkerPool(
            _WORKER,
            WorkerLimits(limits.seconds, limits.memory_bytes),
            workers,
            ("--max-chars", str(limits.max_chars)),
        )

    async def render(self, template: str, context: dict[str, Any]) -> str:
        """Return the text of a template. Raises RenderError."""
        return await self._ask(template, context)

    async def check(self, template: str) -> None:
        """Compile a template, so that its faults show before its first use. Raises RenderError."""
        await self._ask(template, None)

    async def _ask(self, template: str, context: dict[str, Any] | None) -> str:
        if len(template) > self._limits.max_template_chars:
            limit = self._limits.max_template_chars
            raise RenderError(f"the template is longer than {limit} characters")
        request = json.dumps({"template": template, "context": context}).encode()
        try:
            reply = json.loads(await self._workers.ask(request))
        except WorkerEndedError as error:
            seconds = self._limits.seconds
            raise RenderError(f"it took more than {seconds:g} s or too much memory") from error
        if "text" not in reply:
            logger.info("template %s", reply["kind"])
            raise RenderError(reply["error"])
        text: str = reply["text"]
        return text

    async def start(self) -> None:
        """Start all workers now instead of with their first request."""
        await self._workers.start()

    async def close(self) -> None:
        """End all workers."""
        await self._workers.close()
