"""Which of a row's times a server has: that of the back end that it takes for the shape."""

from __future__ import annotations

from functools import cache
from typing import Any

TRITON = "Triton"


@cache
def _back_ends() -> dict[tuple[str, str], str]:
    """Case.served_by of every case of the benchmark."""
    from kernels.bench.measure import all_cases

    return {(case.operation, case.name): case.served_by for case in all_cases()}


def served(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and figures of a server's back end: a peer, or "Triton" with the row's own figures.

    Triton also where the peer was not there to be measured.
    """
    name = _back_ends().get((row["operation"], row["case"]), "")
    peers = row.get("peers", {})
    return (name, peers[name]) if name in peers else (TRITON, row)
