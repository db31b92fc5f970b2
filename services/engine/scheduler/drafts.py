"""Where draft tokens come from. None are proposed by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.engine.scheduler.plan import SequenceId


class DraftSource(Protocol):
    """Guesses the next tokens of a sequence; wrong guesses cost time, never change the output."""

    def propose(self, sequence: SequenceId, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        """Up to `limit` tokens that may follow `tokens` (prompt and output so far)."""
        ...
