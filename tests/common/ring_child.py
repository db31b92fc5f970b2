"""The other end of a ring, in a process of its own.

    digest  IN OUT SEED   answer every message with its length and digest, reading in random ways
    sink    IN            read nothing; wait to be killed
    source  OUT COUNT     send COUNT numbered messages; wait to be killed
    read    IN            print the lengths of all messages until the ring closes

IN and OUT are the three descriptors of a ring, comma separated.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time

from services.common.ring import Ring, RingClosed


def fds(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def receive_somehow(ring: Ring, chance: random.Random) -> bytes:
    """Sleep, spin or poll for the next message, as chance wants."""
    while True:
        way = chance.randrange(4)
        if way == 0:
            time.sleep(chance.random() * 0.002)
        timeout = (0.0, 0.005, None, 0.0)[way]
        message = ring.receive(timeout, spin_seconds=0.0005 if way == 1 else 0.0)
        if message is not None:
            return message


def digest(source: str, target: str, seed: str) -> None:
    chance = random.Random(int(seed))
    with (
        Ring.attach(fds(source), role="consumer", poison=True) as incoming,
        Ring.attach(fds(target), role="producer") as outgoing,
    ):
        try:
            while True:
                message = receive_somehow(incoming, chance)
                outgoing.send(len(message).to_bytes(8, "little") + hashlib.sha256(message).digest())
        except RingClosed:
            return


def sink(source: str) -> None:
    with Ring.attach(fds(source), role="consumer"):
        print("ready", flush=True)
        time.sleep(60)


def source(target: str, count: str) -> None:
    with Ring.attach(fds(target), role="producer") as ring:
        for number in range(int(count)):
            ring.send(b"message %d" % number)
        print("ready", flush=True)
        time.sleep(60)


def read(source: str) -> None:
    with Ring.attach(fds(source), role="consumer") as ring:
        print("ready", flush=True)
        try:
            while True:
                message = ring.receive()
                assert message is not None
                print(len(message), flush=True)
        except RingClosed:
            print("closed", flush=True)


if __name__ == "__main__":
    {"digest": digest, "sink": sink, "source": source, "read": read}[sys.argv[1]](*sys.argv[2:])
