"""One choice of a generation: tokens from the engine in, parsed pieces out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from warhorse.v1 import engine_pb2, tokenizer_pb2

from services.common.errors import ServiceError
from services.gateway.events import Ended, Update
from services.gateway.outbox import Outbox
from services.gateway.plan import GenerationPlan
from services.gateway.replay import ReplayFilter

MAX_PENDING = 4096  # tokens that wait to be parsed; the engine holds back what comes after them

FINISH_NAMES = {
    tokenizer_pb2.FINISH_REASON_STOP: "stop",
    tokenizer_pb2.FINISH_REASON_LENGTH: "length",
    tokenizer_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    tokenizer_pb2.FINISH_REASON_ABORT: "abort",
}


class Choice:
    """Owns the tokens of one choice and what was made of them.

    The engine's reader calls `submit` and `finish`. A parse hub takes `open_event` and then
    `next_event` and brings `settle` or `fail`; `wake`, set by the hub, tells it that there is
    something to take. Because every token is kept, a lost tokenizer is replaced by another one
    that gets all tokens again (`rewind`); text that was already passed on is left out.

        |<------------------ tokens ------------------>|
        |<-- delivered -->|<-- outstanding -->|pending |
                          answered            sent
    """

    def __init__(
        self,
        plan: GenerationPlan,
        index: int,
        outbox: Outbox,
        on_change: Callable[[], None],
        on_taken: Callable[[int], None],
    ) -> None:
        """`on_taken` is told how many more tokens need no room at the engine any longer."""
        self.index = index
        self.delivered = 0
        self.reasoning_tokens = 0
        self.emitted = False
        self.losses = 0  # tokenizers that died under this choice
        self.abandoned = False  # nobody waits for it any more
        self.error: ServiceError | None = None
        self.ended = False
        self.wake: Callable[[], None] = _nobody
        self._plan = plan
        self._outbox = outbox
        self._on_change = on_change
        self._on_taken = on_taken
        self._tokens: list[int] = []
        self._logprobs: list[engine_pb2.TokenLogprob] = []  # of tokens not yet delivered
        self._sent = 0
        self._answered = 0
        self._taken = 0
        self._filter = ReplayFilter()
        self._stop_string: str | None = None
        self._engine_finish: engine_pb2.Finished | None = None
        self._finish_sent = False

    @property
    def needs_engine(self) -> bool:
        """Whether more tokens of the engine would be used."""
        return self._engine_finish is None and self._stop_string is None

    @property
    def engine_finished(self) -> bool:
        """Whether the engine itself ended this choice."""
        return self._engine_finish is not None

    def submit(self, token_ids: Sequence[int], logprobs: Sequence[engine_pb2.TokenLogprob]) -> None:
        """Add tokens; they are acknowledged at once unless too many wait to be parsed."""
        if self._stop_string is not None:
            self._on_taken(len(token_ids))
            return
        self._tokens.extend(token_ids)
        if logprobs:
            self._logprobs.extend(logprobs)
        if len(self._tokens) - self._sent < MAX_PENDING:
            self._take()
        self.wake()

    def finish(self, finished: engine_pb2.Finished) -> None:
        """The engine ended this choice."""
        if self._stop_string is None:
            self._engine_finish = finished
            self.wake()

    def rewind(self) -> None:
        """A new parser starts from the first token."""
        self._sent = self._answered = 0
        self._finish_sent = False
        self._filter.rewind()

    def open_event(self) -> tokenizer_pb2.ParseRequest:
        """What a parser is told first."""
        return tokenizer_pb2.ParseRequest(open=self._plan.parse)

    def next_event(self) -> tokenizer_pb2.ParseRequest | None:
        """What to send now: pending tokens, or the finish once they are answered.

        None when there is nothing, when the client does not take what it has, and while an
        answer is outstanding.
        """
        if self._answered < self._sent or self._finish_sent or self._outbox.full:
            return None
        ready = len(self._tokens) - self._sent
        last = not self.needs_engine
        if ready:
            if not last and self._sent and ready < min(self._plan.stream_interval, MAX_PENDING):
                return None
            tokens = tokenizer_pb2.ParseTokens(token_ids=self._tokens[self._sent :])
            self._sent = len(self._tokens)
            self._take()
            return tokenizer_pb2.ParseRequest(tokens=tokens)
        if not last:
            return None
        self._finish_sent = True
        finish = tokenizer_pb2.ParseFinish(reason=self._engine_reason())
        return tokenizer_pb2.ParseRequest(finish=finish)

    def _take(self) -> None:
        """Acknowledge all tokens that came."""
        if len(self._tokens) > self._taken:
            self._on_taken(len(self._tokens) - self._taken)
            self._taken = len(self._tokens)

    def settle(self, answer: tokenizer_pb2.ParseResponse) -> None:
        """Pass on what the answer to the outstanding event brought."""
        pieces = self._filter.pieces(answer.deltas)
        stopped = answer.HasField("stop_matched")
        used = self._sent
        if stopped and answer.HasField("tokens_used"):
            used = self._answered + answer.tokens_used
        self._answered = self._sent
        fresh = max(0, used - self.delivered)
        self.reasoning_tokens = answer.reasoning_tokens
        if pieces or fresh:
            self._deliver(Update(self.index, pieces), fresh)
        if stopped:
            self._stop(answer.stop_matched)
        if self._finish_sent:
            self._end(answer.finish_reason)
        elif len(self._tokens) > self._sent or not self.needs_engine:
            self.wake()

    def fail(self, error: ServiceError) -> None:
        """Nothing more will be parsed."""
        if not self.ended and self.error is None:
            self.error = error
            self._on_change()

    def _deliver(self, update: Update, fresh: int) -> None:
        update.token_ids = self._tokens[self.delivered : self.delivered + fresh]
        if self._logprobs:
            update.logprobs, self._logprobs = self._logprobs[:fresh], self._logprobs[fresh:]
        self.delivered += fresh
        self.emitted = True
        self._outbox.put(update)

    def _engine_reason(self) -> tokenizer_pb2.FinishReason:
        if self._stop_string is not None or self._engine_finish is None:
            return tokenizer_pb2.FINISH_REASON_STOP
        return self._engine_finish.reason

    def _stop(self, index: int) -> None:
        """A stop string was found: no later token counts."""
        self._stop_string = self._plan.parse.stop[index]
        self._take()
        del self._tokens[self.delivered :]
        self._sent = self._answered = self.delivered
        self._on_change()

    def _end(self, reason: tokenizer_pb2.FinishReason) -> None:
        name = FINISH_NAMES.get(reason or self._engine_reason(), "stop")
        self.ended = True
        self._outbox.put(Ended(self.index, name, self._stop_reason()))
        self._on_change()

    def _stop_reason(self) -> str | int | None:
        if self._stop_string is not None:
            return self._stop_string
        finished = self._engine_finish
        if finished is None or not finished.HasField("stop_token_id"):
            return None
        token = finished.stop_token_id
        return None if token in self._plan.prompt.eos_token_ids else token


def _nobody() -> None:
    """The wake of a choice that no hub has taken yet."""
