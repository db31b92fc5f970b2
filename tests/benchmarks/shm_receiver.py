"""The receiving process of `tests.benchmarks.shm`."""

from __future__ import annotations

import sys

from tests.benchmarks.shm import receive

if __name__ == "__main__":
    receive(*sys.argv[1:])
