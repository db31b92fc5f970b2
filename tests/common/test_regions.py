"""Regions: making, sealing, checking, sharing through the broker, file regions, clean-up."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from warhorse.v1 import tensor_pb2

from services.common.broker import RegionBroker
from services.common.errors import ServiceError, StartupError
from services.common.memory import SEAL_FUTURE_WRITE, Mapping, make_memfd, seals_of
from services.common.shm import (
    Region,
    RegionMismatch,
    open_region,
    region_counts,
)

SIZES = [1, 63, 4096, 5000, 1 << 20]


@pytest.fixture
def broker(run_dir: Path) -> Iterator[RegionBroker]:
    made = RegionBroker(run_dir / "kvcache" / "kvcache-0.fd", "kvcache-0")
    yield made
    made.close()


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wh-", dir="/dev/shm") as folder:
        yield Path(folder)


def reason_of(ref: tensor_pb2.Region, run_dir: Path) -> str:
    with pytest.raises(ServiceError) as refused:
        open_region(ref, run_dir)
    assert ref.region_id not in refused.value.message or not ref.region_id
    assert str(run_dir) not in refused.value.message
    return refused.value.reason_name


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_one_side_writes_the_other_reads(
    broker: RegionBroker, run_dir: Path, nbytes: int
) -> None:
    with Region.create(nbytes, owner="kvcache-0") as region:
        assert (len(region.view), bytes(region.view)) == (nbytes, bytes(nbytes))
        with open_region(broker.publish(region), run_dir) as mapped:
            assert (mapped.nbytes, mapped.generation) == (nbytes, region.generation)
            region.view[0] = 1
            mapped.view[-1] = 2 if nbytes > 1 else 1
            assert (mapped.view[0], region.view[-1]) == (1, 2 if nbytes > 1 else 1)


def test_two_regions_differ_in_id_and_generation() -> None:
    with Region.create(1, owner="a") as first, Region.create(1, owner="a") as second:
        assert first.region_id != second.region_id
        assert first.generation != second.generation


def test_nobody_can_resize_a_region_or_add_seals_to_a_shared_one() -> None:
    with Region.create(100, owner="a") as region:
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(region.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, SEAL_FUTURE_WRITE)
        with pytest.raises(PermissionError):
            region.seal_read_only()


def test_a_sealed_table_is_read_only_for_its_users_and_lives_for_its_owner(
    broker: RegionBroker, run_dir: Path
) -> None:
    with Region.create(5000, owner="offload-0", read_only_after=True) as region:
        region.array(np.uint16)[:] = 7
        with pytest.raises(ValueError, match="seal the region"):
            broker.publish(region)
        region.seal_read_only()
        ref = broker.publish(region)
        with open_region(ref, run_dir) as mapped:
            assert mapped.view.readonly
            assert not mapped.array(np.uint16).flags.writeable
            assert mapped.array(np.uint16).sum() == 7 * 2500
            region.view[0] = 9
            assert mapped.view[0] == 9
            with pytest.raises(PermissionError):
                os.pwrite(region.fd, b"x", 5000)
            with pytest.raises(PermissionError):
                mmap.mmap(region.fd, 4096)
            with pytest.raises(PermissionError):
                mmap.mmap(mapped.fd, 4096)
        ref.read_only = False
        assert reason_of(ref, run_dir) == "INVALID_FIELD"


def test_a_stale_generation_is_refused(broker: RegionBroker, run_dir: Path) -> None:
    with Region.create(10, owner="a") as region:
        ref = broker.publish(region)
        ref.generation += 1
        assert reason_of(ref, run_dir) == "STALE_GENERATION"
        ref.generation -= 1
        broker.retire(region)
        assert reason_of(ref, run_dir) == "STALE_GENERATION"


def test_references_of_an_earlier_owner_are_stale_at_its_successor(run_dir: Path) -> None:
    path = run_dir / "kvcache" / "kvcache-0.fd"
    first = RegionBroker(path, "a")
    with Region.create(10, owner="a") as region, Region.create(10, owner="a") as other:
        ref = first.publish(region)
        with pytest.raises(StartupError, match="in use by a running process"):
            RegionBroker(path, "b")
        first.close()
        assert reason_of(ref, run_dir) == "ENGINE_LOST"
        second = RegionBroker(path, "b")
        second.publish(other)
        assert reason_of(ref, run_dir) == "STALE_GENERATION"
        second.close()
        assert not path.exists()


def test_a_size_other_than_announced_is_refused(broker: RegionBroker, run_dir: Path) -> None:
    with Region.create(10, owner="a") as region:
        ref = broker.publish(region)
        ref.nbytes += 1
        assert reason_of(ref, run_dir) == "LAYOUT_MISMATCH"


@pytest.mark.parametrize("path", ["", "/etc/x.fd", "../x.fd", "kvcache/../../x.fd"])
def test_a_broker_outside_the_run_directory_is_never_asked(run_dir: Path, path: str) -> None:
    ref = tensor_pb2.Region(region_id="0" * 32, generation=1, nbytes=1, broker=path)
    assert reason_of(ref, run_dir) == "INVALID_FIELD"


def serve_once(path: Path, fd: int) -> threading.Thread:
    """A broker that answers any request with `fd`, as a memory file."""
    path.parent.mkdir()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(1)

    def answer() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(100)
            socket.send_fds(connection, [bytes(8)], [fd])

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def test_a_file_without_seals_is_not_used(run_dir: Path) -> None:
    """A header alone does not make a region: its owner could shrink it under the reader."""
    with Region.create(10, owner="a") as region:
        unsealed = make_memfd("test", 8192)
        os.pwrite(unsealed, os.pread(region.fd, 8192, 0), 0)
        thread = serve_once(run_dir / "kvcache" / "x.fd", unsealed)
        ref = tensor_pb2.Region(
            region_id=region.region_id,
            generation=region.generation,
            nbytes=10,
            broker="kvcache/x.fd",
        )
        assert reason_of(ref, run_dir) == "LAYOUT_MISMATCH"
        thread.join()
        os.close(unsealed)


@pytest.mark.parametrize("content", [b"", b"\0" * 8192, b"WHREGION" + b"\xff" * 8184])
def test_a_file_that_is_no_region_is_not_used(run_dir: Path, content: bytes) -> None:
    fd = make_memfd("test", len(content))
    os.pwrite(fd, content, 0)
    thread = serve_once(run_dir / "kvcache" / "x.fd", fd)
    ref = tensor_pb2.Region(region_id="0" * 32, generation=1, nbytes=10, broker="kvcache/x.fd")
    assert reason_of(ref, run_dir) == "LAYOUT_MISMATCH"
    thread.join()
    os.close(fd)


def test_the_broker_survives_requests_that_are_no_requests(
    broker: RegionBroker, run_dir: Path
) -> None:
    path = str(run_dir / "kvcache" / "kvcache-0.fd")
    for junk in (b"x", b"y" * 56, b"z" * 5000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(path)
            connection.settimeout(5)
            connection.send(junk)
            assert connection.recv(64)[:4] == b"\4\0\0\0"
    with Region.create(10, owner="a") as region:
        open_region(broker.publish(region), run_dir).close()


def test_many_users_at_once_all_get_the_region(broker: RegionBroker, run_dir: Path) -> None:
    with Region.create(100, owner="a") as region:
        ref = broker.publish(region)
        opened: list[int] = []

        def use() -> None:
            for _ in range(20):
                with open_region(ref, run_dir) as mapped:
                    opened.append(mapped.nbytes)

        threads = [threading.Thread(target=use) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert opened == [100] * 160


def test_no_descriptor_is_left_open(run_dir: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    broker = RegionBroker(run_dir / "kvcache" / "kvcache-0.fd", "a")
    region = Region.create(100, owner="a")
    ref = broker.publish(region)
    broker.publish(region)
    open_region(ref, run_dir).close()
    reason_of(tensor_pb2.Region(region_id="0" * 32, broker=ref.broker), run_dir)
    region.close()
    region.close()
    broker.close()
    broker.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_counts_follow_the_memory_not_the_object() -> None:
    before = region_counts()
    region = Region.create(5000, owner="a")
    assert region_counts() == (before[0] + 1, before[1] + 12288)
    array = region.array(np.uint8)
    region.close()
    assert region_counts() == (before[0] + 1, before[1] + 12288)
    array[0] = 1
    del array
    assert region_counts() == before


def test_the_address_is_that_of_the_data() -> None:
    with Region.create(100, owner="a") as region:
        region.view[0] = 77
        assert ctypes.c_ubyte.from_address(region.address()).value == 77
        readonly = Mapping(region.fd, 4096 + 100, writable=False)
        assert ctypes.c_ubyte.from_address(readonly.address() + 4096).value == 77
        readonly.close()


def test_a_region_has_all_its_memory_from_the_start() -> None:
    with Region.create(1 << 20, owner="a") as region:
        assert os.fstat(region.fd).st_blocks * 512 >= 1 << 20


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        Region.create(0, owner="a")
    with pytest.raises(MemoryError, match="the host or container has"):
        Region.create(1 << 45, owner="a")


def test_callbacks_run_once_before_unmapping() -> None:
    region = Region.create(10, owner="a")
    seen: list[int] = []
    region.before_unmap(lambda: seen.append(len(region.view)))
    region.before_unmap(lambda: seen.append(0))
    region.close()
    region.close()
    assert seen == [0, 10]


def test_a_file_region_outlives_its_owner_and_is_adopted(
    tmpfs: Path, broker: RegionBroker, run_dir: Path
) -> None:
    path = tmpfs / "table"
    first = Region.from_file(path, 5000, owner="offload-0", tag="abc")
    first.array(np.uint8)[:] = 3
    assert not path.exists()
    first.seal_read_only()
    generation = first.generation
    first.close()
    with Region.adopt(path, tag="abc") as second:
        assert second.generation == generation
        assert second.view.readonly
        with open_region(broker.publish(second), run_dir) as mapped:
            assert mapped.view.readonly
            assert mapped.array(np.uint8).sum() == 15000
        second.remove_file()
    assert list(tmpfs.iterdir()) == []


def test_an_unfinished_file_region_cannot_be_adopted_and_is_replaced(tmpfs: Path) -> None:
    path = tmpfs / "table"
    Region.from_file(path, 5000, owner="offload-0", tag="abc").close()
    with pytest.raises(FileNotFoundError):
        Region.adopt(path, tag="abc")
    with Region.from_file(path, 100, owner="offload-0", tag="abc") as region:
        region.seal_read_only()
    with Region.adopt(path) as adopted:
        assert adopted.nbytes == 100
    assert [entry.name for entry in tmpfs.iterdir()] == ["table"]


def test_a_damaged_or_different_file_is_not_adopted(tmpfs: Path) -> None:
    path = tmpfs / "table"
    with Region.from_file(path, 5000, owner="offload-0", tag="abc") as region:
        region.seal_read_only()
    with pytest.raises(RegionMismatch, match="'abc'"):
        Region.adopt(path, tag="abd")
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(ValueError, match="4096 bytes, expected 12288"):
        Region.adopt(path)


def test_a_file_region_larger_than_its_file_system_is_refused(tmpfs: Path) -> None:
    with pytest.raises(OSError, match="bytes are needed, the file system has"):
        Region.from_file(tmpfs / "table", 1 << 45, owner="offload-0")
    assert list(tmpfs.iterdir()) == []


def test_a_sealed_memory_file_keeps_exactly_its_seals() -> None:
    sizes = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    with Region.create(10, owner="a", read_only_after=True) as region:
        assert seals_of(region.fd) == sizes
        region.seal_read_only()
        assert seals_of(region.fd) == sizes | SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


CONNECT = """
import os, socket, sys
os.seteuid(int(sys.argv[2]))
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.settimeout(5)
connection.connect(sys.argv[1])
try:
    connection.send(b"x")
    print(len(connection.recv(64)))
except (BrokenPipeError, ConnectionResetError):
    print(0)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_is_hung_up_on(broker: RegionBroker, run_dir: Path) -> None:
    for folder in (run_dir, run_dir / "kvcache"):
        folder.chmod(0o755)
    path = run_dir / "kvcache" / "kvcache-0.fd"
    path.chmod(0o777)
    command = [sys.executable, "-c", CONNECT, str(path)]
    answers = [
        subprocess.run([*command, user], capture_output=True, text=True, timeout=30).stdout
        for user in ("0", "65534")
    ]
    assert answers == ["8\n", "0\n"]
