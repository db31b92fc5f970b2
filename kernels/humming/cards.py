"""What the choice of tiles must know of a card, beside kernels/cards.py."""

from __future__ import annotations

from dataclasses import dataclass

from kernels import cards

MIB = 1 << 20
# Multiprocessors of the usual card of a target.
USUAL_COUNT = {target: card.multiprocessors for target, card in cards.CARDS.items()}


@dataclass(frozen=True, slots=True)
class Card:
    """`target` 80, 86 or 89 chooses the code, `assembler` is the card's own architecture.

    bandwidth in GB/s; rate of dense bf16 products with fp32 sums, in TFLOP/s; l2 in MiB.
    """

    name: str
    target: int
    assembler: str
    multiprocessors: int
    bandwidth: float
    rate: float
    l2: int


# NVIDIA's data sheets; the last is measured: an H200 with Ampere's instructions (docs/kernels.md).
CARDS = {
    card.name: card
    for card in (
        Card("a100", 80, "80", USUAL_COUNT[80], 1935, 312, 40),
        Card("a6000", 86, "86", USUAL_COUNT[86], 768, 155, 6),
        Card("rtx3090", 86, "86", 82, 936, 71, 6),
        Card("rtx4090", 89, "89", USUAL_COUNT[89], 1008, 165, 72),
        Card("h200", 80, "90a", USUAL_COUNT[90], 4210, 402, 60),
    )
}
# Where only the target is given.
USUAL = {80: "a100", 86: "a6000", 89: "rtx4090"}


def card_for(target: int, name: str | None) -> Card:
    """The card of a name, or the usual one. ValueError where it does not run the target's code."""
    card = CARDS[name or USUAL[target]]
    if card.target != target:
        raise ValueError(f"{card.name} is of target {card.target}, not {target}")
    return card
