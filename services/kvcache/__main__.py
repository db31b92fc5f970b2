"""`python -m services.kvcache`: the prefix store of a host."""

from __future__ import annotations

import sys

from services.common.config import parse_config
from services.common.lifecycle import run
from services.kvcache.config import KvCacheConfig
from services.kvcache.server import serve


def main() -> int:
    """Entry point; returns the exit status."""
    config = parse_config(
        KvCacheConfig,
        prog="services.kvcache",
        description="Prefix store of a host's engines",
    )
    return run("kvcache", lambda: serve(config), log_level=config.log_level)


if __name__ == "__main__":
    sys.exit(main())
