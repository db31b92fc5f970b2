"""What the commands share."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


class UserError(Exception):
    """Something the user can put right; shown as one line."""


def add_project(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The flag that tells several stacks on one machine apart."""
    parser.add_argument("--project", default="warhorse", help="name of the stack")
    return parser


def say(text: str) -> None:
    """A line for the user."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
