"""Pinned registration: with a device, without one, without torch, and the order of undoing."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from services.common import pinned
from services.common.broker import RegionBroker
from services.common.shm import PinnedRegistration, Region, open_region

READ_ONLY = 0x08


class FakeRuntime:
    """Records calls; the memory must be mapped at each of them."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[tuple[str, int, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append(("register", nbytes, flags))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append(("unregister", ctypes.c_ubyte.from_address(address).value, 0))
        return 0


def use(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime | None) -> None:
    monkeypatch.setattr(pinned, "_cuda_runtime", lambda: runtime)


def test_closing_the_region_unregisters_while_it_is_still_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = FakeRuntime()
    use(monkeypatch, runtime)
    region = Region.create(5000, owner="a")
    region.view[0] = 42
    registration = PinnedRegistration(region)
    assert registration.pinned
    region.close()
    registration.close()
    assert not registration.pinned
    assert runtime.calls == [("register", 5000, 0), ("unregister", 42, 0)]


def test_a_read_only_mapping_is_registered_as_such(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path
) -> None:
    runtime = FakeRuntime()
    use(monkeypatch, runtime)
    broker = RegionBroker(run_dir / "offload" / "offload-0.fd", "a")
    with Region.create(10, owner="a", read_only_after=True) as region:
        region.seal_read_only()
        with open_region(broker.publish(region), run_dir) as mapped:
            PinnedRegistration(mapped)
    broker.close()
    assert [call[0] for call in runtime.calls] == ["register", "unregister"]
    assert runtime.calls[0][2] == READ_ONLY


def test_a_refused_registration_warns_once_and_goes_on_pageable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = FakeRuntime(code=2)
    use(monkeypatch, runtime)
    with caplog.at_level(logging.WARNING), Region.create(10, owner="a") as region:
        registration = PinnedRegistration(region)
    assert not registration.pinned
    assert "error 2" in registration.reason
    assert len(caplog.records) == 1
    assert [call[0] for call in runtime.calls] == ["register"]


def test_without_torch_memory_stays_pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with Region.create(10, owner="a") as region, PinnedRegistration(region) as registration:
        assert not registration.pinned
        assert "no CUDA device" in registration.reason


def test_importing_the_shared_memory_modules_does_not_import_torch() -> None:
    code = (
        "import sys, services.common.shm, services.common.broker, services.common.ring,"
        " services.common.grpc_server; sys.exit('torch' in sys.modules)"
    )
    path = ":".join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=False)
    assert done.returncode == 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("read_only", [False, True], ids=["shared", "table"])
def test_a_region_of_another_mapping_is_pinned_and_copied_by_the_device(
    run_dir: Path, read_only: bool
) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    broker = RegionBroker(run_dir / "offload" / "offload-0.fd", "a")
    nbytes = 64 << 20
    with Region.create(nbytes, owner="a", read_only_after=read_only) as region:
        region.array("u1")[:] = 7
        if read_only:
            region.seal_read_only()
        with open_region(broker.publish(region), run_dir) as mapped:
            registration = PinnedRegistration(mapped)
            assert registration.pinned, registration.reason
            host = torch.frombuffer(mapped.view, dtype=torch.uint8)
            assert host.is_pinned()
            assert int(host.to("cuda", non_blocking=True).sum()) == 7 * nbytes
            torch.cuda.synchronize()
            del host
    broker.close()
