"""The warhorse command: its sub-commands and their flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from services.common.cli import chat, dev, status, up
from services.common.cli.base import UserError

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    known, rest = parser.parse_known_args(arguments)
    if rest and not known.takes_rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    known.rest = rest
    try:
        command: Command = known.command
        return command(known)
    except UserError as error:
        sys.stderr.write(f"warhorse: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="warhorse", allow_abbrev=False)
    parser.set_defaults(takes_rest=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up.add_commands(commands)
    status.add_commands(commands)
    chat.add_commands(commands)
    dev.add_commands(commands)
    return parser
