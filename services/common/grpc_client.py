"""Channels to other services: one place for limits, keep-alive, retries and addresses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from services.common.logs import request_id_var
from services.common.tracing import TRACEPARENT, traceparent_var

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
# A request to render may hold image files; a gateway takes bodies of 64 MiB.
MAX_RENDER_BYTES = 65 * 1024 * 1024
REQUEST_ID_KEY = "x-request-id"

_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.enable_retries", 1),
    # A peer that restarts is found again within a second instead of after two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Two channels to one target never share a connection that one of them has broken.
    ("grpc.use_local_subchannel_pool", 1),
    # A window that grows with the link's speed lets a stalled reader buffer 40 times as much.
    ("grpc.http2.bdp_probe", 0),
)

# Unary calls that change nothing at the peer; only these are repeated by the channel itself.
_IDEMPOTENT: tuple[tuple[str, str], ...] = (
    ("warhorse.v1.TokenizerService", "Render"),
    ("warhorse.v1.TokenizerService", "Encode"),
    ("warhorse.v1.TokenizerService", "Decode"),
    ("warhorse.v1.TokenizerService", "DescribeTokenizer"),
    ("warhorse.v1.EngineService", "DescribeEngine"),
    ("warhorse.v1.KvCacheService", "Lookup"),
    ("warhorse.v1.KvCacheService", "Stats"),
    ("warhorse.v1.OffloadService", "Attach"),
    ("warhorse.v1.OffloadService", "DescribeOffload"),
)


def _service_config(health_service: str) -> str:
    config: dict[str, Any] = {
        "methodConfig": [
            {
                "name": [{"service": s, "method": m} for s, m in _IDEMPOTENT],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
    if health_service:
        config["loadBalancingConfig"] = [{"round_robin": {}}]
        config["healthCheckConfig"] = {"serviceName": health_service}
    return json.dumps(config)


def connect(
    target: str, *, health_service: str = "", max_send_bytes: int = MAX_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """A lazily connecting channel to `target` (`unix:/path.sock`, `host:port`, `dns:///name:port`).

    With `health_service` (full proto name) calls are spread over all addresses of the target that
    report themselves as serving it; use it for replicated CPU services behind one DNS name. The
    caller closes the channel. Give every call a deadline; only `Load`, `Session` and health
    `Watch` are open-ended. `max_send_bytes` bounds a request; the server must take as much.
    """
    if not target:
        raise ValueError("a gRPC target must not be empty")
    options = [
        *_OPTIONS,
        ("grpc.max_send_message_length", max_send_bytes),
        ("grpc.service_config", _service_config(health_service)),
    ]
    return grpc.aio.insecure_channel(target, options=options)


def socket_path(run_dir: Path, service: str, instance: str | None = None) -> Path:
    """Where instance `instance` (default `<service>-0`) of a service listens."""
    return run_dir.absolute() / service / f"{instance or f'{service}-0'}.sock"


def socket_target(run_dir: Path, service: str, instance: str | None = None) -> str:
    """The gRPC target of `socket_path`."""
    return f"unix:{socket_path(run_dir, service, instance)}"


def request_metadata() -> tuple[tuple[str, str], ...]:
    """The current request id and trace context for the peer; pass it as `metadata=`."""
    found = ((REQUEST_ID_KEY, request_id_var.get()), (TRACEPARENT, traceparent_var.get()))
    return tuple((key, value) for key, value in found if value)
