"""What is compiled: a kernel with types and constants, as a launch would have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One compilation. `arguments` gives a Triton type for each run-time argument in order;
    those in `aligned` are multiples of 16 (addresses or values), as launches on real tensors are.
    `registers`: most of a thread, None for what the compiler likes.
    """

    label: str
    kernel: Any
    arguments: dict[str, str]
    constants: dict[str, int | bool]
    aligned: frozenset[str]
    warps: int
    stages: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Of the launch."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages} | limit

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for variants that compile to the same code."""
        function = self.kernel.fn
        return (
            function.__module__, function.__name__, tuple(self.arguments.items()),
            tuple(sorted(self.constants.items())), self.aligned, self.warps, self.stages,
            self.registers,
        )  # fmt: skip
