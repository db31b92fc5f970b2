"""Memory files, seals and mappings: the system calls under `shm` and `ring`.

Every shared mapping of a process is made by `Mapping`, so `open_mappings` can say at any time how
many there are and how many bytes they hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import stat
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)

PAGE_BYTES = 4096
MEMFD_PREFIX = "warhorse:"

# linux/fcntl.h; not in Python 3.11's fcntl module.
SEAL_FUTURE_WRITE = 0x10
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14
_PREFAULT_SLICE = 256 * 1024 * 1024
_PREFAULT_THREADS = 8


@dataclass
class _Registry:
    """The live mappings of this process; the one piece of process-wide state here."""

    lock: threading.Lock
    maps: weakref.WeakSet[mmap.mmap]


_registry = _Registry(threading.Lock(), weakref.WeakSet())


class Mapping:
    """One shared mapping of a file from its start. Counted from construction to unmapping.

    `view` covers the whole mapping; it is read-only when `writable` is false. The descriptor stays
    the caller's (the mapping holds its own duplicate).
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=prot)
        self._map: mmap.mmap | None = memory
        self.nbytes = nbytes
        self.view = memoryview(memory)
        with _registry.lock:
            _registry.maps.add(memory)

    def address(self) -> int:
        """Virtual address of the first byte, valid until `close`."""
        if not self.view.readonly:
            return ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        return _address_of_readonly(self.view)

    def prefer_huge_pages(self) -> None:
        """Ask for huge pages; heeded where the host's shmem_enabled says `advise`."""
        assert self._map is not None
        with contextlib.suppress(OSError):  # a kernel without them
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def close(self) -> None:
        """Unmap now, or with the last array that still uses the memory. Idempotent."""
        memory, view = self._map, self.view
        self._map, self.view = None, memoryview(b"")
        if memory is None:
            return
        try:
            view.release()
            memory.close()
        except BufferError:
            _log.debug("a closed mapping of %d bytes is still in use", self.nbytes)


class _PyBuffer(ctypes.Structure):
    """Py_buffer of the stable C API (Include/cpython/object.h); only `buf` is read."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _address_of_readonly(view: memoryview) -> int:
    """ctypes refuses read-only buffers, the buffer protocol itself does not."""
    buffer = _PyBuffer()
    api = ctypes.pythonapi
    if api.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0) != 0:
        raise BufferError("the view has no simple buffer")
    address = buffer.buf or 0
    api.PyBuffer_Release(ctypes.byref(buffer))
    return address


def open_mappings() -> tuple[int, int]:
    """Number and bytes of the shared mappings of this process."""
    with _registry.lock:
        sizes = [len(each) for each in _registry.maps if not each.closed]
    return len(sizes), sum(sizes)


def round_up(nbytes: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `nbytes`."""
    return -(-nbytes // unit) * unit


def make_memfd(name: str, nbytes: int) -> int:
    """A sealable memory file of `nbytes`, not yet sealed. The caller owns the descriptor."""
    fd = os.memfd_create(MEMFD_PREFIX + name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def add_seals(fd: int, seals: int) -> None:
    """Add seals; raises PermissionError when the file's seals are sealed."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)


def seals_of(fd: int) -> int:
    """The seals of a memory file; 0 for a file that cannot be sealed."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0


def reopen(fd: int, flags: int) -> int:
    """A second, independent open of the same file, for example with fewer rights."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def prefault(mapping: Mapping, fd: int) -> None:
    """Give every page of a writable mapping its memory now, so that no later touch can fail.

    Raises MemoryError when the host or the container has not that much available, OSError when the
    file system is full. Large mappings are split over threads; the system call runs without the
    interpreter lock.
    """
    _require_available(mapping.nbytes)
    mapping.prefer_huge_pages()
    starts = range(0, mapping.nbytes, _PREFAULT_SLICE)
    address = mapping.address()
    workers = min(len(starts), _PREFAULT_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        slices = [(address + s, min(_PREFAULT_SLICE, mapping.nbytes - s)) for s in starts]
        done = list(pool.map(lambda part: _populate(*part), slices))
    if not all(done):
        _touch(mapping, fd)


def _populate(address: int, nbytes: int) -> bool:
    """False when this kernel has no such advice."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if libc.madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (22, 38):  # EINVAL, ENOSYS
        return False
    raise OSError(error, f"cannot get memory for {nbytes} bytes: {os.strerror(error)}")


def _touch(mapping: Mapping, fd: int) -> None:
    os.posix_fallocate(fd, 0, mapping.nbytes)  # fails with ENOSPC where a touch would be SIGBUS
    for start in range(0, mapping.nbytes, PAGE_BYTES):
        mapping.view[start] = mapping.view[start]


def _require_available(nbytes: int) -> None:
    available = min(_available_on_host(), _limit_of_container())
    if nbytes > available:
        raise MemoryError(
            f"{nbytes} bytes of shared memory are needed, the host or container has {available} "
            "bytes available"
        )


def _available_on_host() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no line MemAvailable")


def _limit_of_container() -> int:
    """The memory limit of our control group (version 2); the host's size when there is none."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    return sys.maxsize if limit == "max" else int(limit)


def live_memfds(name: str = "") -> dict[int, int]:
    """Memory files of Warhorse that some process still holds: inode -> bytes.

    Looks at every process whose /proc entry this user may read, at open descriptors and at
    mappings. `name` narrows the search to files made with names that start with it. For leak
    tests and diagnosis.
    """
    found: dict[int, int] = {}
    wanted = f"/memfd:{MEMFD_PREFIX}{name}"
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            for inode, nbytes in (*_open_memfds(process, wanted), *_mapped_memfds(process, wanted)):
                found[inode] = max(nbytes, found.get(inode, 0))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def _open_memfds(process: Path, wanted: str) -> Iterator[tuple[int, int]]:
    for entry in (process / "fd").iterdir():
        try:
            if os.readlink(entry).startswith(wanted):
                status = entry.stat()
                yield status.st_ino, status.st_size
        except FileNotFoundError:  # closed meanwhile
            continue


def _mapped_memfds(process: Path, wanted: str) -> Iterator[tuple[int, int]]:
    for line in (process / "maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(wanted):
            start, stop = (int(part, 16) for part in fields[0].split("-"))
            yield int(fields[4]), int(fields[2], 16) + stop - start


def require_regular(fd: int, nbytes: int) -> None:
    """Raise ValueError unless `fd` is a plain memory or tmpfs file of exactly `nbytes`."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("the descriptor is not a memory file")
    if status.st_size != nbytes:
        raise ValueError(f"the memory file has {status.st_size} bytes, expected {nbytes}")
