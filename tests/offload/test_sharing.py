"""Several processes, one table in memory: readers that touch every row, and real engines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
import torch
from warhorse.v1.engine_pb2 import DescribeEngineRequest
from warhorse.v1.engine_pb2_grpc import EngineServiceStub

from tests.models.tiny import save_tiny
from tests.offload.checkpoint import make_checkpoint
from tests.offload.conftest import make_service
from tests.offload.engram import make_engram
from tests.offload.reader import mapping_memory
from tests.service_process import ROOT, RunDir, ServiceProcess, child_environment

READERS = 2


@dataclass(frozen=True)
class Shared:
    """25 MB of tables, what the readers' mappings are called, and the readers themselves."""

    tables: torch.Tensor  # all bytes of all rows
    part_of_path: str
    readers: list[subprocess.Popen[str]]


def start_reader(service: ServiceProcess, folder: Path, part: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.offload.reader"]
    command += [service.address, str(service.run_dir), str(folder), part]
    return subprocess.Popen(
        command,
        env=child_environment(),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(params=["ple in memory", "engram in its files"])
def shared(run_dir: RunDir, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Shared]:
    if request.param == "ple in memory":
        tables = make_checkpoint(tmp_path, base=200_000, parts=8)
        storage, part = "memory", "qwen4_exp.layers.1.ple"
    else:
        served = make_engram(tmp_path, base=20_000)
        tables = torch.cat(list(served.values()))
        storage, part = "file", str(tmp_path)
    service = make_service(run_dir, tmp_path, "--table-storage", storage)
    service.start()
    readers = [start_reader(service, tmp_path, part) for _ in range(READERS)]
    yield Shared(tables, part, readers)
    for reader in readers:
        reader.communicate(timeout=20)  # its stdin ends
        assert reader.returncode == 0
    assert service.stop() == 0


def answer(reader: subprocess.Popen[str]) -> list[str]:
    assert reader.stdout is not None
    return reader.stdout.readline().split()


def test_two_engines_and_the_service_hold_one_copy_of_the_tables(shared: Shared) -> None:
    for reader in shared.readers:  # every row is read by each of them
        assert answer(reader) == ["attached", str(int(shared.tables.long().sum()))]
    kib = shared.tables.numel() / 1024
    total = 0
    for reader in shared.readers:
        assert reader.stdin is not None
        reader.stdin.write("now\n")
        reader.stdin.flush()
        rss, pss = map(int, answer(reader))
        assert rss == pytest.approx(kib, rel=0.02)  # all of it is mapped in here,
        assert pss <= 0.55 * kib  # and shared
        total += pss
    total += sum(mapping_memory(str(pid), shared.part_of_path)[1] for pid in owners(shared))
    assert total <= 1.05 * kib


@pytest.fixture
def engines(run_dir: RunDir, tmp_path: Path) -> Iterator[list[ServiceProcess]]:
    """Two engine services of one checkpoint, beside the offload service that has its table."""
    folder = save_tiny(tmp_path, "qwen4_exp", "fp8").folder
    service = make_service(run_dir, folder)
    service.start()
    flags = ["--model", str(folder), "--kvcache-address", "none", "--threads", "1"]
    started = [
        ServiceProcess("engine", "warhorse.v1.EngineService", run_dir.path, flags, f"engine-{i}")
        for i in range(2)
    ]
    for engine in started:
        engine.start()
    yield started
    for engine in started:
        assert engine.stop() == 0, engine.instance
    assert service.stop() == 0


def test_two_engine_processes_map_the_one_table_and_keep_none_of_their_own(
    engines: list[ServiceProcess],
) -> None:
    resident = []
    for engine in engines:
        with grpc.insecure_channel(engine.address) as channel:
            info = EngineServiceStub(channel).DescribeEngine(DescribeEngineRequest(), timeout=10)
        assert info.offload_connected
        (core,) = psutil.Process(engine.pid).children()
        rss, pss = mapping_memory(str(core.pid), "qwen4_exp.layers.1.ple")
        resident.append((rss, pss))
        assert rss > 0  # the first step has read rows
        assert info.region_bytes >= 1024 * rss
        assert anonymous_kib(core.pid, ".table") == 0  # no page of it was copied
    assert all(pss <= 0.51 * rss for rss, pss in resident)


def anonymous_kib(pid: int, part_of_path: str) -> int:
    """KiB of private copies within the mappings of a file."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = part_of_path in line
        elif inside and line.startswith(("Private_Dirty:", "Anonymous:")):
            total += int(line.split()[1])
    return total


def owners(shared: Shared) -> list[int]:
    """Process ids that map the same files, other than the readers."""
    inodes = {
        line.split()[4]
        for reader in shared.readers
        for line in Path(f"/proc/{reader.pid}/maps").read_text().splitlines()
        if shared.part_of_path in line
    }
    assert inodes
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) in {r.pid for r in shared.readers}:
            continue
        try:
            lines = (process / "maps").read_text().splitlines()
        except OSError:
            continue
        if any(line.split()[4] in inodes and shared.part_of_path in line for line in lines):
            found.append(int(process.name))
    assert found  # the service at least
    return found
