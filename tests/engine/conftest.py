"""Cores on the toy model, checked for leaks when a test ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.driver import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Makes cores; at the end each must be idle with every id free or cached."""
    benches = Bench()
    yield benches
    benches.check()
