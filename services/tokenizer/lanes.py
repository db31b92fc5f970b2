"""Parse protocol: open, tokens, finish, for one choice or for many over one call."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from warhorse.v1 import common_pb2, tokenizer_pb2

from services.common.errors import ServiceError
from services.common.metrics import Reading, single
from services.common.tracing import NoTracer, OpenSpan, Tracer, checked_traceparent
from services.tokenizer.parsers import SessionFactory
from services.tokenizer.rendering.conversation import refuse
from services.tokenizer.session import ParseSession
from services.tokenizer.vocabulary import Vocabulary
from services.tokenizer.wire import finish_from, response_of

# Open choices of one ParseMany call; far above what an engine runs at a time.
MAX_LANES = 65536

logger = logging.getLogger(__name__)


class ParseWatch:
    """Counts the choices of a process, and makes a span and a log line of each. Event loop only."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer or NoTracer()
        self.open = 0
        self.choices = 0
        self.tokens = 0
        self.seconds = 0.0

    def begin(self, opening: tokenizer_pb2.ParseOpen) -> OpenSpan:
        """A choice begins."""
        self.open += 1
        self.choices += 1
        return self._tracer.begin("parse", checked_traceparent(opening.traceparent))

    def end(self, span: OpenSpan, request_id: str, tokens: int, *, complete: bool) -> None:
        """A choice ended, or was given up."""
        self.open -= 1
        span.end({"tokens": tokens}, error="" if complete else "incomplete")
        logger.debug("parsed", extra={"request_id": request_id, "tokens": tokens})

    def readings(self) -> tuple[Reading, ...]:
        """What the metrics of the process show."""
        return (
            Reading("warhorse:parse_choices_open", "Choices being parsed", "gauge",
                    single(lambda: self.open)),
            Reading("warhorse:parse_choices", "Choices that began", "counter",
                    single(lambda: self.choices)),
            Reading("warhorse:parse_tokens", "Tokens that were parsed", "counter",
                    single(lambda: self.tokens)),
            Reading("warhorse:parse_seconds", "Time spent on parsing", "counter",
                    single(lambda: self.seconds)),
        )  # fmt: skip


class Lane:
    """One choice, from its ParseOpen to its ParseFinish."""

    def __init__(self, sessions: SessionFactory, vocabulary: Vocabulary, watch: ParseWatch) -> None:
        self._sessions = sessions
        self._vocabulary = vocabulary
        self._watch = watch
        self._span: OpenSpan | None = None
        self._request_id = ""
        self._tokens = 0
        self._session: ParseSession | None = None
        self._token_texts = False
        self.finished = False

    def answer(self, request: tokenizer_pb2.ParseRequest) -> tokenizer_pb2.ParseResponse | None:
        """Take one event; None for ParseOpen. Raises ServiceError, which closes the choice."""
        event = request.WhichOneof("event")
        session = self._session
        if session is None:
            if event != "open":
                raise refuse("the first message of a choice must be open", "event")
            self._token_texts = request.open.token_texts
            self._session = self._sessions.open(request.open)
            self._request_id = request.open.request_id
            self._span = self._watch.begin(request.open)
            return None
        if event == "tokens":
            ids = request.tokens.token_ids
            response = self._push(session, ids)
            if self._token_texts:
                response.token_bytes.extend(map(self._vocabulary.token_bytes, ids))
            return response
        if event == "finish":
            self.finished = True
            response = response_of(session.finish(finish_from(request.finish.reason)))
            self.close()
            return response
        raise refuse(f"a choice that is open takes tokens or finish, got {event}", "event")

    def _push(self, session: ParseSession, ids: Sequence[int]) -> tokenizer_pb2.ParseResponse:
        began = time.perf_counter()
        response = response_of(session.push(ids))
        self._watch.seconds += time.perf_counter() - began
        self._watch.tokens += len(ids)
        self._tokens += len(ids)
        return response

    def close(self) -> None:
        """The choice is over, finished or not. Later calls do nothing."""
        opened, self._span = self._span, None
        if opened is not None:
            self._watch.end(opened, self._request_id, self._tokens, complete=self.finished)


class ParseLanes:
    """The choices of one ParseMany call. An error ends its choice alone."""

    def __init__(self, sessions: SessionFactory, vocabulary: Vocabulary, watch: ParseWatch) -> None:
        self._sessions = sessions
        self._vocabulary = vocabulary
        self._watch = watch
        self._lanes: dict[int, Lane] = {}
        # Set when the process is about to stop: no choice may begin.
        self.draining = False

    @property
    def open(self) -> int:
        """Number of choices in flight."""
        return len(self._lanes)

    def answer(self, request: tokenizer_pb2.ParseManyRequest) -> tokenizer_pb2.ParseManyResponse:
        """Take the events of one message and return their answers in order."""
        response = tokenizer_pb2.ParseManyResponse()
        for item in request.items:
            if item.drop:
                self._forget(item.choice)
                continue
            try:
                answer = self._take(item)
            except ServiceError as error:
                self._forget(item.choice)
                response.answers.add(
                    choice=item.choice,
                    error=error.reason,
                    error_message=error.message,
                    error_field=error.field,
                )
                continue
            if answer is not None:
                response.answers.add(choice=item.choice, response=answer)
        return response

    def _forget(self, choice: int) -> None:
        if lane := self._lanes.pop(choice, None):
            lane.close()

    def close(self) -> None:
        """Give up what has not finished."""
        for choice in tuple(self._lanes):
            self._forget(choice)

    def _take(self, item: tokenizer_pb2.ParseManyItem) -> tokenizer_pb2.ParseResponse | None:
        lane = self._lanes.get(item.choice)
        if lane is None:
            if self.draining:
                raise ServiceError(common_pb2.ERROR_REASON_DRAINING, "the tokenizer is stopping")
            if len(self._lanes) >= MAX_LANES:
                raise ServiceError(
                    common_pb2.ERROR_REASON_QUEUE_FULL, f"more than {MAX_LANES} choices are open"
                )
            lane = self._lanes[item.choice] = Lane(self._sessions, self._vocabulary, self._watch)
        answer = lane.answer(item.request)
        if lane.finished:
            del self._lanes[item.choice]
        return answer
