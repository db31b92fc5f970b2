"""kill -9 of an owner or a user leaves no region and no byte behind; counted from /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from warhorse.v1 import tensor_pb2

from services.common.errors import ServiceError
from services.common.memory import live_memfds
from services.common.ring import Ring
from services.common.shm import open_region
from tests.common.children import Child, Spawn, line_from, tell

NBYTES = 32 << 20
FILE_BYTES = NBYTES + 4096


@pytest.fixture
def name() -> str:
    """A name of regions that only this test makes."""
    return f"leak-{os.getpid()}-{time.monotonic_ns()}"


def counted(name: str) -> tuple[int, int]:
    """Regions of the owner `name` that exist anywhere on this host, and their bytes."""
    found = live_memfds(f"region:{name}")
    return len(found), sum(found.values())


def kill(child: Child) -> None:
    child.kill()
    child.wait(10)


def owner_and_user(spawn: Spawn, run_dir: Path, name: str, kind: str) -> tuple[Child, Child, str]:
    owner = spawn("tests.common.region_child", "owner", run_dir, name, NBYTES, kind)
    ref = line_from(owner)
    user = spawn("tests.common.region_child", "user", run_dir)
    tell(user, ref)
    assert int(line_from(user)) == 0x5A * NBYTES
    assert counted(name) == (1, FILE_BYTES)
    return owner, user, ref


@pytest.mark.parametrize("kind", ["shared", "table"])
def test_a_killed_owner_leaves_the_user_its_memory_and_nothing_after_it(
    spawn: Spawn, run_dir: Path, name: str, kind: str
) -> None:
    owner, user, ref = owner_and_user(spawn, run_dir, name, kind)
    kill(owner)
    assert counted(name) == (1, FILE_BYTES)
    tell(user, "read again")
    assert int(line_from(user)) == 0x5A * NBYTES
    with pytest.raises(ServiceError) as refused:
        open_region(tensor_pb2.Region.FromString(bytes.fromhex(ref)), run_dir)
    assert refused.value.reason_name == "ENGINE_LOST"
    kill(user)
    assert counted(name) == (0, 0)


@pytest.mark.parametrize("kind", ["shared", "table"])
def test_a_killed_user_leaves_the_owner_its_region_and_nothing_after_it(
    spawn: Spawn, run_dir: Path, name: str, kind: str
) -> None:
    owner, user, ref = owner_and_user(spawn, run_dir, name, kind)
    kill(user)
    assert counted(name) == (1, FILE_BYTES)
    open_region(tensor_pb2.Region.FromString(bytes.fromhex(ref)), run_dir).close()
    kill(owner)
    assert counted(name) == (0, 0)


def test_a_new_owner_takes_over_the_socket_of_a_killed_one(
    spawn: Spawn, run_dir: Path, name: str
) -> None:
    first = spawn("tests.common.region_child", "owner", run_dir, name, 4096, "shared")
    stale = tensor_pb2.Region.FromString(bytes.fromhex(line_from(first)))
    kill(first)
    second = spawn("tests.common.region_child", "owner", run_dir, name, 4096, "shared")
    fresh = tensor_pb2.Region.FromString(bytes.fromhex(line_from(second)))
    with pytest.raises(ServiceError) as refused:
        open_region(stale, run_dir)
    assert refused.value.reason_name == "STALE_GENERATION"
    open_region(fresh, run_dir).close()


def test_rings_of_killed_processes_are_freed(spawn: Spawn) -> None:
    ring = Ring.create(8, 64)
    inode = os.fstat(ring.fds()[0]).st_ino
    text = ",".join(map(str, ring.fds()))
    child = spawn("tests.common.ring_child", "source", text, 3, fds=ring.fds())
    assert line_from(child) == "ready"
    ring.close()
    assert inode in live_memfds("ring")
    kill(child)
    assert inode not in live_memfds("ring")
