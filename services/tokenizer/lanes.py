"""Parse protocol: open, tokens, finish, for one choice or for many over one call."""

from __future__ import annotations

from warhorse.v1 import common_pb2, tokenizer_pb2

from services.common.errors import ServiceError
from services.tokenizer.parsers import SessionFactory
from services.tokenizer.rendering.conversation import refuse
from services.tokenizer.session import ParseSession
from services.tokenizer.vocabulary import Vocabulary
from services.tokenizer.wire import finish_from, response_of

# Open choices of one ParseMany call; far above what an engine runs at a time.
MAX_LANES = 65536


class Lane:
    """One choice, from its ParseOpen to its ParseFinish."""

    def __init__(self, sessions: SessionFactory, vocabulary: Vocabulary) -> None:
        self._sessions = sessions
        self._vocabulary = vocabulary
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
            return None
        if event == "tokens":
            ids = request.tokens.token_ids
            response = response_of(session.push(ids))
            if self._token_texts:
                response.token_bytes.extend(map(self._vocabulary.token_bytes, ids))
            return response
        if event == "finish":
            self.finished = True
            return response_of(session.finish(finish_from(request.finish.reason)))
        raise refuse(f"a choice that is open takes tokens or finish, got {event}", "event")


class ParseLanes:
    """The choices of one ParseMany call. An error ends its choice alone."""

    def __init__(self, sessions: SessionFactory, vocabulary: Vocabulary) -> None:
        self._sessions = sessions
        self._vocabulary = vocabulary
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
                self._lanes.pop(item.choice, None)
                continue
            try:
                answer = self._take(item)
            except ServiceError as error:
                self._lanes.pop(item.choice, None)
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

    def _take(self, item: tokenizer_pb2.ParseManyItem) -> tokenizer_pb2.ParseResponse | None:
        lane = self._lanes.get(item.choice)
        if lane is None:
            if self.draining:
                raise ServiceError(common_pb2.ERROR_REASON_DRAINING, "the tokenizer is stopping")
            if len(self._lanes) >= MAX_LANES:
                raise ServiceError(
                    common_pb2.ERROR_REASON_QUEUE_FULL, f"more than {MAX_LANES} choices are open"
                )
            lane = self._lanes[item.choice] = Lane(self._sessions, self._vocabulary)
        answer = lane.answer(item.request)
        if lane.finished:
            del self._lanes[item.choice]
        return answer
