"""The front of an engine: live requests, readiness of the core, load records.

Runs on one event loop and does no work per token beyond moving it from the core's step message
to the outbox of its request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.engine_pb2 import DescribeEngineResponse, GenerateRequest, LoadResponse
from warhorse.v1.stage_pb2 import CoreReady, CoreRefusal, CoreStep, CoreSubmit, RequestUpdate

from services.common.errors import ServiceError
from services.engine.front_watch import FrontWatch
from services.engine.grammar.service import GrammarCompiler
from services.engine.link import CoreLink
from services.engine.load_board import LoadBoard
from services.engine.outbox import TokenOutbox
from services.engine.requests import RequestLimits, validate

TICK_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrontConfig:
    """Limits of the front. Seconds and tokens."""

    model_names: tuple[str, ...]
    max_waiting_tokens: int = 1 << 20
    max_logprobs: int = 20
    merge_tokens: bool = True
    watchdog_seconds: float = 60.0


class Front:
    """Owns the outboxes of all live requests; the listener of one core link. Event loop only.

    `set_serving` hears of the engine's readiness whenever it changes. `refused` resolves to an
    exit code when the core cannot be started at all.
    """

    def __init__(
        self,
        config: FrontConfig,
        link: CoreLink,
        set_serving: Callable[[bool], None],
        grammars: GrammarCompiler | None = None,
        watch: FrontWatch | None = None,
    ) -> None:
        """`grammars`: None for a core that follows none. `watch` is told of every request."""
        self._watch = watch or FrontWatch()
        self.load = LoadBoard()
        self.refused: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._config = config
        self._link = link
        self._set_serving = set_serving
        self._grammars = grammars
        self._serving = False
        self._draining = False
        self._limits: RequestLimits | None = None  # of a core that is ready
        self._outboxes: dict[int, TokenOutbox] = {}
        self._handles = itertools.count(1)
        self._last_step = time.monotonic()
        self._idle = asyncio.Event()
        self._idle.set()
        self._ticker: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Bring the core up and watch over it and the streams."""
        self._link.start(self)
        self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())

    async def stop(self) -> None:
        """End the core."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self._grammars is not None:
            await self._grammars.close()
        await self._link.stop()

    # Requests

    async def complete(self, request: GenerateRequest) -> None:
        """Compile the request's grammar, if it has one. Raises ServiceError INVALID_FIELD."""
        if request.HasField("grammar") and self._grammars is not None:
            await self._grammars.complete(request.grammar)

    def open(
        self, request: GenerateRequest, seconds_left: float | None, *, windowed: bool = False
    ) -> TokenOutbox:
        """Check and submit `request`; whatever happens then, its outbox must be closed.

        `windowed` is for a reader that acknowledges tokens (see TokenOutbox).

        Raises ServiceError: DRAINING, LOADING, QUEUE_FULL, or what `validate` raises.
        """
        validate(request, self._limits_of_ready_core())
        prompt_tokens = len(request.prompt_token_ids) // 4
        self._check_queue(prompt_tokens)
        outbox = TokenOutbox(
            next(self._handles),
            request.request_id,
            choices=request.n,
            prompt_tokens=prompt_tokens,
            merge=self._config.merge_tokens,
            windowed=windowed,
        )
        self._watch.begin(outbox.handle, request)
        submit = CoreSubmit(
            handle=outbox.handle,
            request_id=f"{request.request_id}#{outbox.handle}",
            request=request,
            deadline_ns=_deadline_ns(seconds_left),
        )
        try:
            self._link.submit(submit)
        except ServiceError as error:
            self._watch.end(outbox.handle, prompt_tokens, error.reason_name)
            raise
        self._outboxes[outbox.handle] = outbox
        self._idle.clear()
        return outbox

    def close(self, outbox: TokenOutbox) -> None:
        """Forget the request; what the core still computes for it is aborted within a step."""
        if self._outboxes.pop(outbox.handle, None) is None:
            return
        if not outbox.core_is_done:
            self._link.abort(outbox.handle)
        self._watch.end(outbox.handle, outbox.prompt_tokens, _end_of(outbox))
        if not self._outboxes:
            self._idle.set()

    def abort(self, client_ids: Iterable[str]) -> int:
        """End the live requests of these ids; returns how many there were."""
        wanted = set(client_ids)
        hit = [o for o in self._outboxes.values() if o.client_id in wanted and not o.core_is_done]
        for outbox in hit:
            self._link.abort(outbox.handle)
            outbox.finish_aborted()
        return len(hit)

    @property
    def live_requests(self) -> int:
        """Requests whose call has not ended."""
        return len(self._outboxes)

    def unsent_tokens(self, handle: int) -> int:
        """Tokens of a request that wait for its reader."""
        outbox = self._outboxes.get(handle)
        return 0 if outbox is None else outbox.unsent_tokens

    def _limits_of_ready_core(self) -> RequestLimits:
        if self._draining:
            reason = ErrorReason.ERROR_REASON_DRAINING
            raise ServiceError(reason, "the engine is stopping and takes no new requests")
        if self._limits is None:
            reason = ErrorReason.ERROR_REASON_LOADING
            raise ServiceError(reason, "the model is being loaded", retry_after=1.0)
        return self._limits

    def _check_queue(self, prompt_tokens: int) -> None:
        most = self._config.max_waiting_tokens
        waiting = sum(o.prompt_tokens for o in self._outboxes.values() if not o.prompt_done)
        if waiting and waiting + prompt_tokens > most:
            raise ServiceError(
                ErrorReason.ERROR_REASON_QUEUE_FULL,
                f"{waiting} prompt tokens wait already, at most {most} may",
                retry_after=1.0,
            )

    # The core

    def on_ready(self, ready: CoreReady) -> None:
        """Take requests from now on."""
        self._limits = RequestLimits(
            model_names=self._config.model_names,
            vocab_size=ready.model.vocab_size,
            max_model_len=ready.model.max_model_len,
            max_logprobs=self._config.max_logprobs,
            takes_images=ready.model.takes_images,
        )
        self._last_step = time.monotonic()
        logger.info("engine ready: %s", ready.model.family)
        self._judge_health()

    def on_step(self, step: CoreStep) -> None:
        """Hand every update to its outbox; those of forgotten requests are dropped."""
        self._last_step = time.monotonic()
        for update in step.updates:
            outbox = self._outboxes.get(update.handle)
            if outbox is not None:
                _deliver(update, outbox)
        if step.HasField("stats"):
            self._watch.on_stats(step.stats)
        if step.HasField("load"):
            self._watch.on_load(step.load)
            self.load.publish(step.load, draining=self._draining)

    def on_lost(self, message: str) -> None:
        """Fail every live request; new ones are refused until the core is back."""
        self._limits = None
        self._judge_health()
        self._watch.on_lost()
        self.load.forget_prefixes()
        self.load.publish(LoadResponse(), draining=self._draining)
        for outbox in self._outboxes.values():
            outbox.fail(ServiceError(ErrorReason.ERROR_REASON_ENGINE_LOST, message))
            outbox.core_is_done = True

    def on_refused(self, exit_code: int) -> None:
        """The core cannot be started: tell whoever runs this process."""
        self._limits = None
        self._judge_health()
        if not self.refused.done():
            self.refused.set_result(exit_code)

    async def describe(self) -> DescribeEngineResponse:
        """The core's description under the first served name."""
        self._require_core()
        response = (await self._link.describe()).engine
        response.model.name = self._config.model_names[0]
        return response

    async def reset_prefix_cache(self) -> int:
        """Drop the unreferenced entries of the prefix cache; the number of pages."""
        self._require_core()
        return (await self._link.reset()).pages_dropped

    async def profile(self, *, start: bool) -> str:
        """Start a trace of the steps, or stop; the name of the file of a stop.

        Raises ServiceError: UNSUPPORTED without a folder for traces, INVALID_FIELD in the wrong
        order, INTERNAL where the file cannot be written.
        """
        self._require_core()
        done = await self._link.profile(start=start)
        if done.HasField("refusal"):
            refusal = done.refusal
            raise ServiceError(refusal.reason, refusal.message, field=refusal.field)
        return done.file

    async def drain(self) -> None:
        """Refuse new requests from now on; return when the last live one ended."""
        self._draining = True
        self._judge_health()
        self.load.publish(self.load.latest(), draining=True)
        await self._idle.wait()

    def _require_core(self) -> None:
        if self._limits is None:
            reason = ErrorReason.ERROR_REASON_LOADING
            raise ServiceError(reason, "the model is being loaded", retry_after=1.0)

    # Watching

    def _judge_health(self) -> None:
        silent = time.monotonic() - self._last_step > self._config.watchdog_seconds
        serving = self._limits is not None and not self._draining and not silent
        if serving != self._serving:
            self._serving = serving
            self._set_serving(serving)
            logger.info("engine %s", "serving" if serving else "not serving")

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._judge_health()
            for outbox in tuple(self._outboxes.values()):
                outbox.tick()


def _deliver(update: RequestUpdate, outbox: TokenOutbox) -> None:
    for event in update.events:
        outbox.push(event)
    if update.HasField("refusal"):
        outbox.fail(_refusal_error(update.refusal))
        outbox.core_is_done = True


def _end_of(outbox: TokenOutbox) -> str:
    """What ended a request, as a name: empty for its own end."""
    if outbox.error is not None:
        return outbox.error.reason_name
    return "" if outbox.core_is_done else "aborted"


def _refusal_error(refusal: CoreRefusal) -> ServiceError:
    retry = refusal.retry_after_seconds if refusal.HasField("retry_after_seconds") else None
    return ServiceError(refusal.reason, refusal.message, field=refusal.field, retry_after=retry)


def _deadline_ns(seconds_left: float | None) -> int:
    return 0 if seconds_left is None else time.monotonic_ns() + int(seconds_left * 1e9)
