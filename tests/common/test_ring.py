"""The ring with both ends in this process: order, sizes, wrap-around, doorbells, closing."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.ring import Ring, RingClosed, RingError, RingFull
from services.common.ring_memory import POISON, RingMemory

Pair = tuple[Ring, Ring]


def make_pair(cells: int, cell_bytes: int) -> Pair:
    """Producer and consumer of a poisoned ring."""
    producer = Ring.create(cells, cell_bytes, poison=True)
    return producer, Ring.attach(producer.fds(), role="consumer", poison=True)


@pytest.fixture
def pair() -> Iterator[Pair]:
    producer, consumer = make_pair(8, 64)
    yield producer, consumer
    producer.close()
    consumer.close()


def pattern(size: int, seed: int) -> bytes:
    """Bytes that repeat nowhere near a cell's size and never look like poison."""
    return bytes((seed * 31 + index * 7 + index // 251) % 163 for index in range(size))


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 128, 511, 512])
def test_a_message_of_any_size_up_to_the_capacity_arrives_whole(pair: Pair, size: int) -> None:
    producer, consumer = pair
    for lap in range(20):
        message = pattern(size, lap)
        assert producer.try_send(message)
        assert consumer.receive(0) == message
        assert consumer.receive(0) is None


def test_any_buffer_can_be_sent(pair: Pair) -> None:
    producer, consumer = pair
    for data in (b"abcd", bytearray(b"abcd"), memoryview(b"xabcdx")[1:5]):
        producer.send(data)
        assert consumer.receive(0) == b"abcd"


def test_messages_wait_in_order_until_the_ring_is_full(pair: Pair) -> None:
    producer, consumer = pair
    for number in range(8):
        assert producer.try_send(bytes([number]))
    assert not producer.try_send(b"ninth")
    assert [consumer.receive(0) for _ in range(8)] == [bytes([number]) for number in range(8)]
    assert producer.try_send(b"ninth")


def test_a_full_ring_raises_after_the_timeout_and_delivers_nothing_of_the_message(
    pair: Pair,
) -> None:
    producer, consumer = pair
    producer.send(bytes(512))
    started = time.monotonic()
    with pytest.raises(RingFull):
        producer.send(b"late", timeout=0.05)
    assert 0.05 <= time.monotonic() - started < 10
    assert consumer.receive(0) == bytes(512)
    assert consumer.receive(0) is None


def test_a_message_larger_than_the_ring_travels_while_it_is_read(pair: Pair) -> None:
    producer, consumer = pair
    message = pattern(10_000, 3)
    sender = threading.Thread(target=producer.send, args=(message, 10))
    sender.start()
    assert consumer.receive(10) == message
    sender.join()
    with pytest.raises(ValueError, match="capacity 512"):
        producer.try_send(message)


def test_pieces_of_a_message_that_was_given_up_are_dropped(pair: Pair) -> None:
    producer, consumer = pair
    with pytest.raises(RingFull):
        producer.send(pattern(10_000, 1), timeout=0.02)
    assert consumer.receive(0) is None
    producer.send(b"next", timeout=1)
    assert consumer.receive(0) == b"next"
    assert producer.stats().sent == 1


def test_consumed_cells_are_poisoned(pair: Pair) -> None:
    producer, consumer = pair
    producer.send(pattern(300, 1))
    assert consumer.receive(0) is not None
    memory = RingMemory([os.dup(fd) for fd in producer.fds()], poison=False)
    assert bytes(memory.payload) == bytes([POISON]) * 512
    memory.close()


def test_receive_gives_up_after_its_timeout(pair: Pair) -> None:
    _, consumer = pair
    started = time.monotonic()
    assert consumer.receive(0.05, spin_seconds=0.01) is None
    assert 0.05 <= time.monotonic() - started < 10


def test_what_was_sent_before_closing_is_still_delivered(pair: Pair) -> None:
    producer, consumer = pair
    producer.send(b"last")
    producer.close()
    assert consumer.receive(1) == b"last"
    with pytest.raises(RingClosed):
        consumer.receive(10)
    with pytest.raises(RingClosed):
        producer.send(b"after close")


def test_sending_to_a_closed_consumer_fails_at_once(pair: Pair) -> None:
    producer, consumer = pair
    producer.send(b"x")
    consumer.close()
    with pytest.raises(RingClosed):
        producer.send(b"y", timeout=10)
    with pytest.raises(RingClosed):
        producer.try_send(b"y")


def test_closing_wakes_a_sleeping_receiver(pair: Pair) -> None:
    producer, consumer = pair
    timer = threading.Timer(0.05, producer.close)
    timer.start()
    producer.send(b"x")
    assert consumer.receive(5) == b"x"
    started = time.monotonic()
    with pytest.raises(RingClosed):
        consumer.receive(5)
    assert time.monotonic() - started < 10
    timer.join()


def test_each_end_exists_once(pair: Pair) -> None:
    producer, consumer = pair
    producer.send(b"x")
    with pytest.raises(RingError, match="already has or had a consumer"):
        Ring.attach(producer.fds(), role="consumer")
    with pytest.raises(RingError, match="this end of the ring is the producer"):
        producer.receive(0)
    consumer.close()
    with pytest.raises(RingError, match="already has or had a consumer"):
        Ring.attach(producer.fds(), role="consumer")


def test_what_is_not_a_ring_is_refused() -> None:
    plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(plain, 8192)
    with pytest.raises(ValueError, match="not a sealed ring"):
        Ring.attach([plain, plain, plain], role="consumer")
    os.close(plain)
    with pytest.raises(ValueError, match="at least 2 cells"):
        Ring.create(1, 64)


def test_closing_gives_back_all_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    producer, consumer = make_pair(8, 64)
    producer.send(b"x")
    producer.close()
    consumer.close()
    consumer.close()
    assert len(os.listdir("/proc/self/fd")) == before


def is_readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_the_doorbell_stays_readable_while_messages_wait(pair: Pair) -> None:
    producer, consumer = pair
    assert not is_readable(consumer.fileno())
    for number in range(3):
        producer.send(bytes([number]))
    for number in range(3):
        assert is_readable(consumer.fileno())
        assert consumer.receive(0) == bytes([number])
    assert consumer.receive(0) is None
    assert not is_readable(consumer.fileno())
    producer.send(b"again")
    assert is_readable(consumer.fileno())


def test_the_space_doorbell_rings_after_a_refused_send(pair: Pair) -> None:
    producer, consumer = pair
    producer.send(bytes(512))
    assert not producer.try_send(b"x")
    assert not is_readable(producer.space_fileno())
    consumer.receive(0)
    assert is_readable(producer.space_fileno())


async def test_an_event_loop_gets_every_message(pair: Pair) -> None:
    producer, consumer = pair
    received: list[bytes] = []
    done = asyncio.Event()

    def on_readable() -> None:
        while (message := consumer.receive(0)) is not None:
            received.append(message)
        if len(received) == 2000:
            done.set()

    loop = asyncio.get_running_loop()
    loop.add_reader(consumer.fileno(), on_readable)
    sent = [pattern(number % 200, number) for number in range(2000)]
    sender = asyncio.to_thread(lambda: [producer.send(message, 10) for message in sent])
    await asyncio.wait_for(asyncio.gather(sender, done.wait()), 20)
    loop.remove_reader(consumer.fileno())
    assert received == sent


def test_no_wake_up_is_lost_between_two_sleeping_threads() -> None:
    """Ping-pong with short messages: a lost doorbell would cost a slice of 0.1 s each time."""
    there, there_end = make_pair(2, 64)
    back, back_end = make_pair(2, 64)

    def echo() -> None:
        for _ in range(3000):
            message = there_end.receive(10)
            assert message is not None
            back.send(message, 10)

    thread = threading.Thread(target=echo)
    thread.start()
    slow = 0
    for number in range(3000):
        started = time.monotonic()
        there.send(number.to_bytes(4, "little"), 10)
        assert back_end.receive(10) == number.to_bytes(4, "little")
        slow += time.monotonic() - started > 0.09
    thread.join()
    for ring in (there, there_end, back, back_end):
        ring.close()
    assert slow < 30


@settings(max_examples=60, deadline=None)
@given(
    cells=st.integers(2, 9),
    steps=st.lists(st.one_of(st.none(), st.integers(0, 600)), max_size=80),
)
def test_any_interleaving_of_sends_and_receives_is_a_queue(
    cells: int, steps: list[int | None]
) -> None:
    """None receives, a number sends a message of that many bytes; a deque says what must happen."""
    producer, consumer = make_pair(cells, 64)
    model: deque[bytes] = deque()
    sizes = 0
    for index, step in enumerate(steps):
        if step is None:
            assert consumer.receive(0) == (model.popleft() if model else None)
            continue
        message = pattern(step, index)
        used = sum(cells_needed(len(waiting), 64) for waiting in model)
        if cells_needed(step, 64) > cells:
            with pytest.raises(ValueError, match="capacity"):
                producer.try_send(message)
        elif producer.try_send(message):
            model.append(message)
            sizes += step
        else:
            assert used + cells_needed(step, 64) > cells
    while model:
        assert consumer.receive(0) == model.popleft()
    stats = consumer.stats()
    assert (stats.sent, stats.sent_bytes) == (stats.received, stats.received_bytes)
    assert stats.sent_bytes == sizes
    producer.close()
    consumer.close()


def cells_needed(nbytes: int, cell_bytes: int) -> int:
    return max(1, -(-nbytes // cell_bytes))
