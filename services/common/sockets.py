"""Ownership of Unix socket paths: one process per path, decided by a kernel lock.

A lock file `<name>.lock` beside the socket is held with flock for the owner's life. Whoever holds
it may replace or remove the socket; nobody else touches it. The kernel drops the lock however the
owner ends, so a stale socket is recognised by its free lock. The lock file itself is never removed
(removing it would let two processes lock two files of the same name).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from services.common.errors import StartupError

# sockaddr_un holds 108 bytes with the final zero.
MAX_SOCKET_PATH = 107


class SocketLock:
    """Owns one socket path. Made before binding, released after the socket is closed."""

    def __init__(self, path: Path) -> None:
        """Take the path and remove a dead owner's socket.

        Raises StartupError if another process owns it, if it is too long for a socket address, or
        if something that is not a socket lies there.
        """
        self.path = path.absolute()
        length = len(os.fsencode(self.path))
        if length > MAX_SOCKET_PATH:
            raise StartupError(
                f"socket path {self.path} has {length} bytes, at most {MAX_SOCKET_PATH} are "
                "possible: choose a shorter run directory"
            )
        self.path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._fd = self._lock()
        try:
            self._remove_stale()
        except BaseException:
            os.close(self._fd)
            raise

    def _lock(self) -> int:
        lock_path = self.path.with_name(self.path.name + ".lock")
        fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise StartupError(
                f"{self.path} is in use by a running process (pid {holder}): stop it first, or "
                "start this one under another --instance name"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return fd

    def _remove_stale(self) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise StartupError(f"{self.path} exists and is not a socket: remove it")
        self.path.unlink()

    def release(self) -> None:
        """Remove the socket, if it is still there, and give the path back. Idempotent."""
        if self._fd < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        os.close(self._fd)
        self._fd = -1
