"""Settings that must stand before the first import of Triton, and which tests run side by side."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Without a card Triton kernels run in its interpreter, which decorators choose at import.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# These start processes and wait for them: they follow each other, whatever else runs.
WITH_PROCESSES = {
    "common", "compose", "containers", "front", "kvcache", "offload", "stack", "supervisor",
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """One thread before the first fixture of a test: another number may change the last bits.

    Two threads on a busy machine also wait for each other far longer than they compute.
    """
    torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One group for the tests with processes, one for each other file."""
    for item in items:
        folder, *_ = item.path.relative_to(Path(__file__).parent).parts
        group = "processes" if folder in WITH_PROCESSES else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
