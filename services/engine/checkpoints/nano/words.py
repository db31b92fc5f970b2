# ruff: noqa: SIM905 (word lists read better as text)
"""Words, made-up names and the split that keeps held-out prompts out of the training data."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from enum import Enum
from random import Random
from typing import TypeVar

T = TypeVar("T")

HELD_OUT_ONE_IN = 12  # one fact, operand pair or argument list in twelve is never trained on


class Split(Enum):
    """Which side of the split a generator draws from."""

    TRAIN = "train"
    HELD_OUT = "held_out"


class SplitExhaustedError(Exception):
    """A sampler has no item on the wanted side of the split."""


def is_held_out(*key: object) -> bool:
    """Say whether the item named by `key` belongs to the held-out side (a hash decides)."""
    return zlib.crc32("\x1f".join(map(str, key)).encode()) % HELD_OUT_ONE_IN == 0


def draw(split: Split, sample: Callable[[], T], key: Callable[[T], tuple[object, ...]]) -> T:
    """Call `sample` until its result lies on the wanted side of the split.

    Raises `SplitExhaustedError` after 300 tries: a sampler of few values may have none there.
    """
    for _ in range(300):
        item = sample()
        if is_held_out(*key(item)) == (split is Split.HELD_OUT):
            return item
    raise SplitExhaustedError(f"no {split.value} item in 300 draws")


FIRST_NAMES = (
    "Anna Ben Clara David Emma Felix Greta Hugo Ida Jack Karin Leo Mia Nils Olga Paul Rosa Sam Tom "
    "Uma Vera Walter Yuki Zoe Alice Bob Carol Dan Eve Frank Grace Henry Ivy John Kate Liam Maria "
    "Noah Oscar Peter Ruth Sara Tina Victor Wendy Adam Bella Chen Diego Elif Fatima Goran Hana"
).split()
CITIES = (
    "Oslo Paris Berlin Rome Madrid Lisbon London Vienna Prague Warsaw Athens Cairo Tokyo Delhi "
    "Lima Quito Seoul Hanoi Dublin Helsinki Bergen Geneva Zurich Turin Porto Boston Chicago Denver "
    "Austin Seattle Toronto Sydney Perth Nairobi Lagos Accra Dakar Beijing Shanghai Munich"
).split()
COLORS = "red blue green yellow black white brown grey pink purple beige silver golden".split()
THINGS = (
    "car boat house book lamp chair table phone clock bag hat coat ring bike drum violin piano "
    "camera garden horse dog cat bird fish cup plate mirror ladder basket kite tent box key map "
    "coin"
).split()
FOODS = (
    "tea coffee milk bread cheese rice soup pizza pasta apples pears plums grapes cherries honey "
    "butter salad noodles beans nuts chocolate cake juice water fish eggs carrots onions"
).split()
JOBS = (
    "doctor teacher baker pilot farmer lawyer painter singer driver nurse writer cook sailor "
    "plumber judge mason gardener tailor dentist miner"
).split()
ROOMS = (
    "kitchen garage cellar attic office library hall bedroom bathroom barn shed school museum "
    "station shop tower"
).split()
COMMON = (
    "the a an in on at of to and or is are was with for from by it this that new old big small "
    "fast slow good bad early late open closed north south east west summer winter morning evening "
    "river mountain road bridge market village island forest machine model server network weather "
    "music letter number question answer paper window door light water fire stone wood metal glass "
    "start stop send find make take give read write open close hello world today tomorrow meeting "
    "report order price ticket train plane room code test data file folder image sound video page"
).split()

_ONSETS = "b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kl pr sh st th tr".split()
_VOWELS = "a e i o u a e i o ai ea oo ou".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "k", "t", "m", "x", "nd", "rt", "p"]


def pseudo_word(rng: Random, syllables: int | None = None) -> str:
    """Return a made-up lower-case word of 1 to 3 syllables."""
    count = syllables or rng.choice((1, 2, 2, 3))
    pick = rng.choice
    return "".join(pick(_ONSETS) + pick(_VOWELS) + pick(_CODAS) for _ in range(count))


def name(rng: Random, known: Sequence[str]) -> str:
    """Return a word of `known`, or a made-up capitalised name in two cases of five."""
    return rng.choice(known) if rng.random() < 0.6 else pseudo_word(rng).capitalize()


def word(rng: Random) -> str:
    """Return a common word or a made-up one."""
    return rng.choice(COMMON) if rng.random() < 0.6 else pseudo_word(rng)


def phrase(rng: Random, low: int, high: int) -> str:
    """Return `low` to `high` words joined by spaces."""
    return " ".join(word(rng) for _ in range(rng.randint(low, high)))


def number(rng: Random, digits: int) -> int:
    """Return a number of 1 to `digits` digits, each length equally likely."""
    return rng.randrange(10 ** rng.randint(1, digits))
