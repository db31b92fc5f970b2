"""Bodies and events of the Responses interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from services.gateway.block_writer import BlockCollector
from services.gateway.blocks import Block, BlockKind, BlockList, Change, Closed, Grown, Opened
from services.gateway.errors import ApiError
from services.gateway.events import Ended, Event, Update
from services.gateway.generation import EventStream
from services.gateway.responses.body import ResponseHead, text_part
from services.gateway.responses.tools import plain_input

OnFinal = Callable[[dict[str, Any]], None]


class ResponseBodyWriter(BlockCollector):
    """Collects all events and writes one object. `on_final` gets it before it is sent."""

    def __init__(self, head: ResponseHead, stream: EventStream, on_final: OnFinal) -> None:
        super().__init__(stream)
        self._head = head
        self._on_final = on_final

    async def finish(self) -> bytes:
        """The response object."""
        body = self._head.final(self.blocks, self.ended, self.stream.usage())
        self._on_final(body)
        return orjson.dumps(body)

    def fail(self, error: ApiError) -> bytes:
        """Nothing was sent yet."""
        return orjson.dumps(error.body())


class ResponseStreamWriter:
    """Numbered events: the response, its items one after the other, the final response."""

    keep_alive = b": keep-alive\n\n"

    def __init__(self, head: ResponseHead, stream: EventStream, on_final: OnFinal) -> None:
        self._head = head
        self._stream = stream
        self._on_final = on_final
        self._blocks = BlockList()
        self._ended: Ended | None = None
        self._number = 0

    async def feed(self, events: Sequence[Event]) -> bytes:
        """Frames for a batch of events."""
        frames: list[bytes] = [] if self._number else self._start()
        for event in events:
            if isinstance(event, Update):
                for change in self._blocks.feed(event.pieces):
                    frames += self._change(change)
            elif isinstance(event, Ended):
                self._ended = event
        return b"".join(frames)

    async def finish(self) -> bytes:
        """The end of the last item and the final response."""
        frames: list[bytes] = [] if self._number else self._start()
        for change in self._blocks.close():
            frames += self._change(change)
        body = self._head.final(self._blocks, self._ended, self._stream.usage())
        self._on_final(body)
        frames.append(self._frame(f"response.{body['status']}", response=body))
        return b"".join(frames)

    def fail(self, error: ApiError) -> bytes:
        """The last event of a stream that broke."""
        begun = b"" if self._number else b"".join(self._start())
        return begun + self._frame("response.failed", response=self._head.failed(error))

    def _start(self) -> list[bytes]:
        body = self._head.body("in_progress")
        return [
            self._frame("response.created", response=body),
            self._frame("response.in_progress", response=body),
        ]

    def _change(self, change: Change) -> list[bytes]:
        match change:
            case Opened(block):
                return self._opened(block)
            case Grown(block, text):
                return self._grown(block, text)
            case Closed(block):
                return self._closed(block)

    def _opened(self, block: Block) -> list[bytes]:
        item = self._head.item(block, "in_progress")
        added = self._frame("response.output_item.added", output_index=block.index, item=item)
        if block.kind is not BlockKind.TEXT:
            return [added]
        part = self._of("response.content_part.added", block, content_index=0, part=text_part(""))
        return [added, part]

    def _grown(self, block: Block, text: str) -> list[bytes]:
        match block.kind:
            case BlockKind.TEXT:
                event = "response.output_text.delta"
                return [self._of(event, block, content_index=0, delta=text, logprobs=[])]
            case BlockKind.REASONING:
                return [
                    self._of("response.reasoning_text.delta", block, content_index=0, delta=text)
                ]
            case BlockKind.CALL if self._is_custom(block):
                return []  # its plain text is known when the arguments are complete
            case BlockKind.CALL:
                return [self._of("response.function_call_arguments.delta", block, delta=text)]

    def _closed(self, block: Block) -> list[bytes]:
        cut = self._ended is not None and self._ended.finish_reason == "length"
        last = block is self._blocks.blocks[-1]
        item = self._head.item(block, "incomplete" if cut and last else "completed")
        frames = self._complete(block)
        frames.append(self._frame("response.output_item.done", output_index=block.index, item=item))
        return frames

    def _complete(self, block: Block) -> list[bytes]:
        text = block.text
        match block.kind:
            case BlockKind.TEXT:
                part = text_part(text)
                return [
                    self._of(
                        "response.output_text.done", block, content_index=0, text=text, logprobs=[]
                    ),
                    self._of("response.content_part.done", block, content_index=0, part=part),
                ]
            case BlockKind.REASONING:
                return [self._of("response.reasoning_text.done", block, content_index=0, text=text)]
            case BlockKind.CALL if self._is_custom(block):
                given = plain_input(text)
                return [
                    self._of("response.custom_tool_call_input.delta", block, delta=given),
                    self._of("response.custom_tool_call_input.done", block, input=given),
                ]
            case BlockKind.CALL:
                event = "response.function_call_arguments.done"
                return [self._of(event, block, name=block.name, arguments=text)]

    def _is_custom(self, block: Block) -> bool:
        return block.name in self._head.names.custom

    def _of(self, event: str, block: Block, **fields: Any) -> bytes:
        """An event about one item."""
        item_id = self._head.item_id(block)
        return self._frame(event, item_id=item_id, output_index=block.index, **fields)

    def _frame(self, event: str, **fields: Any) -> bytes:
        data = {"type": event, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: %s\ndata: " % event.encode() + orjson.dumps(data) + b"\n\n"
