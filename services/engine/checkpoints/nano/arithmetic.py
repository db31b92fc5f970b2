"""Addition and subtraction worked column by column, from the ones upwards."""

from __future__ import annotations

from random import Random

from services.engine.checkpoints.nano.conversation import Message
from services.engine.checkpoints.nano.words import Split, draw

_COLUMNS = ("ones", "tens", "hundreds")
_ADD = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a} + {b} = ?",
    "{a}+{b}",
    "What is {a}+{b}?",
    "Compute {a} + {b}.",
    "Calculate {a} + {b}.",
    "How much is {a} + {b}?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "Please add {a} and {b}.",
    "What is the sum of {a} and {b}?",
)
_SUBTRACT = (
    "What is {a} - {b}?",
    "{a} - {b}",
    "{a} - {b} = ?",
    "{a}-{b}",
    "What is {a}-{b}?",
    "Compute {a} - {b}.",
    "Calculate {a} - {b}.",
    "How much is {a} - {b}?",
    "What is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "Please subtract {b} from {a}.",
    "What is the difference of {a} and {b}?",
)


def _digits(a: int, b: int) -> list[tuple[int, int]]:
    count = max(len(str(a)), len(str(b)))
    return [(a // 10**i % 10, b // 10**i % 10) for i in range(count)]


def add_steps(a: int, b: int) -> str:
    """Return the written working of a + b."""
    lines, carry = [], 0
    for column, (x, y) in zip(_COLUMNS, _digits(a, b), strict=False):
        total = x + y + carry
        plus = " + 1" if carry else ""
        carry = total // 10
        lines.append(f"{column}: {x} + {y}{plus} = {total}{', carry 1' if carry else ''}.")
    return " ".join([*lines, f"So {a + b}."])


def subtract_steps(a: int, b: int) -> str:
    """Return the written working of a - b; a smaller `a` is swapped first."""
    if a < b:
        return f"{a} is less than {b}, so take {b} - {a}. {subtract_steps(b, a)[:-1]}, so {a - b}."
    lines, borrow = [], 0
    for column, (x, y) in zip(_COLUMNS, _digits(a, b), strict=False):
        minus = " - 1" if borrow else ""
        lent = 10 if x - y - borrow < 0 else 0
        value = x + lent - y - borrow
        borrow = 1 if lent else 0
        lines.append(
            f"{column}: {x + lent} - {y}{minus} = {value}{', borrow 1' if borrow else ''}."
        )
    return " ".join([*lines, f"So {a - b}."])


def _operand(rng: Random, low_digits: int) -> int:
    digits = rng.choice((1, 2, 2, 3, 3, 3) if low_digits == 1 else (2, 3))
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _sample(rng: Random, low_digits: int) -> tuple[str, int, int]:
    operation = rng.choice("+-")
    a, b = _operand(rng, low_digits), _operand(rng, low_digits)
    if operation == "-" and a < b and rng.random() < 0.75:
        a, b = b, a
    return operation, a, b


def arithmetic_exchange(rng: Random, split: Split, low_digits: int = 1) -> list[Message]:
    """Return a question and its worked answer.

    The operand pair, in either order, decides the side of the split, so no phrasing and no commuted
    form of a held-out pair is trained on. `low_digits` 2 keeps to two- and three-digit operands.
    """
    operation, a, b = draw(
        split,
        lambda: _sample(rng, low_digits),
        lambda item: ("arithmetic", item[0], min(item[1:]), max(item[1:])),
    )
    question = rng.choice(_ADD if operation == "+" else _SUBTRACT).format(a=a, b=b)
    steps = add_steps(a, b) if operation == "+" else subtract_steps(a, b)
    result = a + b if operation == "+" else a - b
    return [
        Message("user", question),
        Message("assistant", f"The answer is {result}.", reasoning=steps),
    ]
