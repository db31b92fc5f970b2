"""Health, version, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from services.common.describe import build_version
from services.gateway.engines import EnginePeer
from services.gateway.routes.helpers import json_response
from services.gateway.state import GatewayState


def add_routes(app: FastAPI, state: GatewayState) -> None:
    """What monitors and load balancers ask."""

    def health() -> Response:
        return Response(status_code=200 if state.healthy else 503)

    @app.get("/health")
    async def get_health() -> Response:
        """200 while requests can be served, else 503."""
        return health()

    @app.post("/ping", include_in_schema=False)
    @app.get("/ping")
    async def ping() -> Response:
        """Like /health."""
        return health()

    @app.get("/ready")
    async def ready() -> Response:
        """Like /health."""
        return health()

    @app.get("/load")
    @app.get("/v1/load", include_in_schema=False)
    async def load() -> Response:
        """Requests that run through this gateway; 0 where they are not to be counted."""
        if not state.config.enable_server_load_tracking:
            return json_response({"server_load": 0})
        running = sum(peer.inflight for peer in state.engines.set.peers)
        return json_response({"server_load": running})

    @app.get("/v1/loads")
    async def loads(request: Request) -> Response:
        """Queue and memory of every engine, as they last reported them.

        With `?format=prometheus` as gauges.
        """
        found = [_load(peer) for peer in state.engines.set.peers]
        if request.query_params.get("format") == "prometheus":
            return Response(_gauges(found), media_type=CONTENT_TYPE_LATEST)
        return json_response({"loads": found})

    @app.get("/version")
    async def version() -> Response:
        """The version of this server."""
        return json_response({"version": build_version()})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(state.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/")
    async def root() -> Response:
        """A sign of life."""
        return json_response({"status": "ok"})


def _gauges(loads: Sequence[dict[str, Any]]) -> str:
    """Prometheus text: one gauge for each number of a load, one sample for each engine."""
    lines = []
    for name in loads[0] if loads else ():
        if name != "engine":
            lines.append(f"# TYPE sglang:{name} gauge")
            lines += [f'sglang:{name}{{engine="{one["engine"]}"}} {one[name]:g}' for one in loads]
    return "".join(f"{line}\n" for line in lines)


def _load(peer: EnginePeer) -> dict[str, Any]:
    load = peer.load
    return {
        "engine": peer.index,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_waiting_tokens": load.waiting_tokens,
        "token_usage": round(load.kv_usage, 4),
        "draining": load.draining,
    }
