"""python -m kernels.aot: compile all kernels for all targets and check them against the cards.

Exit status 1 where a variant does not compile, needs too much shared memory, or spills in its hot
loop. With --cache the compiled code stays there, for TRITON_CACHE_DIR of a server.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from kernels.backend import TARGETS


def main() -> int:
    arguments = _parser().parse_args()
    targets = [int(target) for target in arguments.targets.split(",")]
    environment = dict(os.environ)
    # Both change what is compiled; a server of the real card has neither.
    for name in ("TRITON_INTERPRET", "TRITON_OVERRIDE_ARCH"):
        environment.pop(name, None)
    if arguments.worker:
        return _work(targets[0], arguments.json)
    with tempfile.TemporaryDirectory(prefix="wh-aot-") as folder:
        cache = arguments.cache or Path(folder, "cache")
        environment["TRITON_CACHE_DIR"] = str(cache)
        reports = [r for t in targets for r in _in_process(t, Path(folder), environment)]
    _print(reports)
    if arguments.json:
        arguments.json.write_text(json.dumps(reports, indent=1) + "\n")
    return 1 if not reports or any(report["problem"] for report in reports) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=__doc__)
    parser.add_argument("--targets", default=",".join(map(str, TARGETS)), help="such as 80,86")
    parser.add_argument("--cache", type=Path, help="folder that keeps the compiled code")
    parser.add_argument("--json", type=Path, help="file for the reports")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def _in_process(target: int, folder: Path, environment: dict[str, str]) -> list[dict[str, object]]:
    result = folder / f"sm{target}.json"
    command = [sys.executable, "-m", "kernels.aot", "--worker", "--targets", str(target)]
    subprocess.run([*command, "--json", str(result)], env=environment, check=True)
    reports: list[dict[str, object]] = json.loads(result.read_text())
    return reports


def _work(target: int, result: Path) -> int:
    from kernels.aot.compile import compile_variant
    from kernels.aot.registry import variants

    reports = [compile_variant(variant, target).as_dict() for variant in variants(target)]
    result.write_text(json.dumps(reports))
    return 0


def _print(reports: list[dict[str, object]]) -> None:
    width = max((len(str(report["label"])) for report in reports), default=0)
    for r in reports:
        print(
            f"sm{r['target']} {r['label']!s:<{width}} {r['registers']:>4} registers "
            f"{r['spill_bytes']:>5} B spilled {r['shared_bytes']:>7} B shared "
            f"{r['loop_instructions']:>5} in loop  {r['problem'] or 'fits'}"
        )
    failed = sum(bool(report["problem"]) for report in reports)
    print(f"{len(reports)} variants, {failed} with problems")


if __name__ == "__main__":
    sys.exit(main())
