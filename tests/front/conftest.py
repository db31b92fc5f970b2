"""Fixtures of the front's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.front.helpers import write_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))
