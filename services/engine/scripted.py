"""An engine core that replays a script. It runs as a task of the front's event loop.

A core process of its own would add a process to the same cores and a ring message per step
without sparing the front anything; steps, updates and merging are those of the real core.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from warhorse.v1 import engine_pb2 as pb
from warhorse.v1.common_pb2 import ErrorReason, ModelInfo
from warhorse.v1.stage_pb2 import (
    CoreDescription,
    CoreProfileDone,
    CoreReady,
    CoreRefusal,
    CoreResetDone,
    CoreStep,
    CoreSubmit,
    RequestUpdate,
)

from services.common.errors import ServiceError, StartupError
from services.engine.link import CoreListener
from services.engine.model_card import ModelCard
from services.engine.replay import Replay, certain
from services.engine.script import Script, ScriptLine, load_script

AHEAD_TOKENS = 64  # a script without delay runs this far ahead of its reader
LOOK_SECONDS = 0.0005  # between looks at readers that are behind
SLACK_SECONDS = 0.0005  # what is due this soon belongs to the same step
HEARTBEAT_SECONDS = 0.5
LOAD_SECONDS = 0.1

Decode = Callable[[Sequence[int]], str]


class ScriptedLink:
    """A CoreLink without a model. Event loop only.

    `decode` turns prompt ids to text, special tokens included; `info` is the model as served.
    """

    def __init__(self, script: Script, decode: Decode, info: ModelInfo) -> None:
        self._script = script
        self._decode = decode
        self._info = info
        self._live: dict[int, list[Replay]] = {}
        self._eager: list[Replay] = []
        self._timed: list[tuple[float, int, Replay]] = []  # heap by the time of the next chunk
        self._order = itertools.count()
        self._news = CoreStep()  # what the next step says besides tokens
        self._load = pb.LoadResponse()
        self._load_at = 0.0
        self._alarm: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, listener: CoreListener) -> None:
        """Ready at the next turn of the loop."""
        self._task = asyncio.get_running_loop().create_task(self._run(listener))

    async def stop(self) -> None:
        """End the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def submit(self, submit: CoreSubmit) -> None:
        """Start the replay. Raises ServiceError INVALID_FIELD where no line matches."""
        request = submit.request
        prompt = np.frombuffer(request.prompt_token_ids, dtype="<u4").tolist()
        line = self._line_for(prompt)
        replays = [Replay(submit.handle, choice, line, request) for choice in range(request.n)]
        self._live[submit.handle] = replays
        self._announce(submit, prompt)
        now = asyncio.get_running_loop().time()
        for replay in replays:
            self._schedule(replay, now)
        self._wake()

    def _line_for(self, prompt: list[int]) -> ScriptLine:
        text = self._decode(prompt) if self._script.needs_text else ""
        line = self._script.find(text)
        if line is None:
            raise ServiceError(
                ErrorReason.ERROR_REASON_INVALID_FIELD,
                "prompt_token_ids: no line of the script matches this prompt",
                field="prompt_token_ids",
            )
        return line

    def _announce(self, submit: CoreSubmit, prompt: list[int]) -> None:
        update = self._news.updates.add(handle=submit.handle)
        update.events.add().accepted.prompt_tokens = len(prompt)
        done = update.events.add().prompt_done
        done.SetInParent()
        output = submit.request.output
        if output.HasField("prompt_logprobs"):
            done.prompt_logprobs.extend(certain(prompt[1:], output.prompt_logprobs))
        self._load.prompt_tokens += len(prompt)

    def _schedule(self, replay: Replay, now: float) -> None:
        if replay.delay_seconds > 0 and not replay.is_done:
            due = replay.due_after(now)
            heapq.heappush(self._timed, (due, next(self._order), replay))
        else:
            self._eager.append(replay)

    def abort(self, handle: int) -> None:
        """Forget a request; its replays are dropped at their next turn."""
        for replay in self._live.pop(handle, ()):
            replay.abandoned = True

    async def reset(self) -> CoreResetDone:
        """There is no prefix cache: nothing dropped."""
        return CoreResetDone()

    async def profile(self, *, start: bool) -> CoreProfileDone:
        """There are no steps to record."""
        reason, message = ErrorReason.ERROR_REASON_UNSUPPORTED, "a scripted engine makes no traces"
        return CoreProfileDone(refusal=CoreRefusal(reason=reason, message=message))

    async def describe(self) -> CoreDescription:
        """The served model; no pools, no weights."""
        engine = pb.DescribeEngineResponse(model=self._info, device="none")
        return CoreDescription(engine=engine)

    def _wake(self) -> None:
        if self._alarm is not None and not self._alarm.done():
            self._alarm.set_result(None)

    async def _run(self, listener: CoreListener) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)
        listener.on_ready(CoreReady(model=self._info, description=await self.describe()))
        while True:
            now = loop.time()
            step, self._news = self._news, CoreStep()
            self._step_timed(step, now)
            self._step_eager(step, listener)
            if step.updates or now - self._load_at > HEARTBEAT_SECONDS:
                self._add_load(step, now)
                listener.on_step(step)
            await self._rest(loop)

    def _step_timed(self, step: CoreStep, now: float) -> None:
        while self._timed and self._timed[0][0] <= now + SLACK_SECONDS:
            due, _, replay = heapq.heappop(self._timed)
            if replay.abandoned:
                continue
            self._emit(step.updates.add(handle=replay.handle), replay, 1)
            if not replay.is_done:
                again = max(replay.due_after(due), now)
                heapq.heappush(self._timed, (again, next(self._order), replay))

    def _step_eager(self, step: CoreStep, listener: CoreListener) -> None:
        kept = []
        for replay in self._eager:
            if replay.abandoned:
                continue
            room = AHEAD_TOKENS - listener.unsent_tokens(replay.handle)
            if 2 * room > AHEAD_TOKENS:
                chunks = max(1, room // replay.chunk)
                self._emit(step.updates.add(handle=replay.handle), replay, chunks)
            if not replay.is_done:
                kept.append(replay)
        self._eager = kept

    def _emit(self, update: RequestUpdate, replay: Replay, chunks: int) -> None:
        self._load.generation_tokens += replay.emit(update, chunks)
        if replay.is_done:
            replays = self._live[replay.handle]
            replays.remove(replay)
            if not replays:
                del self._live[replay.handle]

    def _add_load(self, step: CoreStep, now: float) -> None:
        running = len(self._live)
        if running != self._load.running or now - self._load_at > LOAD_SECONDS:
            self._load.running = running
            self._load_at = now
            step.load.CopyFrom(self._load)

    async def _rest(self, loop: asyncio.AbstractEventLoop) -> None:
        """Until the next chunk is due, a request comes, or a sign of life is."""
        seconds = HEARTBEAT_SECONDS
        if self._timed:
            seconds = min(seconds, self._timed[0][0] - loop.time())
        if self._eager:
            seconds = min(seconds, LOOK_SECONDS)
        if self._news.updates or seconds <= 0:
            await asyncio.sleep(0)
            return
        alarm = self._alarm = loop.create_future()
        timer = loop.call_later(seconds, _ring, alarm)
        try:
            await alarm
        finally:
            timer.cancel()
            self._alarm = None


def _ring(alarm: asyncio.Future[None]) -> None:
    if not alarm.done():
        alarm.set_result(None)


def open_scripted(model: Path, script: Path, max_model_len: int | None) -> ScriptedLink:
    """The scripted core for the tokenizer in folder `model`. Raises StartupError."""
    card = ModelCard.read(model)
    path = model / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise StartupError(f"cannot read {path}: {error}") from error

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    lines = load_script(script, encode, card.vocab_size)
    return ScriptedLink(lines, decode, card.info(max_model_len))
