"""python -m kernels.aot: compile all kernels for all targets and check them against the cards.

Exit status 1 where a variant does not compile, needs too much shared memory, or spills in its hot
loop; its name is printed at once. --launches compiles nothing: it lists launches of the
benchmark's cases that no variant covers, which a server would have to compile.

--cache keeps the compiled code in a folder, for TRITON_CACHE_DIR of a server with this version of
Triton and these sources, and Triton's launcher, for which it needs a C compiler. Triton writes the
folder's path into its files: do not move it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kernels.backend import TARGETS

# One process a target, and so many targets side by side.
SIDE_BY_SIDE = 2


def main() -> int:
    arguments = _parser().parse_args()
    targets: list[int] = arguments.targets
    if arguments.worker:
        (target,) = targets
        if arguments.launcher:
            return _write_launcher()
        return _list_launches(target) if arguments.launches else _compile(target, arguments)
    with tempfile.TemporaryDirectory(prefix="wh-aot-") as folder:
        environment = _environment(arguments.cache or Path(folder, "cache"))
        if arguments.launches:
            return max(_worker(target, ["--launches"], environment) for target in targets)
        if arguments.cache and _worker(targets[0], ["--launcher"], environment):
            return 1
        reports = _side_by_side(arguments, Path(folder), environment)
    _summarise(reports, arguments.verbose)
    if arguments.json:
        arguments.json.write_text(json.dumps(reports, indent=1) + "\n")
    return 1 if not reports or any(report["problem"] for report in reports) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.aot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--targets", type=_targets, default=list(TARGETS), help="such as 80,86")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--cache", type=Path, help="folder that keeps the compiled code")
    parser.add_argument("--json", type=Path, help="file for the reports")
    parser.add_argument("--verbose", action="store_true", help="print every variant's cost")
    parser.add_argument("--launches", action="store_true", help="list uncovered launches and stop")
    for part in ("--worker", "--launcher"):
        parser.add_argument(part, action="store_true", help=argparse.SUPPRESS)
    return parser


def _targets(text: str) -> list[int]:
    targets = [int(target) for target in text.split(",")]
    if not set(targets) <= set(TARGETS):
        raise argparse.ArgumentTypeError(f"targets are among {TARGETS}, not {text}")
    return targets


def _environment(cache: Path) -> dict[str, str]:
    environment = dict(os.environ)
    # Both change what is compiled; a server of the real card has neither.
    for name in ("TRITON_INTERPRET", "TRITON_OVERRIDE_ARCH"):
        environment.pop(name, None)
    return environment | {
        "TRITON_CACHE_DIR": str(cache.resolve()),
        "TRITON_STORE_BINARY_ONLY": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _side_by_side(
    arguments: argparse.Namespace, folder: Path, environment: dict[str, str]
) -> list[dict[str, Any]]:
    """The reports of all targets."""

    def compile_for(target: int) -> list[dict[str, Any]]:
        result = folder / f"{target}.json"
        options = ["--only", arguments.only, "--json", str(result)]
        if _worker(target, options + ["--verbose"] * arguments.verbose, environment):
            raise SystemExit(1)  # it has said why
        reports: list[dict[str, Any]] = json.loads(result.read_text())
        return reports

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        return [report for found in pool.map(compile_for, arguments.targets) for report in found]


def _worker(target: int, options: list[str], environment: dict[str, str]) -> int:
    """Exit status of this module in a process of its own."""
    command = [sys.executable, "-m", "kernels.aot", "--worker", "--targets", str(target), *options]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code < 0:
        print(f"sm{target}: ended by signal {-code}")
    return abs(code)


def _compile(target: int, arguments: argparse.Namespace) -> int:
    from kernels.aot.compile import compile_variant
    from kernels.aot.registry import variants

    reports = []
    begin = time.monotonic()
    for variant in variants(target):
        if arguments.only in variant.label:
            report = compile_variant(variant, target, loops=arguments.verbose)
            reports.append(report.as_dict())
            if report.problem:
                print(f"sm{target} {report.label}: {report.problem}")
    arguments.json.write_text(json.dumps(reports))
    print(f"sm{target}: {len(reports)} variants in {time.monotonic() - begin:.0f} s")
    return 0


def _write_launcher() -> int:
    from kernels.aot.launcher import write_launcher

    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler:
        write_launcher(compiler)
    else:
        print("no C compiler here: a server needs one, for Triton's launcher")
    return 0


def _list_launches(target: int) -> int:
    from kernels.aot.launches import uncovered

    lines = list(uncovered(target))
    for line in lines:
        print(f"sm{target} {line}")
    return int(bool(lines))


def _summarise(reports: list[dict[str, Any]], verbose: bool) -> None:
    width = max((len(report["label"]) for report in reports), default=0)
    for r in reports if verbose else ():
        print(
            f"sm{r['target']} {r['label']:<{width}} {r['registers']:>4} registers "
            f"{r['stack_bytes']:>5} B of stack {r['shared_bytes']:>7} B shared "
            f"{r['loop_instructions']:>5} in loop {r['seconds']:>5.1f} s  {r['problem'] or 'fits'}"
        )
    seconds: Counter[str] = Counter()
    for report in reports:
        seconds[report["label"].split(":")[0]] += report["seconds"]
    print("CPU seconds: " + ", ".join(f"{name} {took:.0f}" for name, took in seconds.most_common()))
    failed = sum(bool(report["problem"]) for report in reports)
    print(f"{len(reports)} variants, {failed} with problems")


if __name__ == "__main__":
    sys.exit(main())
