"""Configurations of the attention kernel per card and amount of work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    """Rows and keys that a program takes at a time, and the splits of a sequence's keys.

    Rows are the query heads of one key head, token after token; `one` where it is one token.
    """

    rows: int
    one: bool
    keys: int
    splits: int
    warps: int
    stages: int


MIN_ROWS = 16  # of a tile: a tensor core's
MANY_ROWS = 64  # a warp has 16 of them to itself
# Of a part of a head dim: a warp loads four rows of it at once, and a thread has few addresses.
PART_COLUMNS = 64
# What shared memory and the registers of 8 or 4 warps hold at D = 256.
MAX_ROWS = {80: 128, 86: 64, 89: 64, 90: 128}
FEW_TOKENS = 8  # of a sequence in a step: decode and verification
KEYS, WARPS = 32, 4
# Keys and warps over pool rows. One warp reads the queries once and exchanges nothing, but its sums
# fill the registers of sm80 and sm90, and on the others some would be spilled.
ROWS_KEYS_WARPS = {80: (16, 1), 86: (32, 2), 89: (32, 2), 90: (16, 1)}
# Programs that splits aim at: some for each multiprocessor of any card, but a selection is short.
PROGRAMS, SELECTED_PROGRAMS = 512, 256
MAX_SPLITS = 64


def tile_tokens(target: int, tokens: int, sequences: int, group: int, *, selected: bool) -> int:
    """Tokens of a tile: one of a selection, else those of a sequence in a step, or what fits."""
    if selected:
        return 1
    return max(1, min(-(-tokens // max(sequences, 1)), MAX_ROWS[target] // group))


def dealt_runs(tokens: int, sequences: int, per_tile: int) -> int:
    """Programs that share the sequences of a tile. One where steps are short: tiles then seldom
    have two.
    """
    few = tokens <= FEW_TOKENS * sequences
    return 1 if few else max(1, min(per_tile, sequences))


def parts(width: int, rows: int) -> int:
    """Parts of a head dim that are loaded and multiplied apart; one for tiles of many rows."""
    return 1 if rows >= MANY_ROWS else max(1, width // PART_COLUMNS)


def splits_for(programs: int, *, selected: bool) -> int:
    """Splits where there are so many programs without."""
    splits, aim = 1, SELECTED_PROGRAMS if selected else PROGRAMS
    while splits < MAX_SPLITS and 2 * splits * programs <= aim:
        splits *= 2
    return splits


def tile(rows: int, splits: int, *, one: bool) -> Config:
    """Two blocks of keys are on their way while a third is multiplied, as far as 99 KB of shared
    memory (sm86 and sm89) hold them beside the queries; 128 rows take 137 KB.
    """
    rows = _padded(rows)
    if rows < MANY_ROWS:
        return Config(rows, one, KEYS, splits, WARPS, stages=3)
    return Config(rows, one, KEYS, splits, 2 * WARPS, stages=3 if rows == 128 else 2)


def rows_tile(target: int, rows: int) -> Config:
    """Of one token over pool rows. Many programs hide each other's waits, one block ahead."""
    keys, warps = ROWS_KEYS_WARPS[target]
    return Config(_padded(rows), True, keys, 1, warps, stages=2)


def _padded(rows: int) -> int:
    return max(MIN_ROWS, 1 << (rows - 1).bit_length())
