"""How long the gateway waits for its clients."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TICK = 5.0


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: idle time before a keep-alive comment (0: never), and for a stalled client."""

    keep_alive: float
    stall: float

    @property
    def tick(self) -> float:
        """How often both are looked at."""
        return min(MAX_TICK, self.stall / 4, self.keep_alive / 2 or MAX_TICK)
