"""Streaming clients that come and go leave nothing behind in any process."""

from __future__ import annotations

import asyncio

import pytest

from tests.benchmarks.churn import churn, script
from tests.benchmarks.pipeline import running_stack

pytestmark = pytest.mark.slow

CLIENTS = 50
SECONDS = 5.0
LENGTHS = (3, 15)


def test_clients_that_hang_up_at_random_leave_nothing_behind() -> None:
    with running_stack(script(), merge=True) as stack:
        report = asyncio.run(churn(stack, CLIENTS, SECONDS, LENGTHS))
    assert report.errors == []
    assert report.completed > 0 and report.cut > 0
    assert report.after == report.before
