"""Bodies and events of the Messages interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from services.gateway.block_writer import BlockCollector
from services.gateway.blocks import Block, BlockKind, BlockList, Change, Closed, Grown, Opened
from services.gateway.chat_options import Envelope
from services.gateway.errors import ApiError
from services.gateway.events import Ended, Event, Update, Usage
from services.gateway.generation import EventStream
from services.gateway.messages.errors import error_body

# Clients hand it back with the thinking; it proves nothing here and any other is taken too.
SIGNATURE = "d2FyaG9yc2U="


class MessageBodyWriter(BlockCollector):
    """Collects all events and writes one message at the end."""

    def __init__(self, envelope: Envelope, stream: EventStream) -> None:
        super().__init__(stream)
        self._envelope = envelope

    async def finish(self) -> bytes:
        """The message."""
        body = message_head(self._envelope)
        body["content"] = [block_body(block) for block in self.blocks.blocks]
        body |= stop_fields(self.ended, self.blocks)
        body["usage"] = usage_fields(self.stream.usage())
        return orjson.dumps(body)

    def fail(self, error: ApiError) -> bytes:
        """Nothing was sent yet."""
        return orjson.dumps(error_body(error))


class MessageStreamWriter:
    """Events: the message, its blocks one after the other, the reason of the end."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, envelope: Envelope, stream: EventStream) -> None:
        self._envelope = envelope
        self._stream = stream
        self._blocks = BlockList()
        self._ended: Ended | None = None
        self._started = False

    async def feed(self, events: Sequence[Event]) -> bytes:
        """Frames for a batch of events."""
        frames: list[bytes] = []
        for event in events:
            if not self._started:
                self._start(frames)
            if isinstance(event, Update):
                frames += map(_change, self._blocks.feed(event.pieces))
            elif isinstance(event, Ended):
                self._ended = event
        return b"".join(frames)

    async def finish(self) -> bytes:
        """The end of the last block, the reason, the end of the message."""
        frames: list[bytes] = []
        if not self._started:
            self._start(frames)
        frames += map(_change, self._blocks.close())
        delta = stop_fields(self._ended, self._blocks)
        usage = usage_fields(self._stream.usage())
        frames.append(frame("message_delta", {"delta": delta, "usage": usage}))
        frames.append(frame("message_stop", {}))
        return b"".join(frames)

    def fail(self, error: ApiError) -> bytes:
        """The last event of a stream that broke."""
        return b"event: error\ndata: " + orjson.dumps(error_body(error)) + b"\n\n"

    def _start(self, frames: list[bytes]) -> None:
        self._started = True
        usage = usage_fields(self._stream.usage()) | {"output_tokens": 0}
        message = message_head(self._envelope) | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        frames.append(frame("message_start", {"message": message}))


def message_head(envelope: Envelope) -> dict[str, Any]:
    """The fields that a message has from its start."""
    return {"id": envelope.id, "type": "message", "role": "assistant", "model": envelope.model}


def block_body(block: Block) -> dict[str, Any]:
    """A complete block."""
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text", "text": block.text}
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
        case BlockKind.CALL:
            arguments = _object(block.text)
            return {
                "type": "tool_use",
                "id": block.call_id,
                "name": block.name,
                "input": arguments,
            }


def stop_fields(ended: Ended | None, blocks: BlockList) -> dict[str, Any]:
    """Why the message ended."""
    matched = ended.stop_reason if ended and isinstance(ended.stop_reason, str) else None
    reason = "end_turn"
    if ended and ended.finish_reason == "length":
        reason = "max_tokens"
    elif blocks.has_calls:
        reason = "tool_use"
    elif matched is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": matched}


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Counts; cached tokens are counted apart from the other input tokens."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion,
    }


def frame(event: str, fields: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return b"event: %s\ndata: " % event.encode() + orjson.dumps({"type": event, **fields}) + b"\n\n"


def _change(change: Change) -> bytes:
    match change:
        case Opened(block):
            return frame(
                "content_block_start", {"index": block.index, "content_block": _empty(block)}
            )
        case Grown(block, text):
            return _delta(block, {"type": _DELTAS[block.kind][0], _DELTAS[block.kind][1]: text})
        case Closed(block):
            end = frame("content_block_stop", {"index": block.index})
            if block.kind is not BlockKind.REASONING:
                return end
            return _delta(block, {"type": "signature_delta", "signature": SIGNATURE}) + end


_DELTAS = {
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


def _delta(block: Block, delta: dict[str, Any]) -> bytes:
    return frame("content_block_delta", {"index": block.index, "delta": delta})


def _empty(block: Block) -> dict[str, Any]:
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text", "text": ""}
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case BlockKind.CALL:
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _object(text: str) -> dict[str, Any]:
    """Arguments as an object; a call that the length limit cut is shown as far as it is JSON."""
    try:
        value = orjson.loads(text) if text else {}
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
