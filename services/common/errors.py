"""The one exception that crosses a process border, and its two translations.

Inside a process code raises what it likes; at the border of a service a `ServiceError` becomes a
`google.rpc.Status` with `ErrorInfo` (reason, domain, field) and, where a retry makes sense,
`RetryInfo`. A client turns it back with `from_rpc_error`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from warhorse.v1 import common_pb2
from warhorse.v1.common_pb2 import ErrorReason

__all__ = ["DOMAIN", "ErrorReason", "ServiceError", "StartupError", "from_rpc_error"]

DOMAIN = "warhorse"
_PREFIX = "ERROR_REASON_"

_CODES: Mapping[int, grpc.StatusCode] = MappingProxyType(
    {
        common_pb2.ERROR_REASON_INVALID_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
        common_pb2.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED: grpc.StatusCode.INVALID_ARGUMENT,
        common_pb2.ERROR_REASON_TEMPLATE: grpc.StatusCode.INVALID_ARGUMENT,
        common_pb2.ERROR_REASON_UNSUPPORTED: grpc.StatusCode.INVALID_ARGUMENT,
        common_pb2.ERROR_REASON_MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
        common_pb2.ERROR_REASON_QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
        common_pb2.ERROR_REASON_POOL_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
        common_pb2.ERROR_REASON_SLOW_CONSUMER: grpc.StatusCode.RESOURCE_EXHAUSTED,
        common_pb2.ERROR_REASON_STALE_GENERATION: grpc.StatusCode.FAILED_PRECONDITION,
        common_pb2.ERROR_REASON_UNKNOWN_LEASE: grpc.StatusCode.FAILED_PRECONDITION,
        common_pb2.ERROR_REASON_LAYOUT_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
        common_pb2.ERROR_REASON_LOADING: grpc.StatusCode.UNAVAILABLE,
        common_pb2.ERROR_REASON_DRAINING: grpc.StatusCode.UNAVAILABLE,
        common_pb2.ERROR_REASON_ENGINE_LOST: grpc.StatusCode.UNAVAILABLE,
        common_pb2.ERROR_REASON_DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
        common_pb2.ERROR_REASON_CANCELLED: grpc.StatusCode.CANCELLED,
        common_pb2.ERROR_REASON_NUMERIC: grpc.StatusCode.INTERNAL,
        common_pb2.ERROR_REASON_INTERNAL: grpc.StatusCode.INTERNAL,
    }
)

# What a status without ErrorInfo means: it comes from the gRPC library itself, whose text may
# hold socket paths, so only this text is passed on.
_BARE: Mapping[grpc.StatusCode, tuple[ErrorReason, str]] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: (
            common_pb2.ERROR_REASON_INVALID_FIELD,
            "the peer refused the request",
        ),
        grpc.StatusCode.UNIMPLEMENTED: (
            common_pb2.ERROR_REASON_UNSUPPORTED,
            "the peer does not know this call",
        ),
        grpc.StatusCode.RESOURCE_EXHAUSTED: (
            common_pb2.ERROR_REASON_QUEUE_FULL,
            "the peer has no room for the request",
        ),
        grpc.StatusCode.FAILED_PRECONDITION: (
            common_pb2.ERROR_REASON_STALE_GENERATION,
            "the peer's state has changed",
        ),
        grpc.StatusCode.UNAVAILABLE: (
            common_pb2.ERROR_REASON_ENGINE_LOST,
            "a process that serves the request ended or cannot be reached; send it again",
        ),
        grpc.StatusCode.DEADLINE_EXCEEDED: (
            common_pb2.ERROR_REASON_DEADLINE,
            "the deadline passed",
        ),
        grpc.StatusCode.CANCELLED: (
            common_pb2.ERROR_REASON_CANCELLED,
            "the call was cancelled",
        ),
    }
)
_TOO_LARGE = "message larger than max"
# The library's own text where a write meets a call that the peer has ended; the peer's status is
# lost then (https://github.com/grpc/grpc/issues/36066).
_WRITE_AFTER_END = "Internal error from Core"


class ServiceError(Exception):
    """A refusal or failure that the caller is told about.

    `message` goes to clients: it names the field, the value and the accepted range, and never a
    path, a region id, a socket name or prompt text. `retry_after` is in seconds; None means that
    a retry is not known to help.
    """

    def __init__(
        self,
        reason: ErrorReason,
        message: str,
        *,
        field: str = "",
        retry_after: float | None = None,
    ) -> None:
        if reason not in _CODES:
            raise ValueError(f"no status code for error reason {reason}")
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after = retry_after

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code of the reason."""
        return _CODES[self.reason]

    @property
    def reason_name(self) -> str:
        """The reason as it travels in ErrorInfo, for example `QUEUE_FULL`."""
        return common_pb2.ErrorReason.Name(self.reason).removeprefix(_PREFIX)

    def to_status(self) -> status_pb2.Status:
        """The error as google.rpc.Status with its details packed."""
        info = error_details_pb2.ErrorInfo(reason=self.reason_name, domain=DOMAIN)
        if self.field:
            info.metadata["field"] = self.field
        details = [_packed(info)]
        if self.retry_after is not None:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(self.retry_after * 1e9))
            details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
        number: int = self.code.value[0]
        return status_pb2.Status(code=number, message=self.message, details=details)

    def __repr__(self) -> str:
        return f"ServiceError({self.reason_name}, {self.message!r}, field={self.field!r})"


class StartupError(Exception):
    """A service cannot start and the operator can mend it; the message says what to change.

    Logged as one line without a traceback by `lifecycle.run`. May name paths and sizes: it goes
    to the operator's log, never to a client.
    """


def _packed(
    message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo,
) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def from_rpc_error(error: grpc.RpcError) -> ServiceError:
    """The ServiceError that a failed call carries; a bare status gets the nearest reason.

    Chain it (`raise from_rpc_error(error) from error`) so that the log keeps the library's text.
    """
    status = _rich_status(error)
    if status is None:
        return _from_bare(error)
    reason: ErrorReason = common_pb2.ERROR_REASON_INTERNAL
    field, retry_after = "", None
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason, field = _reason_of(info.reason), info.metadata.get("field", "")
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    return ServiceError(reason, status.message, field=field, retry_after=retry_after)


def _reason_of(name: str) -> ErrorReason:
    full = _PREFIX + name
    if full not in common_pb2.ErrorReason.keys():  # noqa: SIM118  (an enum wrapper, not a dict)
        return common_pb2.ERROR_REASON_INTERNAL
    return cast("ErrorReason", common_pb2.ErrorReason.Value(full))


def _rich_status(error: grpc.RpcError) -> status_pb2.Status | None:
    try:
        status: status_pb2.Status | None = rpc_status.from_call(error)  # type: ignore[arg-type]
    except ValueError:  # code or message of the details disagree with the trailer: not ours
        return None
    return status if status is not None and status.details else None


def _from_bare(error: grpc.RpcError) -> ServiceError:
    code = error.code()
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE in (error.details() or ""):
        return ServiceError(
            common_pb2.ERROR_REASON_INVALID_FIELD, "the message is larger than the limit of 16 MiB"
        )
    if code is grpc.StatusCode.INTERNAL and error.details() == _WRITE_AFTER_END:
        return ServiceError(common_pb2.ERROR_REASON_ENGINE_LOST, "the peer ended the call")
    reason, message = _BARE.get(code, (common_pb2.ERROR_REASON_INTERNAL, "the peer failed"))
    return ServiceError(reason, message)
