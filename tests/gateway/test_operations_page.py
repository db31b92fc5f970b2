"""docs/operations.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from warhorse.v1.common_pb2 import ErrorReason

from services.common.errors import ServiceError
from services.gateway.errors import to_api_error
from services.gateway.metrics import Metrics

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
REASONS = [name.removeprefix("ERROR_REASON_") for name in ErrorReason.keys()[1:]]


@pytest.mark.parametrize("reason", REASONS)
def test_error_table(reason: str) -> None:
    error = ServiceError(ErrorReason.Value(f"ERROR_REASON_{reason}"), "no")
    row = f"| `{reason}` | `{error.code.name}` | {to_api_error(error).status} |"
    assert row in PAGE.splitlines()


def test_metrics_table() -> None:
    metrics = Metrics([])
    found = set()
    for family in metrics.registry.collect():
        found.add(f"{family.name}_total" if family.type == "counter" else family.name)
    listed = set(re.findall(r"^\| `((?:vllm:|http_)\w+)` ", PAGE, re.MULTILINE))
    assert listed == found
