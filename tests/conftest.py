"""Settings that must stand before the first import of Triton."""

from __future__ import annotations

import os
from pathlib import Path

# Without a card Triton kernels run in its interpreter, which decorators choose at import.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
