"""Tuned configurations: read from tuned.json, one list of rows per target, first match wins.

The rows and the command that found them stand in that file; `python -m kernels.bench --tune`
measures candidates and prints rows for it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

TABLE = Path(__file__).with_name("tuned.json")

Kernel = Literal["vector", "matrix"]


@dataclass(frozen=True, slots=True)
class Config:
    """One way to launch: tile sizes in rows, outputs and bytes of a weight row."""

    kernel: Kernel
    block_n: int
    block_bytes: int
    warps: int
    block_m: int = 1
    stages: int = 2
    split: int = 1
    scale_weight: bool = False

    def __post_init__(self) -> None:
        tiles = (self.block_n, self.block_bytes, self.warps, self.block_m)
        if any(size < 1 or size & (size - 1) for size in tiles):
            raise ValueError(f"tile sizes must be powers of two: {self}")
        if self.block_bytes < 32:
            raise ValueError(f"rows are read by at least 32 bytes: {self}")
        if self.split < 1 or self.stages < 1:
            raise ValueError(f"at least one split and one stage: {self}")


@dataclass(frozen=True, slots=True)
class Row:
    """A configuration and where it applies: weights' format, at most so many rows and outputs."""

    weights: str
    rows_up_to: int
    outputs_up_to: int
    config: Config

    def fits(self, weights: str, rows: int, outputs: int) -> bool:
        return self.weights == weights and rows <= self.rows_up_to and outputs <= self.outputs_up_to


def parse_row(raw: dict[str, Any]) -> Row:
    """A row of the table; the keys beside `weights` and the two limits are a Config's."""
    config = {k: v for k, v in raw.items() if k not in ("weights", "rows_up_to", "outputs_up_to")}
    return Row(raw["weights"], raw["rows_up_to"], raw["outputs_up_to"], Config(**config))


@cache
def rows_for(target: int) -> tuple[Row, ...]:
    """The rows of a target (80, 86, 89 or 90), in order."""
    table = json.loads(TABLE.read_text())
    return tuple(parse_row(raw) for raw in table["targets"][f"sm{target}"]["rows"])


def select(target: int, weights: str, rows: int, outputs: int) -> Config:
    """The configuration for x of `rows` rows and `outputs` weight rows of format `weights`."""
    for row in rows_for(target):
        if row.fits(weights, rows, outputs):
            return row.config
    raise LookupError(f"no configuration for {weights}, {rows} rows, {outputs} outputs on {target}")
