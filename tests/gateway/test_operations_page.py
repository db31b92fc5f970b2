"""docs/operations.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from warhorse.v1.common_pb2 import ErrorReason

from services.common.errors import ServiceError
from services.gateway.errors import to_api_error
from services.gateway.metrics import Metrics
from services.gateway.unsupported import CHAT, COMMON
from tests.gateway.conftest import Stack

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


async def test_paths_and_refused_fields(stack: Stack) -> None:
    rows = re.findall(r"^\| `(?:GET|POST) (.*?)` \|", PAGE, re.MULTILINE)
    listed = {path for row in rows for path in re.findall(r"/[\w/{}]*", row)}
    assert listed == set((await stack.http.get("/openapi.json")).json()["paths"])
    refused = PAGE.partition("and its name:")[2].partition("\n\n")[0]
    assert {*COMMON, *CHAT} == set(re.findall(r"`(\w+)`", refused))
