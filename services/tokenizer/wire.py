"""Messages of tokenizer.proto to and from the types of this package."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

from warhorse.v1 import tokenizer_pb2

from services.tokenizer.parsing.deltas import CallDelta, ContentDelta, Finish, ReasoningDelta
from services.tokenizer.rendering.conversation import refuse
from services.tokenizer.session import Update

_TO_FINISH = {
    tokenizer_pb2.FINISH_REASON_UNSPECIFIED: Finish.STOP,
    tokenizer_pb2.FINISH_REASON_STOP: Finish.STOP,
    tokenizer_pb2.FINISH_REASON_TOOL_CALLS: Finish.STOP,
    tokenizer_pb2.FINISH_REASON_LENGTH: Finish.LENGTH,
    tokenizer_pb2.FINISH_REASON_ABORT: Finish.ABORT,
    tokenizer_pb2.FINISH_REASON_ERROR: Finish.ERROR,
}
_FROM_FINISH = {
    Finish.STOP: tokenizer_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: tokenizer_pb2.FINISH_REASON_LENGTH,
    Finish.TOOL_CALLS: tokenizer_pb2.FINISH_REASON_TOOL_CALLS,
    Finish.ABORT: tokenizer_pb2.FINISH_REASON_ABORT,
    Finish.ERROR: tokenizer_pb2.FINISH_REASON_ERROR,
}


def pack_ids(ids: Iterable[int]) -> bytes:
    """Return ids as little-endian uint32."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes, field_name: str) -> Sequence[int]:
    """Return the ids of packed bytes. Raises ServiceError when they are no whole number."""
    if len(data) % 4:
        raise refuse(f"{field_name} must hold 4 bytes per token, got {len(data)}", field_name)
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def finish_from(reason: tokenizer_pb2.FinishReason) -> Finish:
    """Return why the engine ended a choice; an unknown reason counts as an ordinary stop."""
    return _TO_FINISH.get(reason, Finish.STOP)


def response_of(update: Update) -> tokenizer_pb2.ParseResponse:
    """Return the message of an update."""
    response = tokenizer_pb2.ParseResponse(reasoning_tokens=update.reasoning_tokens)
    add = response.deltas.add
    for delta in update.deltas:
        match delta:
            case ContentDelta():
                add().content = delta.text
            case ReasoningDelta():
                add().reasoning = delta.text
            case CallDelta():
                add().tool_call.MergeFrom(
                    tokenizer_pb2.ToolCallDelta(
                        index=delta.index,
                        id=delta.id,
                        name=delta.name,
                        arguments=delta.arguments,
                    )
                )
    if update.stop_matched is not None:
        response.stop_matched = update.stop_matched
    if update.tokens_used is not None:
        response.tokens_used = update.tokens_used
    if update.finish is not None:
        response.finish_reason = _FROM_FINISH[update.finish]
    return response
