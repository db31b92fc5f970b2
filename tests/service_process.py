"""A real service process on a short-lived run directory, for tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.grpc_client import socket_target

ROOT = Path(__file__).resolve().parent.parent


def child_environment() -> dict[str, str]:
    """Environment of a process that imports the repository's packages, one thread each."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("WARHORSE_")}
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    return inherited | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


class RunDir:
    """A run directory whose sockets have short paths; removed by `close`."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="wh-"))

    def close(self) -> None:
        """Remove the directory and everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)


class ServiceProcess:
    """`python -m services.<service>`; start it as often as wanted, one life at a time."""

    def __init__(
        self,
        service: str,
        full_name: str,
        run_dir: Path,
        flags: Sequence[str],
        instance: str | None = None,
    ) -> None:
        self.service = service
        self.instance = instance or f"{service}-0"
        self.full_name = full_name
        self.run_dir = run_dir
        self.flags = list(flags)
        self.process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in stop)

    @property
    def address(self) -> str:
        """gRPC target."""
        return socket_target(self.run_dir, self.service, self.instance)

    def start(self, seconds: float = 60.0) -> None:
        """Start a life and wait until it serves."""
        command = [sys.executable, "-m", f"services.{self.service}"]
        command += ["--run-dir", str(self.run_dir), "--instance", self.instance, *self.flags]
        self.process = subprocess.Popen(
            command, env=child_environment(), stderr=self._log, cwd=ROOT, text=True
        )
        deadline = time.monotonic() + seconds
        while not self._serving():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self.service} did not start:\n{self.log()}")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        status = self._end(signal.SIGTERM)
        self._log.close()
        return status

    def log(self) -> str:
        """Everything that it has logged."""
        self._log.flush()
        self._log.seek(0)
        return self._log.read()

    @property
    def pid(self) -> int:
        """Process id of the present life."""
        assert self.process is not None
        return self.process.pid

    def _end(self, number: signal.Signals) -> int:
        if self.process is None:
            return 0
        self.process.send_signal(number)
        status = self.process.wait(20)
        self.process = None
        return status

    def _serving(self) -> bool:
        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(
                    health_pb2.HealthCheckRequest(service=self.full_name), timeout=1.0
                )
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def eventually(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait until `condition()` is true; AssertionError with its last value after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still {value!r} after {seconds} s"
        time.sleep(0.02)
