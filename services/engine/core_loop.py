"""The loop of the core process: drain the inbox, step, publish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from warhorse.v1 import engine_pb2 as pb
from warhorse.v1.stage_pb2 import (
    CoreCommand,
    CoreDescription,
    CoreEvent,
    CoreProfile,
    CoreProfileDone,
    CoreResetDone,
    CoreStats,
    CoreStep,
    CoreSubmit,
    RequestUpdate,
)
from warhorse.v1.tokenizer_pb2 import ImageInput

from services.common.describe import resident_bytes
from services.common.ring import Ring
from services.common.shm import region_counts
from services.engine.core import EngineCore
from services.engine.core_events import (
    to_cache_groups,
    to_load_record,
    to_refusal,
    to_request,
    to_response,
)
from services.engine.core_watch import CoreWatch
from services.engine.images import Pixels
from services.engine.runtime.profiling import StepProfiler
from services.engine.scheduler.messages import CoreLoad, EngineEvent, FinishedOut, RequestRefused

OpenImages = Callable[[Sequence[ImageInput]], Mapping[bytes, Pixels]]

HEARTBEAT_SECONDS = 0.5
STATS_SECONDS = 0.9
BLOCKED_SECONDS = 0.001  # pause between polls of the store while nothing else is to do
STORING_SECONDS = 0.005


class CoreLoop:
    """Owns the engine core; one thread calls everything.

    `describe` fills the description of the moment, apart from its ticket; `open_images` gives the
    pixels of a request's images or raises RequestRefused.
    """

    def __init__(
        self,
        core: EngineCore,
        commands: Ring,
        events: Ring,
        describe: Callable[[], pb.DescribeEngineResponse],
        open_images: OpenImages,
        watch: CoreWatch | None = None,
        profiler: StepProfiler | None = None,
    ) -> None:
        self._core = core
        self._commands = commands
        self._events = events
        self._describe = describe
        self._open_images = open_images
        self._watch = watch or CoreWatch()
        self._profiler = profiler or StepProfiler(None, "")
        self._step_seconds = 0.0
        self._last_stats = 0.0
        self._handles: dict[str, int] = {}  # request id -> the front's number
        self._open: dict[str, int] = {}  # request id -> choices that have not finished
        self._request_ids: dict[int, str] = {}
        self._stopped = False
        self._last_step = time.monotonic()
        self._last_event = 0.0

    def run(self) -> None:
        """Serve until the front says stop. Raises RingClosed when the front is gone."""
        while not self._stopped:
            updates = self._drain(self._patience())
            if self._core.has_work:
                updates += self._step()
            self._publish(updates)

    def _patience(self) -> float:
        """Seconds that the inbox may be waited for."""
        if self._core.has_work:
            return BLOCKED_SECONDS if self._core.blocked else 0.0
        return STORING_SECONDS if self._core.idle() else HEARTBEAT_SECONDS

    def _drain(self, seconds: float) -> list[RequestUpdate]:
        updates: list[RequestUpdate] = []
        data = self._commands.receive(timeout=seconds)
        while data is not None:
            command = CoreCommand.FromString(bytes(data))
            if (update := self._obey(command)) is not None:
                updates.append(update)
            data = self._commands.receive(timeout=0)
        return updates

    def _obey(self, command: CoreCommand) -> RequestUpdate | None:
        match command.WhichOneof("command"):
            case "submit":
                return self._submit(command.submit)
            case "abort":
                self._abort(command.abort.handle)
            case "describe":
                description = CoreDescription(
                    ticket=command.describe.ticket, engine=self._describe()
                )
                self._send(CoreEvent(description=description))
            case "reset":
                dropped = self._core.reset_prefix_cache()
                done = CoreResetDone(ticket=command.reset.ticket, pages_dropped=dropped)
                self._send(CoreEvent(reset_done=done))
            case "profile":
                self._send(CoreEvent(profile_done=self._trace(command.profile)))
            case "stop":
                self._stopped = True
            case other:
                raise ValueError(f"unknown command {other}")
        return None

    def _trace(self, command: CoreProfile) -> CoreProfileDone:
        done = CoreProfileDone(ticket=command.ticket)
        try:
            if command.start:
                self._profiler.start()
            else:
                done.file = self._profiler.stop()
        except RequestRefused as refused:
            done.refusal.CopyFrom(to_refusal(refused))
        return done

    def _submit(self, submit: CoreSubmit) -> RequestUpdate:
        self._watch.begin(submit)
        try:
            pixels = self._open_images(submit.request.images)
            self._core.submit(to_request(submit), pixels)
        except RequestRefused as refused:
            self._watch.end(submit.request_id)
            return RequestUpdate(handle=submit.handle, refusal=to_refusal(refused))
        self._handles[submit.request_id] = submit.handle
        self._open[submit.request_id] = submit.request.n
        self._request_ids[submit.handle] = submit.request_id
        accepted = pb.Accepted(prompt_tokens=len(submit.request.prompt_token_ids) // 4)
        return RequestUpdate(handle=submit.handle, events=[pb.GenerateResponse(accepted=accepted)])

    def _abort(self, handle: int) -> None:
        request_id = self._request_ids.get(handle)
        if request_id is not None:
            self._core.abort(request_id)

    def _step(self) -> list[RequestUpdate]:
        began = time.monotonic()
        events = self._core.step()
        self._last_step = time.monotonic()
        self._step_seconds += self._last_step - began
        return self._to_updates(events)

    def _to_updates(self, events: Iterable[EngineEvent]) -> list[RequestUpdate]:
        updates: dict[str, RequestUpdate] = {}
        gathers = self._watch.gathers.take()
        for event in events:
            self._watch.on_event(event, gathers)
            request_id = event.request_id
            update = updates.get(request_id)
            if update is None:
                update = updates[request_id] = RequestUpdate(handle=self._handles[request_id])
            update.events.append(to_response(event))
            if isinstance(event, FinishedOut):
                self._finish(request_id)
        return list(updates.values())

    def _finish(self, request_id: str) -> None:
        self._open[request_id] -= 1
        if self._open[request_id] == 0:
            del self._open[request_id]
            self._watch.end(request_id)
            del self._request_ids[self._handles.pop(request_id)]

    def _publish(self, updates: list[RequestUpdate]) -> None:
        """One message per step; without updates only a sign of life now and then."""
        now = time.monotonic()
        if not updates and now - self._last_event < HEARTBEAT_SECONDS:
            return
        self._last_event = now
        load = self._core.load()
        record = to_load_record(load, now - self._last_step, self._core.prefix_news())
        self._send(
            CoreEvent(step=CoreStep(updates=updates, load=record, stats=self._stats(load, now)))
        )

    def _stats(self, load: CoreLoad, now: float) -> CoreStats | None:
        """About once a second; None in between."""
        if now - self._last_stats < STATS_SECONDS:
            return None
        self._last_stats = now
        regions, region_bytes = region_counts()
        return CoreStats(
            cache_groups=to_cache_groups(load),
            steps=load.steps,
            step_seconds=self._step_seconds,
            gathered_rows=self._watch.gathers.rows,
            gather_seconds=self._watch.gathers.seconds,
            store_jobs=load.store_jobs,
            kvcache_connected=load.store_connected,
            open_regions=regions,
            region_bytes=region_bytes,
            resident_bytes=resident_bytes(),
        )

    def _send(self, event: CoreEvent) -> None:
        self._events.send(event.SerializeToString())
