"""Reading gRPC streams with every way that they can end told apart."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from warhorse.v1 import common_pb2

from services.common.errors import ServiceError, from_rpc_error

_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the type stubs lack it


class TokenizerLostError(ServiceError):
    """No tokenizer could take over a parse stream. The engine is not at fault."""


async def read(call: Any) -> Any:
    """The next message of a stream, None at its regular end.

    Raises ServiceError for any failure, also when the call was cancelled by the peer or by
    another task of ours; asyncio.CancelledError only when the reading task itself is cancelled.
    Cancelling the task cancels the call.
    """
    try:
        message = await call.read()
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.CancelledError:
        if task_is_cancelled():
            raise
        reason = common_pb2.ERROR_REASON_CANCELLED
        raise ServiceError(reason, "The call was cancelled.") from None
    return None if message is _EOF else message


def task_is_cancelled() -> bool:
    """Whether somebody asked the running task to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def is_lost(error: ServiceError) -> bool:
    """Whether the peer went away, rather than refused or failed by itself."""
    return (
        error.code is grpc.StatusCode.UNAVAILABLE
        or error.reason == common_pb2.ERROR_REASON_CANCELLED
    )
