"""Runs generations: engine stream, one parser per choice, and the retry when an engine is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from warhorse.v1 import common_pb2, engine_pb2, tokenizer_pb2

from services.common.errors import ServiceError
from services.common.logs import request_id_var
from services.common.tracing import traceparent_var
from services.gateway.calls import TokenizerLostError, is_lost
from services.gateway.choice import Choice
from services.gateway.engine_hub import EngineRequest
from services.gateway.engines import EnginePeer, Engines
from services.gateway.events import EngineTimes, PromptReport, Usage
from services.gateway.outbox import Outbox
from services.gateway.plan import GenerationPlan
from services.gateway.prefix import PromptPrefix
from services.gateway.tokenizers import Tokenizers

logger = logging.getLogger(__name__)

MAX_PARALLEL_PROMPTS = 64
RETRY_PAUSE = 0.2
_NO_ROOM = frozenset({common_pb2.ERROR_REASON_QUEUE_FULL, common_pb2.ERROR_REASON_POOL_EXHAUSTED})
# An engine's answer when it cannot open the region of an image.
_IMAGES_GONE = common_pb2.ERROR_REASON_STALE_GENERATION


class Generation:
    """One prompt on one engine, its choices on tokenizers; `run` puts events into the outbox."""

    def __init__(
        self, plan: GenerationPlan, engines: Engines, tokenizers: Tokenizers, outbox: Outbox
    ) -> None:
        self.plan = plan
        self.report = PromptReport()
        self._engines = engines
        self._tokenizers = tokenizers
        self._outbox = outbox
        self._finished_at = 0.0
        self._preemptions = 0
        plan.request.client_request_id = request_id_var.get()
        plan.request.traceparent = plan.parse.traceparent = traceparent_var.get()
        self._choices: list[Choice] = []
        self._call: EngineRequest | None = None
        self._failure: ServiceError | None = None  # of the engine
        self._done = asyncio.Event()
        self._started = False  # the engine accepted the prompt and began to compute it
        self._full: list[EnginePeer] = []
        self._lost: list[EnginePeer] = []
        self._prefix = PromptPrefix(plan.request)
        self._restarts = 0
        self._rerendered = False
        self._retry_until: float | None = None

    def usage(self) -> Usage:
        """Counts so far."""
        return Usage(
            prompt=self.plan.prompt.length,
            completion=sum(c.delivered for c in self._choices),
            cached=self.report.cached_tokens,
            created=self.report.created_cache_tokens,
            reasoning=sum(c.reasoning_tokens for c in self._choices),
            images=self.plan.prompt.image_tokens,
        )

    def times(self) -> EngineTimes:
        """What the engine spent, as far as it has said so."""
        report = self.report
        return EngineTimes(
            queue=report.queue_seconds,
            prefill=report.prefill_seconds,
            decode=max(0.0, self._finished_at - report.at) if report.at else 0.0,
            prompt=self.plan.prompt.length,
            cached=report.cached_tokens,
            external=report.external_cached_tokens,
            preemptions=self._preemptions,
        )

    async def run(self) -> None:
        """Run to the end of all choices; raises ServiceError."""
        refusal: ServiceError | None = None
        while True:
            try:
                engine = await self._engines.pick(self._prefix, self._full, self._lost)
            except ServiceError as none_left:
                raise refusal or none_left from None
            try:
                return await self._attempt(engine)
            except ServiceError as error:
                refusal = self._in_client_terms(error)
                await self._prepare_retry(engine, refusal)

    def _in_client_terms(self, error: ServiceError) -> ServiceError:
        """A grammar at fault under the name of the field that asked for it."""
        if error.field != "grammar":
            return error
        return ServiceError(error.reason, error.message, field=self.plan.grammar_field)

    async def _prepare_retry(self, engine: EnginePeer, error: ServiceError) -> None:
        """Make ready for another attempt, or raise `error` when there shall be none."""
        if error.reason in _NO_ROOM and not self._started:
            self._full.append(engine)
            return
        emitted = any(c.emitted for c in self._choices)
        if error.reason == _IMAGES_GONE and self.plan.prompt.images and not emitted:
            return await self._rerender_once(error)
        visible = not self.plan.restartable and emitted
        if visible or isinstance(error, TokenizerLostError) or not is_lost(error):
            raise error
        now = time.monotonic()
        self._retry_until = self._retry_until or now + self._engines.set.wait_seconds
        self._restarts += self._started
        if self._restarts > 1 or now >= self._retry_until:
            raise error
        logger.warning("an engine was lost; the request begins again")
        self._engines.set.mark_lost(engine)
        self._lost = [engine]
        self._outbox.restart(self.plan.choices)
        await asyncio.sleep(RETRY_PAUSE)

    async def _rerender_once(self, error: ServiceError) -> None:
        """Have the images published again: their tokenizer dropped them, or is another one now."""
        lost = ServiceError(
            error.reason, "The images of the request were lost on their way.", retry_after=1.0
        )
        if self._rerendered or self.plan.rerender is None:
            raise lost from error
        self._rerendered = True
        logger.warning("images were gone; the prompt is rendered again")
        prompt = await self.plan.rerender()
        if prompt.token_ids != self.plan.prompt.token_ids:  # what a URL names has changed
            raise lost from error
        request = self.plan.request
        del request.images[:]
        request.images.extend(prompt.images)

    async def _attempt(self, engine: EnginePeer) -> None:
        self._started = False
        self._failure = None
        self.report = PromptReport()
        self._done = asyncio.Event()
        self._call = call = engine.hub.open(self.plan.request, self.plan.deadline_seconds, self)
        self._choices = [
            Choice(self.plan, i, self._outbox, self._on_change, call.taken)
            for i in self.plan.choices
        ]
        engine.inflight += 1
        try:
            for choice in self._choices:
                await self._tokenizers.attach(choice)
            await self._done.wait()
            self._raise_failure()
        finally:
            engine.inflight -= 1
            call.drop()
            for choice in self._choices:
                self._tokenizers.detach(choice)

    def on_failure(self, error: ServiceError) -> None:
        """The engine's stream broke, which matters as long as a choice needs it."""
        if self._needs_engine():
            self._failure = error
            self._done.set()

    def wake(self) -> None:
        """The client took what it had: its choices may go on."""
        for choice in self._choices:
            choice.wake()

    def _raise_failure(self) -> None:
        for choice in self._choices:
            if choice.error is not None:
                raise choice.error
        if self._failure is not None:
            raise self._failure

    def on_event(self, response: engine_pb2.GenerateResponse) -> None:
        """The engine's next event."""
        event = response.WhichOneof("event")
        if event == "chunk":
            chunk = response.chunk
            self._choices[chunk.choice].submit(chunk.token_ids, chunk.logprobs)
        elif event == "finished":
            self._finish(response.finished)
        elif event == "prompt_done":
            done = response.prompt_done
            self.report = PromptReport(
                cached_tokens=done.cached_tokens,
                external_cached_tokens=done.external_cached_tokens,
                created_cache_tokens=done.created_cache_tokens,
                queue_seconds=done.queue_seconds,
                prefill_seconds=done.prefill_seconds,
                at=time.monotonic(),
                logprobs=list(done.prompt_logprobs),
            )
        elif event == "accepted":
            self._started = True

    def _finish(self, finished: engine_pb2.Finished) -> None:
        self._finished_at = time.monotonic()
        self._preemptions += finished.preemptions
        if finished.reason == tokenizer_pb2.FINISH_REASON_ERROR:
            reason = finished.error or common_pb2.ERROR_REASON_INTERNAL
            raise ServiceError(reason, finished.error_message or "The engine failed.")
        self._choices[finished.choice].finish(finished)

    def _needs_engine(self) -> bool:
        return any(c.needs_engine for c in self._choices)

    def _on_change(self) -> None:
        """A choice ended, failed, or found its stop string.

        With no choice left that needs it, the engine's remaining work is void.
        """
        failed = any(c.error is not None for c in self._choices)
        if failed or all(c.ended for c in self._choices):
            self._done.set()
        stopped = not self._needs_engine() and not all(c.engine_finished for c in self._choices)
        if failed or stopped:
            self._drop()

    def _drop(self) -> None:
        if self._call is not None:
            self._call.drop()


class EventStream:
    """All generations of one HTTP request as one stream of events.

    An async context manager: leaving it early cancels whatever still runs. `take` and `poke` are
    those of the outbox.
    """

    def __init__(
        self, plans: Sequence[GenerationPlan], engines: Engines, tokenizers: Tokenizers
    ) -> None:
        self.tokenizers = tokenizers
        self._outbox = Outbox(self._on_room)
        self.take = self._outbox.take
        self.poke = self._outbox.poke
        self.generations = [Generation(p, engines, tokenizers, self._outbox) for p in plans]
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def usage(self) -> Usage:
        """Counts so far, over all prompts."""
        total = Usage()
        for generation in self.generations:
            total.add(generation.usage())
        return total

    def times(self) -> list[EngineTimes]:
        """What engines spent, per prompt."""
        return [generation.times() for generation in self.generations]

    def _on_room(self) -> None:
        for generation in self.generations:
            generation.wake()

    async def _run(self) -> None:
        try:
            if len(self.generations) == 1:
                await self.generations[0].run()
            else:
                await self._run_many()
        except Exception as error:
            # Not handled here: the reader of the outbox raises it.
            self._outbox.fail(error)
        else:
            self._outbox.close()

    async def _run_many(self) -> None:
        limit = asyncio.Semaphore(MAX_PARALLEL_PROMPTS)

        async def run(generation: Generation) -> None:
            async with limit:
                await generation.run()

        async with asyncio.TaskGroup() as group:
            for generation in self.generations:
                group.create_task(run(generation))
