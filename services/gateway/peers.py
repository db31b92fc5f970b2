"""Channels to engines and tokenizers, and what each of them last said about itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from warhorse.v1 import common_pb2

from services.common.errors import ServiceError

logger = logging.getLogger(__name__)

DESCRIBE_SECONDS = 5.0
FIRST_BACK_OFF = 0.1
LAST_BACK_OFF = 1.0


class Peer(Protocol):
    """One replica of a service behind one channel."""

    target: str
    service: str  # full proto name, as health checks know it
    channel: grpc.aio.Channel
    inflight: int  # requests of this gateway that it runs

    async def describe(self) -> None:
        """Ask what the replica serves; raises AioRpcError."""
        ...

    async def follow(self) -> None:
        """Follow the replica's own reports until the stream breaks; raises AioRpcError."""
        ...


P = TypeVar("P", bound=Peer)


class PeerSet(Generic[P]):
    """Watches replicas for ever and hands out a healthy one. Lives in one event loop."""

    def __init__(self, peers: Sequence[P], what: str, wait_seconds: float) -> None:
        self.peers = tuple(peers)
        self._what = what
        self.wait_seconds = wait_seconds
        self._healthy: set[int] = set()
        self._lost_at = time.monotonic()
        self._changed = asyncio.Event()
        self._watches: list[grpc.aio.Call | None] = [None] * len(self.peers)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to watch every replica."""
        self._lost_at = time.monotonic()
        self._tasks = [
            asyncio.create_task(self._watch_for_ever(i), name=f"watch-{self._what}-{i}")
            for i in range(len(self.peers))
        ]

    async def stop(self) -> None:
        """Stop watching and close the channels."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in self.peers:
            await peer.channel.close(None)

    def healthy(self) -> list[P]:
        """Replicas that take work now."""
        return [p for i, p in enumerate(self.peers) if i in self._healthy]

    async def pick(self, order: Callable[[P], float], exclude: Iterable[P] = ()) -> P:
        """The healthy replica that `order` puts first.

        When there is none, waits up to `wait_seconds` counted from the moment the last one was
        lost, so that a restart is bridged and a long outage refuses at once.
        """
        banned = {id(p) for p in exclude}
        deadline = self._lost_at + self.wait_seconds
        while True:
            candidates = [p for p in self.healthy() if id(p) not in banned]
            if candidates:
                return min(candidates, key=order)
            left = deadline - time.monotonic()
            if left <= 0 or banned:
                raise self._none_healthy()
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    def mark_lost(self, peer: P) -> None:
        """A call found this replica dead: check its health anew before it gets more work."""
        i = next(i for i, p in enumerate(self.peers) if p is peer)
        self._set_healthy(i, False)
        watch = self._watches[i]
        if watch is not None:
            watch.cancel()

    def _none_healthy(self) -> ServiceError:
        return ServiceError(
            common_pb2.ERROR_REASON_ENGINE_LOST,
            f"No {self._what} is serving at the moment.",
            retry_after=2.0,
        )

    async def _watch_for_ever(self, i: int) -> None:
        back_off = FIRST_BACK_OFF
        while True:
            began = time.monotonic()
            try:
                await self._watch(i)
            except grpc.RpcError as error:
                self._log_loss(i, error)
            finally:
                self._set_healthy(i, False)
            if time.monotonic() - began > LAST_BACK_OFF:
                back_off = FIRST_BACK_OFF
            await asyncio.sleep(back_off)
            back_off = min(2 * back_off, LAST_BACK_OFF)

    def _log_loss(self, i: int, error: grpc.RpcError) -> None:
        level = logging.WARNING if i in self._healthy else logging.DEBUG
        logger.log(level, "%s %d is unreachable: %s", self._what, i, error.code())

    async def _watch(self, i: int) -> None:
        """One life of the connection: follow health, describe when serving, follow reports."""
        peer = self.peers[i]
        request = health_pb2.HealthCheckRequest(service=peer.service)
        watch = health_pb2_grpc.HealthStub(peer.channel).Watch(request)
        self._watches[i] = watch
        async with _following(peer, watch):
            try:
                async for answer in watch:
                    await self._on_health(i, answer.status)
            except asyncio.CancelledError:
                if not watch.cancelled() or _cancelling():
                    raise

    async def _on_health(self, i: int, status: int) -> None:
        serving = status == health_pb2.HealthCheckResponse.SERVING
        if serving:
            await self.peers[i].describe()
        self._set_healthy(i, serving)

    def _set_healthy(self, i: int, healthy: bool) -> None:
        was = i in self._healthy
        if healthy == was:
            return
        logger.info("%s %d is %s", self._what, i, "serving" if healthy else "not serving")
        if healthy:
            self._healthy.add(i)
        else:
            self._healthy.discard(i)
            self._lost_at = time.monotonic()
        self._changed.set()


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@contextlib.asynccontextmanager
async def _following(peer: Peer, watch: grpc.aio.Call) -> AsyncIterator[None]:
    """Follow the peer's reports beside its health; a broken report stream ends the watch."""

    async def follow() -> None:
        try:
            await peer.follow()
        except grpc.RpcError as error:
            logger.debug("report stream ended: %s", error.code())
            watch.cancel()

    task = asyncio.create_task(follow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
