"""A client process that is made to be killed: `python -m tests.kvcache.victim write|read ...`.

write: stores chains `<salt>-0`, `<salt>-1`, ... with their right content, in small slow pieces,
and says "begun" after its first reservation. read: takes COUNT read leases on the chain of SALT
and says "held".
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import xxhash

from tests.kvcache.client import Client, keys_of, object_content, session, unit_chain

CHAIN = 6
_PIECE = 512


async def write(client: Client, salt: str) -> None:
    """Until somebody kills us."""
    chance = random.Random(salt)
    for number in range(1000):
        begun = await client.begin_store(keys_of(unit_chain(CHAIN, f"{salt}-{number}".encode())))
        if number == 0:
            say("begun")
        digests = []
        for slot in begun.slots:
            content = object_content(slot.key.group_id, slot.key.unit_hash)
            for at in range(0, len(content), _PIECE):
                client.slot(slot)[at : at + _PIECE] = content[at : at + _PIECE]
            digests.append(xxhash.xxh3_64_intdigest(content))
            if chance.random() < 0.3:
                await asyncio.sleep(0.001)
        if begun.lease_id:
            await client.commit(begun.lease_id, digests)


async def read(client: Client, salt: str, count: int) -> None:
    """Hold `count` leases for ever."""
    for _ in range(count):
        assert (await client.begin_load(unit_chain(CHAIN, salt.encode()))).lease_id
    say("held")
    await asyncio.sleep(3600)


def say(word: str) -> None:
    """One line to the parent."""
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


async def main(arguments: list[str]) -> None:
    """Arguments: role, address, run directory, salt, count."""
    role, address, run_dir, salt, count = arguments
    async with session(address, Path(run_dir)) as client:
        if role == "write":
            await write(client, salt)
        else:
            await read(client, salt, int(count))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
