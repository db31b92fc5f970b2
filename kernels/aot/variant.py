"""What is compiled: a kernel with types and constants, as a launch would have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One compilation. `arguments` gives a Triton type for each run-time argument in order;
    those in `aligned` are multiples of 16 (addresses or values), as launches on real tensors are.
    """

    label: str
    kernel: Any
    arguments: dict[str, str]
    constants: dict[str, int | bool]
    aligned: frozenset[str]
    warps: int
    stages: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for variants that compile to the same code."""
        constants = tuple(sorted(self.constants.items()))
        return (
            self.kernel.fn.__name__, tuple(self.arguments.items()), constants, self.warps,
            self.stages,
        )  # fmt: skip
