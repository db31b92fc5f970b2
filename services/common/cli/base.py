"""What the commands share."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


class UserError(Exception):
    """Something the user can put right; shown as one line."""


def add_project(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The flag that tells several stacks on one machine apart."""
    parser.add_argument(
        "--project", default="warhorse", type=_project_name, help="name of the stack"
    )
    return parser


def _project_name(text: str) -> str:
    """A name that both a folder and Docker Compose accept."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,62}", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not made of 1 to 63 lower-case letters, digits, - and _"
        )
    return text


def say(text: str) -> None:
    """A line for the user."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
