"""Starts the gateway: `python -m services.gateway --port 8000 --run-dir DIR`."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn

from services.common.config import parse_config
from services.common.lifecycle import settle_heap
from services.common.logs import setup_logging
from services.gateway.app import create_app
from services.gateway.config import GatewayConfig
from services.gateway.http_protocol import BoundedHttpProtocol

logger = logging.getLogger("services.gateway")

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; running requests then get `shutdown_timeout` seconds."""
    config = parse_config(
        GatewayConfig,
        argv,
        prog="python -m services.gateway",
        description="OpenAI-compatible HTTP gateway",
    )
    setup_logging("gateway", config.log_level)
    with listen(config) as server_socket:
        logger.info("listening on %s", url_of(config, server_socket))
        settle_heap()
        server(config).run(sockets=[server_socket])
    return 0


class GatewayServer(uvicorn.Server):
    """Ends with status 0 after a signal; the base class would raise the signal once more."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Turn SIGTERM and SIGINT into a drain; a second SIGINT ends at once."""
        handlers = {s: signal.signal(s, self.handle_exit) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def server(config: GatewayConfig) -> GatewayServer:
    """A uvicorn server for `config` that installs no logging of its own."""
    app = lambda: create_app(config)  # noqa: E731  (made inside the server's event loop)
    return GatewayServer(
        uvicorn.Config(
            app,
            factory=True,
            loop="uvloop",
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=round(config.shutdown_timeout),
            backlog=BACKLOG,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            ssl_ca_certs=None if config.ssl_ca_certs is None else str(config.ssl_ca_certs),
            ssl_cert_reqs=config.ssl_cert_reqs,
        )
    )


def url_of(config: GatewayConfig, listening: socket.socket) -> str:
    """Where clients find the server."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listening.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def listen(config: GatewayConfig) -> socket.socket:
    """The listening socket; connections whose peer takes nothing are cut by the kernel too."""
    return _listen_tcp(config) if config.uds is None else _listen_unix(config.uds)


def _listen_unix(path: Path) -> socket.socket:
    """On a Unix socket; one that a former process left behind is replaced."""
    if path.is_socket():
        path.unlink()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen(BACKLOG)
    return listening


def _listen_tcp(config: GatewayConfig) -> socket.socket:
    host = config.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    patience = round(config.stall_seconds * 1000)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience)
    listening.bind((host, config.port))
    listening.listen(BACKLOG)
    return listening


if __name__ == "__main__":
    sys.exit(main())
