"""Runs a command that gets SIGTERM when its parent dies, however it dies (Linux prctl)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """`python launch.py PARENT_PID COMMAND...`: never returns."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent is gone")
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
