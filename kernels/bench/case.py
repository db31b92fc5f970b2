"""What an operation gives the benchmark: `cases()` of its `kernels/<op>/bench.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Call = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """A case on the card. `calls` are equal but for their inputs, which rotate so that no cache
    holds them; they neither allocate nor synchronise. `error` poisons the outputs of the first
    call, runs it, and gives its relative error against an fp64 product of the same inputs.
    `nbytes` move in the card's memory at least, `host_nbytes` over the bus to the host, and
    `flops` are done by its matrix units.
    """

    calls: Sequence[Call]
    error: Callable[[], float]
    bound: float
    nbytes: float
    flops: float
    host_nbytes: float = 0.0


@dataclass(frozen=True)
class Case:
    """One row: `make` puts our work on the card, each of `peers` the same inputs with another
    package, or None where that is not installed. `served_by` is the back end of a server that has
    all packages: one of `peers`, or ours where none has the name.
    """

    operation: str
    name: str
    make: Callable[[], Work]
    peers: Mapping[str, Callable[[], Work | None]] = field(default_factory=dict)
    served_by: str = ""
