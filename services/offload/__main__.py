"""`python -m services.offload --model DIR`: the n-gram tables of a host."""

from __future__ import annotations

import sys

from services.common.config import parse_config
from services.common.lifecycle import run
from services.offload.config import OffloadConfig
from services.offload.server import serve


def main() -> int:
    """Entry point; returns the exit status."""
    config = parse_config(
        OffloadConfig, prog="services.offload", description="N-gram tables in shared memory"
    )
    return run("offload", lambda: serve(config), log_level=config.log_level)


if __name__ == "__main__":
    sys.exit(main())
