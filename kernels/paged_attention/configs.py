"""Configurations of the attention kernel per card and amount of work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    """Rows and keys that a program takes at a time, and the splits of a sequence's keys.

    Rows are the query heads of one key head, token after token; `one` where it is one token.
    `registers`: most of a thread, None for what the compiler likes.
    """

    rows: int
    one: bool
    keys: int
    splits: int
    warps: int
    stages: int
    registers: int | None = None


MIN_ROWS = 16  # of a tile: a tensor core's
# What shared memory and the registers of 8 or 4 warps hold at D = 256.
MAX_ROWS = {80: 128, 86: 64, 89: 64, 90: 128}
FEW_TOKENS = 8  # of a sequence in a step: decode and verification
KEYS, WARPS = 32, 4
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


def splits_for(programs: int, *, selected: bool) -> int:
    """Splits where there are so many programs without."""
    splits, aim = 1, SELECTED_PROGRAMS if selected else PROGRAMS
    while splits < MAX_SPLITS and 2 * splits * programs <= aim:
        splits *= 2
    return splits


def tile(rows: int, splits: int, *, one: bool, selected: bool) -> Config:
    """Two blocks of keys are on their way while a third is multiplied, as far as 99 KB of shared
    memory (sm86 and sm89) hold them beside the queries; 128 rows take 137 KB.
    """
    rows = max(MIN_ROWS, 1 << (rows - 1).bit_length())
    if selected and splits == 1:
        # Many programs hide each other's waits: one block ahead, registers for four at a time.
        return Config(rows, one, KEYS, splits, WARPS, stages=2, registers=128)
    if rows < 64:
        return Config(rows, one, KEYS, splits, WARPS, stages=3)
    return Config(rows, one, KEYS, splits, 2 * WARPS, stages=3 if rows == 128 else 2)
