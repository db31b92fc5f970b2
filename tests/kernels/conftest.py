from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import backend
from tests.kernels import interpreter

if backend.interpreted():
    interpreter.install()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests for a card need one; they are not run in the interpreter."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
