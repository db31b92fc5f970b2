"""The question and the answer on a broker socket, and the asking side of it.

Request: magic, version, access (0 read, 1 write), generation, region id. Answer: status, kind of
file, and with status 0 one descriptor through SCM_RIGHTS. Both are single datagrams on a
SOCK_SEQPACKET socket in the shared run directory.
"""

from __future__ import annotations

import array
import enum
import os
import socket
import struct
from pathlib import Path, PurePosixPath

from warhorse.v1 import tensor_pb2

from services.common.errors import ErrorReason, ServiceError

MAGIC = b"WHBROKER"
VERSION = 1
REQUEST = struct.Struct("<8sIIQ32s")
ANSWER = struct.Struct("<II")
ACCESS_READ, ACCESS_WRITE = 0, 1
TIMEOUT_SECONDS = 5.0


class FileKind(enum.IntEnum):
    """What lies behind a descriptor; only memory files carry seals."""

    MEMFD = 0
    FILE = 1


class Status(enum.IntEnum):
    """The broker's answer."""

    OK = 0
    UNKNOWN = 1
    STALE = 2
    READ_ONLY = 3
    BAD_REQUEST = 4


def request_descriptor(ref: tensor_pb2.Region, run_dir: Path) -> tuple[int, FileKind]:
    """Ask the owner of `ref` for its descriptor, with read access only if `ref.read_only`.

    The caller owns the descriptor. Raises ServiceError as `shm.open_region` says.
    """
    region_id = ref.region_id.encode("ascii", "replace")
    if len(region_id) != 32:
        raise _bad_field("region_id", "the region id must have 32 characters")
    path = _broker_path(ref.broker, run_dir)
    access = ACCESS_READ if ref.read_only else ACCESS_WRITE
    request = REQUEST.pack(MAGIC, VERSION, access, ref.generation, region_id)
    try:
        answer, fds = _exchange(path, request)
    except OSError as error:
        raise ServiceError(
            ErrorReason.ERROR_REASON_ENGINE_LOST, "the owner of the region cannot be reached"
        ) from error
    return _read_answer(answer, fds)


def _bad_field(field: str, message: str) -> ServiceError:
    return ServiceError(ErrorReason.ERROR_REASON_INVALID_FIELD, message, field=field)


def _broker_path(broker: str, run_dir: Path) -> Path:
    parts = PurePosixPath(broker)
    if not broker or parts.is_absolute() or ".." in parts.parts or "\0" in broker:
        raise _bad_field("broker", "the broker must be a path inside the run directory")
    return run_dir / parts


def _exchange(path: Path, request: bytes) -> tuple[bytes, list[int]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(TIMEOUT_SECONDS)
        connection.connect(os.fspath(path))
        connection.send(request)
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        answer, ancillary, _, _ = connection.recvmsg(64, room, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            fds.extend(numbers)
    return answer, fds


def _read_answer(answer: bytes, fds: list[int]) -> tuple[int, FileKind]:
    if len(answer) == ANSWER.size:
        status, kind = ANSWER.unpack(answer)
        if status == Status.OK and len(fds) == 1 and kind in (FileKind.MEMFD, FileKind.FILE):
            return fds[0], FileKind(kind)
    else:  # the broker hung up: another user's process, or it is ending
        status = None
    for fd in fds:
        os.close(fd)
    if status in (Status.UNKNOWN, Status.STALE):
        raise ServiceError(
            ErrorReason.ERROR_REASON_STALE_GENERATION,
            "the region belongs to an earlier life of its owner",
        )
    if status == Status.READ_ONLY:
        raise _bad_field("read_only", "the region can only be opened read-only")
    raise ServiceError(
        ErrorReason.ERROR_REASON_ENGINE_LOST, "the owner of the region did not hand it out"
    )
