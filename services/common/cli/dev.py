"""`warhorse test`, `warhorse dev` and `warhorse bench`: what developers and CI run."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from services.common.cli.base import say
from services.common.cli.checks import CHECKS, generate, run
from services.common.cli.lock import write_locks
from services.common.cli.settings_page import PAGE, settings_page
from services.common.supervisor.state import ROOT

if TYPE_CHECKING:
    from services.common.cli.base import Subparsers

BENCHMARKS = ("churn", "front", "nano_model", "pipeline", "shm", "start", "tables", "tokenizer")


def add_commands(commands: Subparsers) -> None:
    """Register test, dev and bench."""
    test = commands.add_parser("test", help="run the whole test suite", add_help=False)
    test.set_defaults(command=run_test, takes_rest=True)
    dev = commands.add_parser("dev", help="checks for developers")
    dev.add_argument(
        "check", nargs="?", default="check", choices=["check", "generate", "lock", "aot", *CHECKS]
    )
    dev.set_defaults(command=run_dev)
    memory = commands.add_parser("memory", help="cache bytes per token and request of a model")
    memory.set_defaults(command=run_memory, takes_rest=True)
    bench = commands.add_parser("bench", help="run a benchmark of tests/benchmarks")
    bench.add_argument("name", choices=BENCHMARKS)
    bench.set_defaults(command=run_bench, takes_rest=True)


def run_test(arguments: argparse.Namespace) -> int:
    """pytest in two processes, with whatever arguments follow."""
    side_by_side = ("-n", "2", "--dist", "loadgroup")
    return run(sys.executable, "-m", "pytest", *side_by_side, *arguments.rest)


def run_memory(arguments: argparse.Namespace) -> int:
    """`python -m services.engine.cache.accounting`."""
    return run(sys.executable, "-m", "services.engine.cache.accounting", *arguments.rest)


def run_bench(arguments: argparse.Namespace) -> int:
    """`python -m tests.benchmarks.NAME`."""
    return run(sys.executable, "-m", f"tests.benchmarks.{arguments.name}", *arguments.rest)


def run_dev(arguments: argparse.Namespace) -> int:
    """One check, all of them (`check`), or a generator."""
    match arguments.check:
        case "generate":
            PAGE.write_text(settings_page())
            return generate(ROOT / "protos")
        case "lock":
            write_locks(ROOT)
            return 0
        case "aot":
            return run(sys.executable, "-m", "kernels.aot")
        case "check":
            return max([_report(name) for name in CHECKS])
        case name:
            return _report(name)


def _report(name: str) -> int:
    code = CHECKS[name]()
    say(f"{name}: {'passed' if code == 0 else 'FAILED'}")
    return code
