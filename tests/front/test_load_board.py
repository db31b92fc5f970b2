"""What watchers of the load hear, whatever happens between their records."""

from __future__ import annotations

import random

from warhorse.v1.engine_pb2 import LoadResponse

from services.common.prefix_chain import SHORT_BYTES, short_hashes
from services.engine.load_board import LoadBoard, LoadWatcher


def name(number: int) -> bytes:
    return number.to_bytes(SHORT_BYTES, "little")


def record(gone: set[int] = frozenset(), added: set[int] = frozenset()) -> LoadResponse:  # type: ignore[assignment]
    return LoadResponse(
        prefixes_gone=b"".join(map(name, gone)), prefixes_added=b"".join(map(name, added))
    )


async def follow(watcher: LoadWatcher, known: set[bytes]) -> LoadResponse:
    """Apply the next record as a client does."""
    news = await watcher.next()
    if news.prefixes_reset:
        known.clear()
    known.difference_update(short_hashes(news.prefixes_gone))
    known.update(short_hashes(news.prefixes_added))
    return news


async def test_first_record_has_every_prefix_and_later_ones_what_changed() -> None:
    board = LoadBoard()
    board.publish(record(added={1, 2}), draining=False)
    with board.watch() as watcher:
        known: set[bytes] = set()
        assert (await follow(watcher, known)).prefixes_reset
        assert known == {name(1), name(2)}
        board.publish(record(gone={1}, added={3}), draining=False)
        news = await follow(watcher, known)
        assert not news.prefixes_reset and known == {name(2), name(3)}


async def test_watchers_agree_with_the_board_after_any_history() -> None:
    rng = random.Random(7)
    board = LoadBoard()
    with board.watch() as early, board.watch() as late:
        seen_early: set[bytes] = set()
        seen_late: set[bytes] = set()
        await follow(early, seen_early)
        for _ in range(5):
            for _ in range(20):
                gone = set(rng.sample(range(30), 3))
                added = set(rng.sample(range(30), 4)) - gone
                board.publish(record(gone, added), draining=False)
            if rng.random() < 0.3:
                board.forget_prefixes()
            await follow(early, seen_early)
            assert seen_early == board.prefixes
        await follow(late, seen_late)
        assert seen_late == board.prefixes


async def test_a_lost_cache_is_forgotten_by_every_watcher() -> None:
    board = LoadBoard()
    board.publish(record(added={1}), draining=False)
    with board.watch() as watcher:
        known: set[bytes] = set()
        await follow(watcher, known)
        board.forget_prefixes()
        board.publish(LoadResponse(), draining=False)
        assert (await follow(watcher, known)).prefixes_reset and known == set()
