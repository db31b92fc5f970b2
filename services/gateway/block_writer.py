"""What the writers of block-wise interfaces share: how events become blocks."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.blocks import BlockList
from services.gateway.events import Ended, Event, Restarted, Update
from services.gateway.generation import EventStream


class BlockCollector:
    """Collects all events of the one choice; a body is written from them at the end."""

    keep_alive = b""

    def __init__(self, stream: EventStream) -> None:
        self.stream = stream
        self.blocks = BlockList()
        self.ended: Ended | None = None

    async def feed(self, events: Sequence[Event]) -> bytes:
        """Collect; nothing is sent before the end."""
        for event in events:
            match event:
                case Update():
                    self.blocks.feed(event.pieces)
                case Ended():
                    self.ended = event
                case Restarted():
                    self.blocks = BlockList()
        return b""
