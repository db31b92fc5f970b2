"""The tokens of one Generate call between the engine core and the reader of the stream.

gRPC buffers hundreds of KiB for a stalled reader, which for tokens is no back-pressure at all, so
the bound is kept here: while a message is being written, the tokens of later steps are merged
into one pending chunk per choice. On a call that many requests share, a reader says besides which
tokens it took.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.engine_pb2 import Finished, GenerateResponse, Progress, TokenChunk
from warhorse.v1.tokenizer_pb2 import FinishReason

from services.common.errors import ServiceError

MAX_UNSENT_TOKENS = 4096
WINDOW_TOKENS = 1024  # sent over a shared call and not yet taken by its reader
STALL_SECONDS = 30.0
PROGRESS_SECONDS = 4.0  # checked once a second, so a reader hears something every 5 seconds


class TokenOutbox:
    """Events of one request, in order. Filled and emptied on one event loop; one reader.

    `handle` is the front's own number of the request, `client_id` the caller's name for it, which
    several live requests may share. With `merge` False every chunk stays a message of its own.
    A reader with a call of its own awaits `next`; one that shares its call sets `on_news`, calls
    `poll` and acknowledges tokens with `taken` (`windowed`).
    """

    def __init__(
        self,
        handle: int,
        client_id: str,
        *,
        choices: int,
        prompt_tokens: int,
        merge: bool,
        windowed: bool = False,
    ) -> None:
        self.on_news: Callable[[], None] = self._wake
        self.handle = handle
        self.client_id = client_id
        self.prompt_tokens = prompt_tokens
        self.prompt_done = False
        self.core_is_done = False  # the core has forgotten the request
        self.unsent_tokens = 0
        self.error: ServiceError | None = None
        self._accepted = False
        self._merge = merge
        self._windowed = windowed
        self._untaken = 0
        self._loop = asyncio.get_running_loop()
        self._queue: deque[GenerateResponse] = deque()
        self._pending: dict[int, TokenChunk] = {}  # choice -> its chunk at rest in the queue
        self._completion: dict[int, int] = dict.fromkeys(range(choices), 0)  # of unfinished ones
        self._waiter: asyncio.Future[None] | None = None
        self._progress = Progress(total_tokens=prompt_tokens)
        self._last_event = self._loop.time()
        self._writing_since: float | None = None
        self._writer: asyncio.Task[object] | None = None

    def push(self, event: GenerateResponse) -> None:
        """Take one event of the core. Fails the stream when its reader is too slow."""
        if self.error is not None or self.core_is_done:
            return
        kind = event.WhichOneof("event")
        if kind == "chunk":
            self._push_chunk(event)
        elif kind == "finished":
            self._push_finished(event)
        elif kind == "progress":
            self._progress = event.progress
            return
        else:
            self._accepted = True
            self.prompt_done |= kind == "prompt_done"
            self._queue.append(event)
        self.on_news()

    def _push_chunk(self, event: GenerateResponse) -> None:
        chunk = event.chunk
        count = len(chunk.token_ids)
        self.unsent_tokens += count
        if self.unsent_tokens > MAX_UNSENT_TOKENS:
            self.fail(_slow(f"more than {MAX_UNSENT_TOKENS} tokens wait for the reader"))
            return
        choice = chunk.choice
        self._completion[choice] += count
        pending = self._pending.get(choice) if self._merge else None
        if pending is not None:
            pending.MergeFrom(chunk)
            return
        self._queue.append(event)
        if self._merge:
            self._pending[choice] = chunk

    def _push_finished(self, event: GenerateResponse) -> None:
        self._queue.append(event)
        del self._completion[event.finished.choice]
        self._pending.pop(event.finished.choice, None)
        self.core_is_done |= not self._completion

    def finish_aborted(self) -> None:
        """End every unfinished choice with reason ABORT, after the tokens that it has."""
        for choice, count in tuple(self._completion.items()):
            finished = Finished(
                choice=choice,
                reason=FinishReason.FINISH_REASON_ABORT,
                completion_tokens=count,
                error=ErrorReason.ERROR_REASON_CANCELLED,
            )
            self._push_finished(GenerateResponse(finished=finished))
        self.on_news()

    def fail(self, error: ServiceError) -> None:
        """End the stream with `error`; a write in flight is given up. Later calls do nothing."""
        if self.error is not None:
            return
        self.error = error
        self._queue.clear()
        self._pending.clear()
        self.unsent_tokens = 0
        self.on_news()
        if self._writing_since is not None and self._writer is not None:
            self._writer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> GenerateResponse | None:
        """The next message; None after the last one. Raises the stream's error.

        A message counts as written when its reader asks for the next one.
        """
        self._writing_since = None
        while (event := self.poll()) is None:
            if self.ended:
                return None
            self._waiter = self._loop.create_future()
            await self._waiter
            self._waiter = None
        self._writing_since = self._last_event
        return event

    def poll(self) -> GenerateResponse | None:
        """The next message if one may be sent now. Raises the stream's error."""
        if not self._queue:
            if self.error is not None:
                raise self.error
            return None
        if self._windowed and self._untaken >= WINDOW_TOKENS:
            self._writing_since = self._writing_since or self._loop.time()
            return None
        event = self._queue.popleft()
        if event.HasField("chunk"):
            count = len(event.chunk.token_ids)
            self.unsent_tokens -= count
            self._untaken += count
            self._pending.pop(event.chunk.choice, None)
        self._last_event = self._loop.time()
        return event

    def taken(self, tokens: int) -> None:
        """The reader of a shared call used up so many tokens."""
        self._untaken -= tokens
        self._writing_since = None
        self.on_news()

    @property
    def ended(self) -> bool:
        """Whether the last message was handed out."""
        return not self._queue and not self._completion

    def bind_writer(self, task: asyncio.Task[object] | None) -> None:
        """Name the task that reads and writes, so that `fail` can end a write that hangs."""
        self._writer = task

    def tick(self) -> None:
        """Called about once a second: refuse a stalled reader, report a silent prefill."""
        now = self._loop.time()
        if self._writing_since is not None:
            if now - self._writing_since > STALL_SECONDS:
                self.fail(_slow(f"the reader took nothing for {STALL_SECONDS:g} seconds"))
        elif self._is_silent_prefill and now - self._last_event > PROGRESS_SECONDS:
            self._queue.append(GenerateResponse(progress=self._progress))
            self.on_news()

    @property
    def _is_silent_prefill(self) -> bool:
        alive = self.error is None and bool(self._completion)
        return alive and self._accepted and not self.prompt_done and not self._queue


def _slow(what: str) -> ServiceError:
    return ServiceError(ErrorReason.ERROR_REASON_SLOW_CONSUMER, f"stream ended: {what}")
