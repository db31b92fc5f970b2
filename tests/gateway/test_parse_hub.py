"""The hub and its choices without any network: batching, drops, loss, back-pressure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from warhorse.v1 import common_pb2, engine_pb2, tokenizer_pb2

from services.common.errors import ServiceError
from services.gateway.choice import MAX_PENDING, Choice
from services.gateway.events import Ended, Update
from services.gateway.outbox import MAX_EVENTS, Outbox
from services.gateway.parse_hub import ParseHub
from services.gateway.plan import GenerationPlan, Prompt
from tests.gateway.fake_parser import FakeParser
from tests.gateway.vocabulary import ids

STOP = tokenizer_pb2.FINISH_REASON_STOP


class Call:
    """A ParseMany call whose answers wait for `release`."""

    def __init__(self) -> None:
        self.messages: list[tokenizer_pb2.ParseManyRequest] = []
        self.parsers: dict[int, FakeParser] = {}
        self.answers: asyncio.Queue[tokenizer_pb2.ParseManyResponse] = asyncio.Queue()
        self.release = asyncio.Semaphore(0)
        self.broken = False

    async def write(self, message: tokenizer_pb2.ParseManyRequest) -> None:
        if self.broken:
            raise asyncio.InvalidStateError("gone")
        self.messages.append(message)
        response = tokenizer_pb2.ParseManyResponse()
        for item in message.items:
            kind = item.request.WhichOneof("event")
            if item.drop:
                del self.parsers[item.choice]
            elif kind == "open":
                self.parsers[item.choice] = FakeParser(item.request.open)
            elif kind == "tokens":
                tokens = list(item.request.tokens.token_ids)
                answer = self.parsers[item.choice].push(tokens)
                response.answers.add(choice=item.choice, response=answer)
            else:
                answer = self.parsers.pop(item.choice).finish(item.request.finish.reason)
                response.answers.add(choice=item.choice, response=answer)
        self.answers.put_nowait(response)

    async def read(self) -> tokenizer_pb2.ParseManyResponse:
        await self.release.acquire()
        return self.answers.get_nowait()

    def cancel(self) -> None:
        self.broken = True


class Stub:
    """Opens a fresh call each time."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def ParseMany(self) -> Call:  # noqa: N802
        self.calls.append(Call())
        return self.calls[-1]


class Bench:
    """A hub with as many choices as asked for."""

    def __init__(self) -> None:
        self.stub = Stub()
        self.lost: list[Choice] = []
        self.hub = ParseHub(self.stub, self.lost.extend)  # type: ignore[arg-type]
        self.outbox = Outbox(self._on_room)
        self.choices: list[Choice] = []
        self.changes = 0
        self.taken = 0

    def _on_room(self) -> None:
        for choice in self.choices:
            choice.wake()

    def _on_change(self) -> None:
        self.changes += 1

    def _on_taken(self, tokens: int) -> None:
        self.taken += tokens

    def choice(self, interval: int = 1, **opening: Any) -> Choice:
        plan = GenerationPlan(
            Prompt(b""),
            engine_pb2.GenerateRequest(n=1),
            tokenizer_pb2.ParseOpen(**opening),
            stream_interval=interval,
        )
        choice = Choice(plan, len(self.choices), self.outbox, self._on_change, self._on_taken)
        self.choices.append(choice)
        self.hub.attach(choice)
        return choice

    @property
    def call(self) -> Call:
        return self.stub.calls[-1]

    async def answer(self, count: int = 1) -> None:
        """Let `count` messages be answered."""
        for _ in range(count):
            self.call.release.release()
            await settle()

    async def events(self) -> list[Any]:
        self.outbox.poke()
        return await self.outbox.take() or []


async def settle() -> None:
    """Run everything that can run."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def bench() -> Any:
    bench = Bench()
    yield bench
    await bench.hub.close()
    for call in bench.stub.calls:
        open_choices = set(bench.hub._choices)
        assert call.broken and (set(call.parsers) <= open_choices or call is not bench.call)


async def test_tokens_of_all_choices_share_a_message(bench: Bench) -> None:
    choices = [bench.choice() for _ in range(3)]
    await settle()
    for text in ("ab", "cd"):
        for choice in choices:
            choice.submit(ids(text), ())
    assert len(bench.call.messages) == 1, "the openings are not answered yet"
    await bench.answer()
    tokens = [list(item.request.tokens.token_ids) for item in bench.call.messages[1].items]
    assert tokens == [ids("abcd")] * 3
    await bench.answer()
    assert [e.choice for e in await bench.events()] == [0, 1, 2]


async def test_the_finish_follows_the_last_tokens(bench: Bench) -> None:
    choice = bench.choice()
    choice.submit(ids("ab"), ())
    choice.finish(engine_pb2.Finished(reason=STOP))
    await settle()
    await bench.answer(2)
    assert [type(e) for e in await bench.events()] == [Update, Ended]
    assert choice.ended and not bench.call.parsers


async def test_a_stop_string_drops_what_follows_it(bench: Bench) -> None:
    choice = bench.choice(stop=["b"])
    choice.submit(ids("abc"), ())
    await settle()
    choice.submit(ids("def"), ())
    await bench.answer(2)
    choice.submit(ids("ghi"), ())
    update, ended = await bench.events()
    assert (update.pieces[0].text, list(update.token_ids)) == ("a", ids("ab"))
    assert ended.stop_reason == "b" and choice.delivered == 2 and not choice.needs_engine


async def test_a_detached_choice_is_dropped_at_the_tokenizer(bench: Bench) -> None:
    gone, stays = bench.choice(), bench.choice()
    await settle()
    gone.submit(ids("x"), ())
    bench.hub.detach(gone)
    bench.hub.detach(gone)
    stays.submit(ids("y"), ())
    await bench.answer(2)
    assert len(bench.call.parsers) == 1
    assert [e.choice for e in await bench.events()] == [1]


async def test_a_choice_detached_before_its_opening_leaves_no_trace(bench: Bench) -> None:
    bench.hub.detach(bench.choice())
    await settle()
    assert all(not call.messages for call in bench.stub.calls)


async def test_a_broken_call_gives_all_choices_back(bench: Bench) -> None:
    first, second = bench.choice(), bench.choice()
    first.submit(ids("ab"), ())
    await settle()
    await bench.answer()
    bench.call.broken = True
    second.submit(ids("cd"), ())
    await settle()
    assert bench.lost == [first, second]
    for choice in bench.lost:
        bench.hub.attach(choice)
    first.submit(ids("!"), ())
    await settle()
    await bench.answer()
    texts = {(e.choice, e.pieces[0].text) for e in await bench.events()}
    assert texts == {(0, "ab"), (0, "!"), (1, "cd")}
    assert len(bench.stub.calls) == 2


async def test_a_client_that_takes_nothing_holds_back_its_tokens_alone(bench: Bench) -> None:
    choice = bench.choice()
    await settle()
    await bench.answer()
    for i in range(MAX_EVENTS):
        bench.outbox.put(Ended(i, "stop", None))
    choice.submit(ids("x" * (MAX_PENDING - 1)), ())
    choice.submit(ids("yy"), ())
    choice.submit(ids("z"), ())
    await settle()
    assert bench.taken == MAX_PENDING - 1 and len(bench.call.messages) == 1
    await bench.events()
    await settle()
    assert bench.taken == MAX_PENDING + 2 and len(bench.call.messages) == 2
    await bench.answer()
    assert len((await bench.events())[0].token_ids) == MAX_PENDING + 2


async def test_every_token_is_acknowledged_once(bench: Bench) -> None:
    choice = bench.choice(stop=["STOP"])
    choice.submit(ids("one STOP"), ())
    await settle()
    await bench.answer(2)
    assert not choice.needs_engine
    choice.submit(ids("late"), ())
    assert bench.taken == len("one STOPlate")


async def test_an_interval_longer_than_the_bound_does_not_stall(bench: Bench) -> None:
    choice = bench.choice(interval=10 * MAX_PENDING)
    choice.submit(ids("x"), ())
    await settle()
    await bench.answer(2)
    choice.submit(ids("y" * MAX_PENDING), ())
    await settle()
    assert bench.taken == MAX_PENDING + 1


async def test_a_failed_choice_is_reported_once(bench: Bench) -> None:
    choice = bench.choice()
    for _ in range(2):
        choice.fail(ServiceError(common_pb2.ERROR_REASON_INTERNAL, "x"))
    assert bench.changes == 1
