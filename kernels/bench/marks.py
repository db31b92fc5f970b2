"""What a row of the benchmark must reach, from marks.json."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARKS = Path(__file__).with_name("marks.json")
UNITS = {"fraction": "%", "us": "us", "tflops": "TFLOP/s"}


@dataclass(frozen=True)
class Mark:
    """`must` and `good` of a measure: fraction of the floor, TFLOP/s, or microseconds at most.

    `good` is None where nothing above `must` is asked. `us`: a row no slower than this has reached
    `must` whatever its measure, or None.
    """

    measure: str
    must: float
    good: float | None = None
    us: float | None = None

    def verdict(self, row: dict[str, Any]) -> str:
        """good, met or missed."""
        if self.good is not None and self._reaches(row, self.good):
            return "good"
        quick = self.us is not None and row["us"] <= self.us
        return "met" if quick or self._reaches(row, self.must) else "missed"

    def _reaches(self, row: dict[str, Any], limit: float) -> bool:
        value: float = row[self.measure]
        return value <= limit if self.measure == "us" else value >= limit

    def __str__(self) -> str:
        scale = 100 if self.measure == "fraction" else 1
        limits = f"{scale * self.must:g}"
        if self.good is not None:
            limits += f" / {scale * self.good:g}"
        quick = "" if self.us is None else f" or {self.us:g} us"
        return f"{limits} {UNITS[self.measure]}{quick}"


class Marks:
    """The marks of one card and path."""

    def __init__(self, path: Path = MARKS) -> None:
        self._data = json.loads(path.read_text())
        self.source: str = self._data["source"]

    def hold_for(self, result: dict[str, Any]) -> bool:
        """Whether `result` is of the card and path that the marks were set for."""
        return all(result[key] == self._data[key] for key in ("card", "path"))

    def of(self, operation: str, case: str) -> Mark:
        """The mark of a row; rows that are not listed share one."""
        for row in self._data["rows"]:
            if row["operation"] == operation and re.fullmatch(row["case"], case):
                return Mark(row["measure"], row["must"], row["good"])
        others = self._data["others"]
        return Mark("fraction", others["fraction"], us=others["us"])
