"""Health probe for compose and the supervisor: exit status 0 healthy, 1 not.

    python -m services.common.probe --socket /run/warhorse/engine/engine-0.sock \
        --service warhorse.v1.EngineService
    python -m services.common.probe --target host:50051 --service warhorse.v1.EngineService
    python -m services.common.probe --url http://127.0.0.1:8000/health

Without --service the probe asks whether the process is alive, not whether it is ready. Libraries
are imported where they are used: a probe is a fresh process every few seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one probe; the reason of a failure goes to stderr."""
    failure = probe_failure(argv)
    if failure is None:
        return 0
    sys.stderr.write(f"unhealthy: {failure}\n")
    return 1


def probe_failure(argv: Sequence[str] | None = None) -> str | None:
    """Run one probe as the command line says; None when healthy, else why not."""
    options = _parser().parse_args(argv)
    if options.url:
        return http_failure(options.url, options.timeout)
    target = options.target or f"unix:{options.socket}"
    return grpc_failure(target, options.service, options.timeout)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m services.common.probe", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--socket", help="Unix socket of a gRPC service")
    where.add_argument("--target", help="gRPC target, host:port or unix:PATH")
    where.add_argument("--url", help="HTTP address that answers 200 when healthy")
    parser.add_argument("--service", default="", help="full proto name; empty asks for liveness")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds")
    return parser


def grpc_failure(target: str, service: str, timeout: float) -> str | None:
    """Ask grpc.health.v1; None when SERVING, else why not."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            status = stub.Check(request, timeout=timeout).status
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    if status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))


def http_failure(url: str, timeout: float) -> str | None:
    """GET `url`; None when the answer is 200, else why not."""
    from urllib.error import HTTPError
    from urllib.request import ProxyHandler, build_opener

    if not url.startswith(("http://", "https://")):
        return f"{url!r} is not an http or https address"
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=timeout) as response:
            return None if response.status == 200 else f"status {response.status}"
    except HTTPError as error:
        return f"status {error.code}"
    except OSError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
