"""Configurations of the kernel per card and amount of work."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.cards import KIB, Card


@dataclass(frozen=True, slots=True)
class Config:
    """Heads and keys that a program takes at a time, and the splits of a token's keys.

    `registers`: most of a thread, None for what the compiler likes.
    """

    block_heads: int
    block_keys: int
    splits: int
    warps: int
    stages: int
    registers: int | None = None


# Few heads or tokens: a tensor core's tile of heads.
BLOCK_HEADS = 16
BLOCK_KEYS, WARPS = 32, 4
MAX_SPLITS = 32
# Most shared memory of a program by its stages, with what the card reserves for it; registers
# leave room for two programs on a multiprocessor.
PROGRAM_BYTES = {3: 94 * KIB, 2: 74 * KIB}
RESIDENT = 2
# Many tokens of many heads: a row that was read serves 64 of them. One program fills a
# multiprocessor's registers.
WIDE_HEADS, WIDE_WARPS, WIDE_TOKENS = 64, 8, 16
WIDE_BYTES = 144 * KIB  # with 32 keys and three stages


def select(card: Card, tokens: int, heads: int, *, coded: bool) -> Config:
    """As many splits as fill the card, a power of two; they follow from the shape alone."""
    if tokens >= WIDE_TOKENS and heads > WIDE_HEADS // 2:
        return _wide(card, tokens, heads, coded=coded)
    # Two stages where only they let two programs share a multiprocessor.
    fitting = [s for s, size in PROGRAM_BYTES.items() if RESIDENT * size <= card.shared_bytes]
    stages = fitting[0] if fitting else max(PROGRAM_BYTES)
    room = card.multiprocessors * (RESIDENT if fitting else 1)
    splits = _splits(room, tokens * -(-heads // BLOCK_HEADS))
    return Config(BLOCK_HEADS, BLOCK_KEYS, splits, WARPS, stages)


def _wide(card: Card, tokens: int, heads: int, *, coded: bool) -> Config:
    """Beside the queries of 64 heads 99 KB hold 16 keys: two blocks of plain ones, or a decoded one
    and one as it is stored.
    """
    splits = _splits(card.multiprocessors, tokens * -(-heads // WIDE_HEADS))
    if card.shared_bytes > WIDE_BYTES:
        return Config(WIDE_HEADS, BLOCK_KEYS, splits, WIDE_WARPS, stages=3)
    return Config(WIDE_HEADS, BLOCK_KEYS // 2, splits, WIDE_WARPS, stages=2 if coded else 3)


def _splits(room: int, programs: int) -> int:
    splits = min(max(room // max(programs, 1), 1), MAX_SPLITS)
    return 1 << (splits.bit_length() - 1)
