"""The ring between two real processes: random sizes and timing, and death on either side."""

from __future__ import annotations

import hashlib
import random
import time

import pytest

from services.common.ring import Ring, RingClosed, RingFull
from tests.common.children import Spawn, line_from

GEOMETRIES = [
    pytest.param(2, 64, 1, id="two-small-cells"),
    pytest.param(7, 64, 2, id="odd-count"),
    pytest.param(16, 4096, 3, id="pages"),
    pytest.param(1024, 4096, 4, id="default"),
]
MESSAGES = 400


def text(ring: Ring) -> str:
    return ",".join(map(str, ring.fds()))


def random_size(chance: random.Random, capacity: int) -> int:
    """Mostly small, often near a border, sometimes larger than the ring."""
    kind = chance.randrange(10)
    if kind < 5:
        return chance.randrange(200)
    if kind < 8:
        return chance.randrange(min(capacity, 100_000))
    if kind == 8:
        return max(0, capacity + chance.randrange(-65, 66))
    return capacity + chance.randrange(2 * capacity) if capacity < 100_000 else capacity + 1


def send_somehow(ring: Ring, message: bytes, chance: random.Random) -> None:
    """Blocking, patient or impatient, as chance wants; retries what was not delivered."""
    while True:
        way = chance.randrange(3)
        if way == 0:
            time.sleep(chance.random() * 0.002)
        try:
            if way == 2 and len(message) <= ring.capacity:
                if ring.try_send(message):
                    return
            else:
                ring.send(message, 30 if way == 0 else chance.random() * 0.2)
                return
        except RingFull:
            continue


@pytest.mark.parametrize(("cells", "cell_bytes", "seed"), GEOMETRIES)
def test_random_messages_arrive_in_order_and_unchanged(
    spawn: Spawn, cells: int, cell_bytes: int, seed: int
) -> None:
    chance = random.Random(seed)
    with (
        Ring.create(cells, cell_bytes, poison=True) as outgoing,
        Ring.create() as incoming,
    ):
        fds = outgoing.fds() + incoming.fds()
        child = spawn(
            "tests.common.ring_child", "digest", text(outgoing), text(incoming), seed, fds=fds
        )
        expected = []
        for _ in range(MESSAGES):
            message = chance.randbytes(random_size(chance, outgoing.capacity))
            expected.append(len(message).to_bytes(8, "little") + hashlib.sha256(message).digest())
            send_somehow(outgoing, message, chance)
        assert [incoming.receive(20) for _ in expected] == expected
        stats = outgoing.stats()
        assert (stats.sent, stats.received) == (MESSAGES, MESSAGES)
        assert stats.sent_bytes == stats.received_bytes
        assert 0 < stats.hop_seconds_max <= stats.hop_seconds_total
    assert child.wait(10) == 0


def test_a_killed_producer_is_noticed_after_its_messages_were_read(spawn: Spawn) -> None:
    with Ring.create(8, 64) as ring:
        child = spawn("tests.common.ring_child", "source", text(ring), 3, fds=ring.fds())
        assert line_from(child) == "ready"
        child.kill()
        child.wait(10)
        received = [ring.receive(5) for _ in range(3)]
        assert received == [b"message 0", b"message 1", b"message 2"]
        started = time.monotonic()
        with pytest.raises(RingClosed):
            ring.receive(10)
        assert time.monotonic() - started < 10


def test_a_producer_that_dies_while_the_receiver_sleeps_is_noticed(spawn: Spawn) -> None:
    with Ring.create(8, 64) as ring:
        child = spawn("tests.common.ring_child", "source", text(ring), 1, fds=ring.fds())
        assert line_from(child) == "ready"
        assert ring.receive(5) == b"message 0"
        assert ring.receive(0.05) is None
        child.kill()
        started = time.monotonic()
        with pytest.raises(RingClosed):
            ring.receive(10)
        assert time.monotonic() - started < 10


def test_a_polling_receiver_notices_the_death_too(spawn: Spawn) -> None:
    with Ring.create(8, 64) as ring:
        child = spawn("tests.common.ring_child", "source", text(ring), 0, fds=ring.fds())
        assert line_from(child) == "ready"
        assert ring.receive(0) is None
        child.kill()
        child.wait(10)
        deadline = time.monotonic() + 2
        with pytest.raises(RingClosed):
            while time.monotonic() < deadline:
                ring.receive(0)


def test_a_killed_consumer_is_noticed_by_a_waiting_sender(spawn: Spawn) -> None:
    with Ring.create(8, 64) as ring:
        child = spawn("tests.common.ring_child", "sink", text(ring), fds=ring.fds())
        assert line_from(child) == "ready"
        ring.send(bytes(512), 5)
        assert not ring.try_send(b"x")
        child.kill()
        child.wait(10)
        started = time.monotonic()
        with pytest.raises(RingClosed):
            ring.send(b"x", 10)
        assert time.monotonic() - started < 10
        with pytest.raises(RingClosed):
            ring.try_send(b"x")


def test_a_sender_may_start_before_its_receiver_exists(spawn: Spawn) -> None:
    ring = Ring.create(8, 64)
    ring.send(bytes(100))
    child = spawn("tests.common.ring_child", "read", text(ring), fds=ring.fds())
    assert line_from(child) == "ready"
    assert line_from(child) == "100"
    ring.close()
    assert line_from(child) == "closed"
