"""Talking to child processes of the tests."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Child = subprocess.Popen[str]
Spawn = Callable[..., Child]


def line_from(child: Child) -> str:
    """The child's next line; fails when it ended instead."""
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, f"the child ended with status {child.wait(10)}"
    return line.strip()


def tell(child: Child, line: str) -> None:
    """Send the child a line."""
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()
