"""Hands the descriptors of an owner's regions to processes of the same user."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path

from warhorse.v1 import tensor_pb2

from services.common.fdpass import (
    ACCESS_WRITE,
    ANSWER,
    MAGIC,
    REQUEST,
    VERSION,
    FileKind,
    Status,
)
from services.common.shm import Region
from services.common.sockets import SocketLock

_log = logging.getLogger(__name__)

_UCRED = struct.Struct("3i")  # pid, uid, gid
_BACKLOG = 128
_MAX_CONNECTIONS = 256


@dataclass(frozen=True, slots=True)
class _Entry:
    """A published region; `reader` is a descriptor without write access, owned by the broker."""

    generation: int
    kind: FileKind
    read_only: bool
    writer: int
    reader: int


class RegionBroker:
    """Answers on a SOCK_SEQPACKET socket at `path` in a thread of its own.

    `publish`, `retire` and `close` may be called from any thread. A region stays open in the
    processes that have it after `retire`; only new requests are refused. Peers of another user id
    are hung up on. `owner` names the broker in the log.
    """

    def __init__(self, path: Path, owner: str) -> None:
        """Raises StartupError when another process owns the socket."""
        self._owner = owner
        self._lock = SocketLock(path)
        self._entries: dict[str, _Entry] = {}
        self._guard = threading.Lock()
        try:
            self._listener = _listen(self._lock.path)
        except BaseException:
            self._lock.release()
            raise
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._serve, name=f"broker-{owner}", daemon=True)
        self._thread.start()

    def publish(self, region: Region) -> tensor_pb2.Region:
        """Hand out `region` from now on and return the reference to send to its users.

        Users of a region made with `read_only_after` need it sealed first: raises ValueError when
        it is neither sealed nor made for writing users. The region must stay open until `retire`.
        """
        if not region.read_only and not region.shared_for_writing:
            raise ValueError("seal the region before it is published")
        entry = _Entry(
            region.generation,
            region.kind,
            region.read_only,
            -1 if region.read_only else os.dup(region.fd),
            region.reader_descriptor(),
        )
        with self._guard:
            previous = self._entries.pop(region.region_id, None)
            self._entries[region.region_id] = entry
        _close_entry(previous)
        path = self._lock.path
        return tensor_pb2.Region(
            region_id=region.region_id,
            generation=region.generation,
            nbytes=region.nbytes,
            broker=f"{path.parent.name}/{path.name}",
            read_only=region.read_only,
        )

    def retire(self, region: Region) -> None:
        """Refuse new requests for `region`. No effect when it is not published."""
        with self._guard:
            entry = self._entries.pop(region.region_id, None)
        _close_entry(entry)

    def close(self) -> None:
        """Stop the thread, forget all regions and give the socket back. Idempotent."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        self._stop = -1
        self._listener.close()
        self._lock.release()
        with self._guard:
            entries = list(self._entries.values())
            self._entries.clear()
        for entry in entries:
            _close_entry(entry)

    # -- the thread -----------------------------------------------------------------------------

    def _serve(self) -> None:
        connections: dict[int, socket.socket] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while True:
                ready = [key.fd for key, _ in selector.select()]
                if self._stop in ready:
                    break
                for fd in ready:
                    if fd == self._listener.fileno():
                        self._accept(selector, connections)
                    elif not self._handle(connections[fd]):
                        selector.unregister(fd)
                        connections.pop(fd).close()
        for connection in connections.values():
            connection.close()

    def _accept(
        self, selector: selectors.BaseSelector, connections: dict[int, socket.socket]
    ) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            _log.warning("broker %s could not accept: %s", self._owner, error)
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, uid, _ = _UCRED.unpack(credentials)
        if uid != os.geteuid() or len(connections) >= _MAX_CONNECTIONS:
            _log.warning("broker %s refused process %d of user %d", self._owner, pid, uid)
            connection.close()
            return
        connection.setblocking(False)
        connections[connection.fileno()] = connection
        selector.register(connection, selectors.EVENT_READ)

    def _handle(self, connection: socket.socket) -> bool:
        """Answer one request; False when the connection is over."""
        try:
            request = connection.recv(REQUEST.size + 1)
            if not request:
                return False
            self._answer(connection, request)
        except OSError:  # the peer went away, or does not read its answers
            return False
        return True

    def _answer(self, connection: socket.socket, request: bytes) -> None:
        with self._guard:  # so that no descriptor is closed while it is being sent
            status, kind, fd = self._look_up(request)
            answer = ANSWER.pack(status, kind)
            if status is Status.OK:
                socket.send_fds(connection, [answer], [fd])
            else:
                connection.send(answer)

    def _look_up(self, request: bytes) -> tuple[Status, FileKind, int]:
        nothing = (FileKind.MEMFD, -1)
        if len(request) != REQUEST.size:
            return Status.BAD_REQUEST, *nothing
        magic, version, access, generation, region_id = REQUEST.unpack(request)
        if magic != MAGIC or version != VERSION:
            return Status.BAD_REQUEST, *nothing
        entry = self._entries.get(region_id.decode("ascii", "replace"))
        if entry is None:
            return Status.UNKNOWN, *nothing
        if entry.generation != generation:
            return Status.STALE, *nothing
        if access == ACCESS_WRITE:
            if entry.read_only:
                return Status.READ_ONLY, *nothing
            return Status.OK, entry.kind, entry.writer
        return Status.OK, entry.kind, entry.reader


def _listen(path: Path) -> socket.socket:
    kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        listener.bind(os.fspath(path))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _close_entry(entry: _Entry | None) -> None:
    if entry is None:
        return
    os.close(entry.reader)
    if entry.writer >= 0:
        os.close(entry.writer)
