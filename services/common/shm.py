"""Regions: shared memory that its owner makes, checks, hands out and ends.

An owner makes a `Region` (a sealed memory file, or a file on tmpfs or hugetlbfs that may outlive
it), fills it and publishes it through its `RegionBroker`. Others get a `tensor_pb2.Region` by gRPC
and turn it into a `MappedRegion` with `open_region`, once, and keep it. No process ever names a
region by a path or by a text of its own choice.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from warhorse.v1 import tensor_pb2

from services.common.describe import new_generation
from services.common.errors import ErrorReason, ServiceError
from services.common.fdpass import FileKind, request_descriptor
from services.common.memory import (
    PAGE_BYTES,
    SEAL_FUTURE_WRITE,
    SIZE_SEALS,
    Mapping,
    add_seals,
    make_memfd,
    open_mappings,
    prefault,
    reopen,
    require_regular,
    round_up,
    seals_of,
)
from services.common.pinned import PinnedRegistration
from services.common.region_header import (
    HEADER_BYTES,
    READY,
    RegionHeader,
    RegionMismatch,
)

__all__ = [
    "MappedRegion",
    "PinnedRegistration",
    "Region",
    "RegionMismatch",
    "open_region",
    "region_counts",
]


def region_counts() -> tuple[int, int]:
    """Number and bytes of the mappings of this process: regions owned, regions opened, rings."""
    return open_mappings()


class _Mapped:
    """What both sides of a region share: the mapping, its header and the order of closing.

    `view` covers the data without the header: bytes [0, nbytes). Arrays made from it keep the
    memory alive after `close`; everything else must not be used after it.
    """

    def __init__(self, fd: int, mapping: Mapping, header: RegionHeader) -> None:
        self.fd = fd
        self.header = header
        self._mapping = mapping
        self._before_unmap: list[Callable[[], None]] = []
        self.view = mapping.view[HEADER_BYTES : HEADER_BYTES + header.nbytes]

    @property
    def region_id(self) -> str:
        """Random hex text; a secret between owner and users, never part of an error message."""
        return self.header.region_id

    @property
    def generation(self) -> int:
        """Random number of this life of the region."""
        return self.header.generation

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.header.nbytes

    @property
    def tag(self) -> str:
        """What the owner says the data is."""
        return self.header.tag

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self.fd < 0

    def address(self) -> int:
        """Virtual address of the first data byte in this process, valid until `close`."""
        return self._mapping.address() + HEADER_BYTES

    def array(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The data as a flat array of `dtype`, without a copy; a rest of bytes is left out."""
        kind = np.dtype(dtype)
        return np.frombuffer(self.view, kind, self.nbytes // kind.itemsize)

    def before_unmap(self, callback: Callable[[], None]) -> None:
        """Run `callback` in `close`, before the memory is unmapped (last added, first run)."""
        self._before_unmap.append(callback)

    def close(self) -> None:
        """Undo registrations, unmap and close the descriptor. Idempotent.

        While arrays or slices of `view` are alive the memory stays mapped and counted; it goes
        with the last of them.
        """
        if self.closed:
            return
        while self._before_unmap:
            self._before_unmap.pop()()
        view, self.view = self.view, memoryview(b"")
        with contextlib.suppress(BufferError):  # an array made from it is still alive
            view.release()
        del view
        self._mapping.close()
        os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Region(_Mapped):
    """A region on its owner's side. Single-threaded use of its methods; the data is the owner's.

    `kind` is a memory file or a file with a name (`path`). Users can only read it if `read_only` is
    true, which `seal_read_only` makes so; `shared_for_writing` says that users may write.
    """

    def __init__(
        self,
        fd: int,
        mapping: Mapping,
        header: RegionHeader,
        *,
        path: Path | None = None,
        shared_for_writing: bool = False,
    ) -> None:
        """Takes over `fd` and `mapping`. Use create, from_file or adopt."""
        super().__init__(fd, mapping, header)
        self.kind = FileKind.MEMFD if path is None else FileKind.FILE
        self.path = path
        self.read_only = False
        self.shared_for_writing = shared_for_writing

    @classmethod
    def create(
        cls, nbytes: int, *, owner: str, read_only_after: bool = False, tag: str = ""
    ) -> Region:
        """A memory-file region of `nbytes` zero bytes, every page allocated. Freed by the kernel.

        With `read_only_after` the owner fills it and then calls `seal_read_only`; without, users
        may write. Raises MemoryError when the host has not that much memory.
        """
        header = _new_header(nbytes, round_up(HEADER_BYTES + nbytes, PAGE_BYTES), owner, tag)
        fd = make_memfd(f"region:{owner}", header.file_bytes)
        try:
            mapping = _map_new(fd, header)
            add_seals(fd, SIZE_SEALS | (0 if read_only_after else fcntl.F_SEAL_SEAL))
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, mapping, header, shared_for_writing=not read_only_after)

    @classmethod
    def from_file(cls, path: Path, nbytes: int, *, owner: str, tag: str = "") -> Region:
        """A region in a new file on tmpfs or hugetlbfs that survives its owner.

        It grows under `<path>.partial` and gets its name, replacing an older one, in
        `seal_read_only`; before that nobody can adopt it. Raises OSError (ENOSPC) when the file
        system has no room.
        """
        partial = _partial(path)
        partial.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(partial, flags, 0o600)
        try:
            unit = max(PAGE_BYTES, os.fstatvfs(fd).f_bsize)
            header = _new_header(nbytes, round_up(HEADER_BYTES + nbytes, unit), owner, tag)
            _require_space(fd, header.file_bytes)
            os.ftruncate(fd, header.file_bytes)
            mapping = _map_new(fd, header)
        except BaseException:
            os.close(fd)
            partial.unlink(missing_ok=True)
            raise
        return cls(fd, mapping, header, path=path)

    @classmethod
    def adopt(cls, path: Path, *, tag: str = "") -> Region:
        """Take over a finished file region of an earlier owner, read-only, with its generation.

        Raises FileNotFoundError when there is none and RegionMismatch when it is unfinished,
        damaged or, with a `tag`, holds something else.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            mapping, header = _map_existing(fd, writable=False)
            if header.state != READY or (tag and header.tag != tag):
                mapping.close()
                raise RegionMismatch(f"{path} holds {header.tag!r}, state {header.state}")
        except BaseException:
            os.close(fd)
            raise
        region = cls(fd, mapping, header, path=path)
        region.read_only = True
        return region

    def seal_read_only(self) -> None:
        """Declare the data final: no process can get a writable mapping from here on.

        The kernel enforces it for memory files (the owner's own mapping stays writable); a file
        region loses its write permission, gets its final name and can be adopted. Raises
        PermissionError for a region made for writing users.
        """
        if self.read_only:
            return
        if self.kind is FileKind.MEMFD:
            add_seals(self.fd, SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        else:
            assert self.path is not None
            self.header = replace(self.header, state=READY)
            _write_header(self._mapping, self.header)
            os.fchmod(self.fd, 0o440)
            _partial(self.path).replace(self.path)
        self.read_only = True

    def reader_descriptor(self) -> int:
        """A new descriptor of the same memory that cannot write. The caller owns it."""
        return reopen(self.fd, os.O_RDONLY)

    def remove_file(self) -> None:
        """Delete the name of a file region; present mappings stay. No effect on memory files."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            _partial(self.path).unlink(missing_ok=True)


class MappedRegion(_Mapped):
    """A region on a user's side; `view` is read-only when the reference said so."""


def open_region(ref: tensor_pb2.Region, run_dir: Path) -> MappedRegion:
    """Fetch a region's descriptor from its owner's broker, check it and map it.

    Raises ServiceError: STALE_GENERATION when the owner no longer has this life of the region,
    ENGINE_LOST when the owner cannot be reached, LAYOUT_MISMATCH when what came is not what the
    reference says, INVALID_FIELD for a malformed reference.
    """
    fd, kind = request_descriptor(ref, run_dir)
    try:
        mapping, header = _map_existing(fd, writable=not ref.read_only)
        try:
            _require_same(ref, header, kind, fd)
        except BaseException:
            mapping.close()
            raise
    except (RegionMismatch, ValueError, OSError) as error:
        os.close(fd)
        raise ServiceError(
            ErrorReason.ERROR_REASON_LAYOUT_MISMATCH, "the region is not what its owner announced"
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return MappedRegion(fd, mapping, header)


def _require_same(ref: tensor_pb2.Region, header: RegionHeader, kind: FileKind, fd: int) -> None:
    if (header.region_id, header.generation) != (ref.region_id, ref.generation):
        raise ServiceError(
            ErrorReason.ERROR_REASON_STALE_GENERATION,
            "the region belongs to an earlier life of its owner",
        )
    if header.nbytes != ref.nbytes:
        raise RegionMismatch(f"the region has {header.nbytes} bytes, announced were {ref.nbytes}")
    wanted = SIZE_SEALS | (SEAL_FUTURE_WRITE if ref.read_only else 0)
    if kind is FileKind.MEMFD and seals_of(fd) & wanted != wanted:
        raise RegionMismatch(f"the region has seals {seals_of(fd):#x}, needed are {wanted:#x}")


def _map_existing(fd: int, *, writable: bool) -> tuple[Mapping, RegionHeader]:
    """Map a region file of unknown origin and check its header. Leaves `fd` to the caller."""
    size = os.fstat(fd).st_size
    if size < HEADER_BYTES:
        raise RegionMismatch(f"the memory file has {size} bytes, less than its header")
    mapping = Mapping(fd, size, writable=writable)
    try:
        header = RegionHeader.unpack(mapping.view)
        require_regular(fd, header.file_bytes)
        if header.nbytes + HEADER_BYTES > header.file_bytes:
            raise RegionMismatch("the header announces more data than the file holds")
    except BaseException:
        mapping.close()
        raise
    return mapping, header


def _map_new(fd: int, header: RegionHeader) -> Mapping:
    mapping = Mapping(fd, header.file_bytes, writable=True)
    try:
        prefault(mapping, fd)
        _write_header(mapping, header)
    except BaseException:
        mapping.close()
        raise
    return mapping


def _write_header(mapping: Mapping, header: RegionHeader) -> None:
    page = header.pack()
    mapping.view[: len(page)] = page


def _new_header(nbytes: int, file_bytes: int, owner: str, tag: str) -> RegionHeader:
    if nbytes < 1:
        raise ValueError(f"a region needs at least 1 byte, not {nbytes}")
    region_id, generation = secrets.token_hex(16), new_generation()
    return RegionHeader(region_id, generation, nbytes, file_bytes, owner, tag)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _require_space(fd: int, nbytes: int) -> None:
    status = os.fstatvfs(fd)
    free = status.f_bavail * status.f_frsize
    if nbytes > free:
        raise OSError(errno.ENOSPC, f"{nbytes} bytes are needed, the file system has {free} free")
