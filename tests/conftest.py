"""Settings that must stand before the first import of Triton."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

# Without a card Triton kernels run in its interpreter, which decorators choose at import.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_report_header() -> list[str]:
    """Say it where a whole part of the suite cannot run."""
    if importlib.util.find_spec("triton") is None:
        return ["Triton is not installed: its kernels are not tested"]
    return []
