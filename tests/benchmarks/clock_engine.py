"""The front process of the engine service with the clock core in place of the model's."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from services.common.lifecycle import run
from services.engine.__main__ import serve
from services.engine.flags import EngineFlags
from services.engine.process_link import ProcessLink


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--log-level", default="warning")
    given = parser.parse_args()
    flags = EngineFlags(
        model=Path("none"), run_dir=given.run_dir, served_model_name=("test-model",)
    )
    link = ProcessLink((), "tests.front.clock_core")
    return run("engine", lambda: serve(flags, link), log_level=given.log_level)


if __name__ == "__main__":
    sys.exit(main())
