"""The core process's side of its birth: the rings, and dying with the front."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence
from typing import Literal

from services.common.errors import StartupError
from services.common.ring import Ring

_PR_SET_PDEATHSIG = 1


def die_with_front(front_pid: int) -> None:
    """Let the kernel end this process when the front ends, however it ends.

    Signals that reach the whole group (Ctrl-C, a stop of the supervisor) are the front's to
    handle: it lets running requests finish and then ends this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != front_pid:  # it ended before the kernel knew our wish
        raise StartupError("the front process has ended")


def attach_rings(command_fds: Sequence[str], event_fds: Sequence[str]) -> tuple[Ring, Ring]:
    """The commands' and the events' ring behind inherited descriptors, which are closed."""
    commands = _attached(command_fds, "consumer")
    return commands, _attached(event_fds, "producer")


def _attached(fds: Sequence[str], role: Literal["producer", "consumer"]) -> Ring:
    numbers = [int(fd) for fd in fds]
    ring = Ring.attach(numbers, role=role)
    for number in numbers:
        os.close(number)
    return ring
