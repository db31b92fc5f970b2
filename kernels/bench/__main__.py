"""python -m kernels.bench: speed of the kernels on this machine's card.

TRITON_OVERRIDE_ARCH=sm80 makes a newer card run Ampere's instructions. --table needs no card.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from kernels.bench import report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--table", action="store_true", help="remake docs/kernels.md and stop")
    parser.add_argument("--tune", action="store_true", help="measure candidate configurations")
    parser.add_argument(
        "--select", type=Path, help="write tuned.json from the JSON of a --tune run and stop"
    )
    parser.add_argument(
        "--profile", type=Path, help="counters, by ncu, of the rows of this JSON below their mark"
    )
    parser.add_argument("--only", default="", help="cases whose operation and name contain this")
    parser.add_argument("--no-peers", action="store_true", help="leave installed peers out")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    arguments = parser.parse_args()
    if arguments.table:
        report.write_page()
        return 0
    if arguments.select:
        from kernels.bench import select

        select.write_table(arguments.select)
        return 0
    return _measure(arguments)


def _measure(arguments: argparse.Namespace) -> int:
    """The results so far are in the JSON after every row. Returns 1 if a row was refused."""
    import torch
    import triton

    from kernels.bench import ceilings, tune
    from kernels.bench.measure import all_cases, measure

    override = os.environ.get("TRITON_OVERRIDE_ARCH", "")
    setting = f"TRITON_OVERRIDE_ARCH={override} " if override else ""
    result: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "path": f"{override} lowering" if override else "native lowering",
        "command": setting + "python -m kernels.bench",
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    torch.manual_seed(0)
    if arguments.profile:
        _write(arguments.json, result | _profiled(arguments.profile))
        return 0
    if arguments.tune:
        _write(arguments.json, result | {"rows": tune.tune(arguments.only, arguments.workers)})
        return 0
    top = ceilings.measure()
    print(top, flush=True)
    result |= {"ceilings": top.as_dict(), "rows": []}
    for row in measure(all_cases(arguments.only), top, peers=not arguments.no_peers):
        result["rows"].append(row)
        _write(arguments.json, result)
    return int(any("refused" in row for row in result["rows"]))


def _profiled(results: Path) -> dict[str, Any]:
    import torch

    from kernels.bench.profile import profile

    missed = report.missed(json.loads(results.read_text()))
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return {"multiprocessors": processors, "rows": profile(missed)}


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
