"""`python -m services.tokenizer --model DIR`: text to tokens and back."""

from __future__ import annotations

import asyncio
import os
import sys

import uvloop

from services.common.config import parse_config
from services.common.lifecycle import run
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.server import serve


def main() -> int:
    """Entry point; returns the exit status."""
    config = parse_config(
        TokenizerConfig,
        prog="services.tokenizer",
        description="Renders, encodes, decodes and parses for one checkpoint",
    )
    # Render workers are started by fork and exec; gRPC needs no part in that.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    return run("tokenizer", lambda: serve(config), log_level=config.log_level)


if __name__ == "__main__":
    sys.exit(main())
