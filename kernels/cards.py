"""What configurations must know of a card."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

KIB = 1024


@dataclass(frozen=True, slots=True)
class Card:
    """Multiprocessors, and bytes of shared memory of each."""

    multiprocessors: int
    shared_bytes: int


# By target: A100, A6000, 4090, H200. Source: CUDA programming guide, technical specifications.
CARDS = {
    80: Card(108, 164 * KIB),
    86: Card(84, 100 * KIB),
    89: Card(128, 100 * KIB),
    90: Card(132, 228 * KIB),
}
INTERPRETED_TARGET = 80  # where a card cannot be asked


@cache
def _asked(device_index: int) -> Card:
    found = torch.cuda.get_device_properties(device_index)
    return Card(found.multi_processor_count, found.shared_memory_per_multiprocessor)


def card_of(device: torch.device) -> Card:
    """The card itself, whatever instructions it is made to run; an A100 for the interpreter."""
    return _asked(device.index or 0) if device.type == "cuda" else CARDS[INTERPRETED_TARGET]
