"""The engine's client of the kvcache service: never blocks the core, never fails a request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from warhorse.v1 import kvcache_pb2, kvcache_pb2_grpc

from services.common.errors import ServiceError, from_rpc_error
from services.common.grpc_client import connect
from services.common.logs import request_id_var
from services.common.pinned import PinnedRegistration
from services.common.prefix_chain import UnitHash
from services.common.shm import MappedRegion, open_region
from services.common.tracing import span
from services.engine.cache.external import (
    LoadDone,
    LoadJob,
    LookupDone,
    StoreDone,
    StoreEvent,
    StoreJob,
)
from services.engine.cache.mover import PageMover
from services.engine.cache.store_session import SessionLost, StoreSession, store_groups
from services.engine.core_watch import CoreWatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreClientConfig:
    """Bounds of the client, seconds unless said otherwise."""

    ping_seconds: float = 5.0
    silence_seconds: float = 15.0  # an unanswered ping ends the session after this
    call_seconds: float = 2.0
    load_seconds: float = 2.0  # copying of one load; what is missing then is a miss
    first_retry_seconds: float = 0.1
    last_retry_seconds: float = 2.0
    batch_jobs: int = 32  # store jobs of one reservation
    queued_jobs: int = 4096  # further store jobs are declined

    def __post_init__(self) -> None:
        if not 0 < self.first_retry_seconds <= self.last_retry_seconds <= 5.0:
            raise ValueError("retries must wait between 0 and 5 seconds, the first the shortest")
        if self.silence_seconds < 2 * self.ping_seconds:
            raise ValueError("silence_seconds must be at least two pings")


class StoreClient:
    """`ExternalStore` over gRPC and the shared arena.

    `bind`, `lookup`, `load`, `store`, `poll` and `close` belong to the core's thread and only
    hand data over; a thread with an event loop of its own does the rest. Each job is answered
    exactly once, also when the service dies, restarts or hangs. `wake` is called from that thread
    whenever `poll` has something new.
    """

    def __init__(
        self,
        address: str,
        run_dir: Path,
        *,
        client_id: str,
        model_fingerprint: str,
        config: StoreClientConfig | None = None,
        wake: Callable[[], None] | None = None,
        watch: CoreWatch | None = None,
    ) -> None:
        self._address = address
        self._run_dir = run_dir
        self._client_id = client_id
        self._fingerprint = model_fingerprint
        self._config = config or StoreClientConfig()
        self._wake = wake
        self._watch = watch or CoreWatch()
        self._events: deque[StoreEvent] = deque()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kvcache-client", daemon=True)
        self._mover: PageMover | None = None
        # Below: event loop only, except that `connected` reads `_session`.
        self.arena_pinned = False  # whether the arena is registered with the GPU's driver
        self._session: StoreSession | None = None
        self._delay = self._config.first_retry_seconds
        self._told = ""
        self._closing = asyncio.Event()
        self._lost = asyncio.Event()
        self._tasks: set[asyncio.Task[int]] = set()
        self._stores: deque[StoreJob] = deque()
        self._more_stores = asyncio.Event()

    # The core's side

    @property
    def connected(self) -> bool:
        """Whether the service takes jobs now."""
        return self._session is not None

    def bind(self, mover: PageMover) -> None:
        """Start connecting; the groups of `mover` are the groups of the session."""
        if self._mover is not None:
            raise RuntimeError("bind was called twice")
        self._mover = mover
        self._thread.start()

    def lookup(self, request_id: str, unit_hashes: Sequence[UnitHash]) -> None:
        """Answered by LookupDone."""
        self._submit(self._begin_lookup, request_id, tuple(unit_hashes))

    def load(self, job: LoadJob) -> None:
        """Answered by LoadDone."""
        self._submit(self._begin_load, job)

    def store(self, job: StoreJob) -> None:
        """Answered by StoreDone."""
        self._submit(self._begin_store, job)

    def poll(self) -> list[StoreEvent]:
        """Everything finished since the last call."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def close(self) -> None:
        """End the session and the thread; jobs in flight are answered as failed first."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()

    def _submit(self, begin: Callable[..., None], *arguments: object) -> None:
        if self._mover is None or self._loop.is_closed():
            raise RuntimeError("the store client is not running")
        self._loop.call_soon_threadsafe(begin, *arguments)

    # The event loop's side

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        """Sessions, one after the other, until `close`."""
        while not self._closing.is_set():
            try:
                await self._one_session()
            except (SessionLost, ServiceError, grpc.RpcError, OSError, TimeoutError) as error:
                self._tell(error)
            except Exception:  # our bug, but no reason for requests to wait for ever
                logger.exception("the kvcache session failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._delay):
                    await self._closing.wait()
            self._delay = min(2 * self._delay, self._config.last_retry_seconds)

    def _tell(self, error: Exception) -> None:
        """Log why there is no session, once until the reason changes or a session opens."""
        if isinstance(error, grpc.RpcError):
            error = from_rpc_error(error)
        text = f"{type(error).__name__}: {error}"
        level = logging.DEBUG if text == self._told else logging.WARNING
        logger.log(level, "no kvcache session, running without the store: %s", text)
        self._told = text

    async def _one_session(self) -> None:
        """Connect, serve jobs until the session ends, answer what is left, unmap."""
        async with connect(self._address) as channel:
            stub = kvcache_pb2_grpc.KvCacheServiceStub(channel)
            stream = stub.Session()
            opened = await self._open(stream)
            arena = open_region(opened.arena, self._run_dir)
            self.arena_pinned = PinnedRegistration(arena).pinned  # undone when arena is closed
            try:
                await self._serve(stub, stream, opened, arena)
            finally:
                self._session = None
                self.arena_pinned = False
                await self._fail_outstanding()
                stream.cancel()
                arena.close()

    async def _open(self, stream: Any) -> kvcache_pb2.SessionResponse:
        mover = self._bound()
        groups = [
            kvcache_pb2.StoreGroup(
                group_id=g.group_id,
                name=g.name,
                kind=g.kind,
                window_units=g.window_units,
                object_bytes=g.object_bytes,
            )
            for g in store_groups(mover)
        ]
        request = kvcache_pb2.SessionOpen(
            client_id=self._client_id,
            model_fingerprint=self._fingerprint,
            unit_tokens=mover.unit_tokens,
            groups=groups,
        )
        async with asyncio.timeout(self._config.call_seconds):
            await stream.write(kvcache_pb2.SessionRequest(open=request))
            return await _read(stream)

    async def _serve(
        self,
        stub: kvcache_pb2_grpc.KvCacheServiceStub,
        stream: Any,
        opened: kvcache_pb2.SessionResponse,
        arena: MappedRegion,
    ) -> None:
        """Until the service goes silent or away, a job loses the session, or `close`."""
        session = StoreSession(
            stub,
            opened,
            arena,
            self._bound(),
            self._config.call_seconds,
            self._config.load_seconds,
        )
        self._lost.clear()
        self._session = session
        self._delay = self._config.first_retry_seconds
        self._told = ""
        logger.info("kvcache session open", extra={"arena_bytes": arena.nbytes})
        parts = (
            self._ping(stream),
            self._listen(stream),
            self._store_queued(session),
            self._lost.wait(),
            self._closing.wait(),
        )
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._session = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _ping(self, stream: Any) -> None:
        while True:
            await asyncio.sleep(self._config.ping_seconds)
            await stream.write(kvcache_pb2.SessionRequest(ping=kvcache_pb2.SessionPing()))

    async def _listen(self, stream: Any) -> None:
        """Read the answers to our pings; TimeoutError when they stay away."""
        while True:
            async with asyncio.timeout(self._config.silence_seconds):
                await _read(stream)

    async def _store_queued(self, session: StoreSession) -> None:
        """Store queued jobs, several in one reservation."""
        while True:
            self._more_stores.clear()
            if not self._stores:
                await self._more_stores.wait()
            count = min(len(self._stores), self._config.batch_jobs)
            jobs = [self._stores.popleft() for _ in range(count)]
            stored = [False] * count
            try:
                stored = await session.store(jobs)
            except ServiceError as refused:
                logger.debug("the store declined: %s", refused.reason_name)
            finally:
                for job, done in zip(jobs, stored, strict=True):
                    self._emit(StoreDone(job.job, done))

    def _begin_lookup(self, request_id: str, unit_hashes: tuple[UnitHash, ...]) -> None:
        owner = request_id.rpartition("#")[0]  # look-ups are asked for with a number behind it
        self._start(
            lambda session: self._labelled(owner, "lookup", session.lookup(unit_hashes)),
            lambda hit: LookupDone(request_id, hit),
            failed=0,
        )

    def _begin_load(self, job: LoadJob) -> None:
        self._start(
            lambda session: self._labelled(job.request_id, "load", session.load(job)),
            lambda valid: LoadDone(job.job, valid),
            failed=job.first_unit,
        )

    async def _labelled(self, request_id: str, what: str, work: Awaitable[int]) -> int:
        """Do `work` under the id and in the trace of its request; a task's own context."""
        label = self._watch.label(request_id)
        request_id_var.set(label.client_id)
        with span(self._watch.tracer, f"store {what}", label.traceparent, kind="client"):
            units = await work
        logger.debug("store %s", what, extra={"units": units})
        return units

    def _begin_store(self, job: StoreJob) -> None:
        if self._session is None or len(self._stores) >= self._config.queued_jobs:
            self._emit(StoreDone(job.job, stored=False))
            return
        self._stores.append(job)
        self._more_stores.set()

    def _start(
        self,
        work: Callable[[StoreSession], Awaitable[int]],
        event: Callable[[int], StoreEvent],
        failed: int,
    ) -> None:
        """Run `work` as a task whose end, whatever it is, emits one event."""
        session = self._session
        if session is None:
            self._emit(event(failed))
            return
        task = self._loop.create_task(self._guarded(work, session, failed))
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._finish(ended, event, failed))

    async def _guarded(
        self, work: Callable[[StoreSession], Awaitable[int]], session: StoreSession, failed: int
    ) -> int:
        try:
            return await work(session)
        except ServiceError as refused:
            logger.debug("the store declined: %s", refused.reason_name)
        except SessionLost as lost:
            logger.info("kvcache session lost: %s", lost)
            self._lost.set()
        return failed

    def _finish(
        self, task: asyncio.Task[int], event: Callable[[int], StoreEvent], failed: int
    ) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self._emit(event(failed))
        elif error := task.exception():
            logger.error("unexpected error in a store job", exc_info=error)
            self._lost.set()  # its lease goes with the session
            self._emit(event(failed))
        else:
            self._emit(event(task.result()))

    async def _fail_outstanding(self) -> None:
        """Answer every job that is still open; afterwards nothing touches a page."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._stores:
            self._emit(StoreDone(self._stores.popleft().job, stored=False))

    def _emit(self, event: StoreEvent) -> None:
        self._events.append(event)
        if self._wake is not None:
            self._wake()

    def _bound(self) -> PageMover:
        if self._mover is None:
            raise RuntimeError("bind was not called")
        return self._mover


async def _read(stream: Any) -> kvcache_pb2.SessionResponse:
    answer = await stream.read()
    if not isinstance(answer, kvcache_pb2.SessionResponse):
        raise SessionLost("the service ended the session")
    return answer
