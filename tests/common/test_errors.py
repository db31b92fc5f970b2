"""ServiceError: codes, details and the way back from a failed call."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2

from services.common.errors import DOMAIN, ErrorReason, ServiceError, from_rpc_error

ALL_REASONS = [
    pytest.param(number, id=name)
    for name, number in ErrorReason.items()
    if number != ErrorReason.ERROR_REASON_UNSPECIFIED
]


@pytest.mark.parametrize("reason", ALL_REASONS)
def test_every_reason_has_a_failing_status_code(reason: int) -> None:
    error = ServiceError(reason, "no")
    assert error.code is not grpc.StatusCode.OK
    assert error.to_status().code == error.code.value[0]


def test_the_unspecified_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="no status code"):
        ServiceError(ErrorReason.ERROR_REASON_UNSPECIFIED, "no")


def test_status_carries_reason_domain_field_and_retry_delay() -> None:
    error = ServiceError(
        ErrorReason.ERROR_REASON_QUEUE_FULL, "busy", field="priority", retry_after=1.5
    )
    status = error.to_status()
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert (info.reason, info.domain, dict(info.metadata)) == (
        "QUEUE_FULL",
        DOMAIN,
        {"field": "priority"},
    )
    assert retry.retry_delay.ToNanoseconds() == 1_500_000_000


def test_status_without_retry_has_no_retry_detail() -> None:
    status = ServiceError(ErrorReason.ERROR_REASON_NUMERIC, "nan").to_status()
    assert len(status.details) == 1


@pytest.mark.parametrize(
    ("code", "details", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, "unix:/secret.sock refused", "ENGINE_LOST"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "DEADLINE"),
        (grpc.StatusCode.CANCELLED, "", "CANCELLED"),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", "UNSUPPORTED"),
        (grpc.StatusCode.UNKNOWN, "/root/secret.py line 3", "INTERNAL"),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "CLIENT: Sent message larger than max (20 vs. 16)",
            "INVALID_FIELD",
        ),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", "ENGINE_LOST"),
    ],
)
def test_a_bare_status_gets_the_nearest_reason_and_no_library_text(
    code: grpc.StatusCode, details: str, reason: str
) -> None:
    empty = grpc.aio.Metadata()
    error = from_rpc_error(grpc.aio.AioRpcError(code, empty, empty, details=details))
    assert error.reason_name == reason
    assert "secret" not in error.message
