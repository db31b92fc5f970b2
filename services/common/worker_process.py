"""The worker's side of `workers`: limits that the kernel enforces, and a loop of requests.

What a request makes the worker do may loop without end inside one operation, which nothing inside
Python can interrupt. Here the kernel ends the process: by an alarm when a request takes too long,
by the limit of its address space when it takes too much memory. The parent starts another one.
"""

from __future__ import annotations

import argparse
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import BinaryIO

LENGTH = struct.Struct("<I")


def arguments() -> argparse.ArgumentParser:
    """Return a parser of the flags that every worker has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    return parser


def answer_requests(answer: Callable[[bytes], bytes], seconds: float, memory_bytes: int) -> None:
    """Answer requests until the input ends. The process ends with one that takes too much."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while (request := _read(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        reply = answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(LENGTH.pack(len(reply)))
        sys.stdout.buffer.write(reply)
        sys.stdout.buffer.flush()


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return stream.read(LENGTH.unpack(head)[0])
