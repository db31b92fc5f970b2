"""A Docker engine, a base image and a wheel server for the container test.

The engine of the machine is used where one answers; else, as root, one is started from Debian's
dockerd with a socket and data of its own. Nothing is pulled where mmdebstrap can make the base.
"""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.supervisor.state import ROOT

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warhorse"
PACKAGES = "python3,python3-venv,ca-certificates"


@pytest.fixture(scope="session")
def docker_host() -> Iterator[str]:
    """DOCKER_HOST of an engine that answers; skips where none can be started."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if _answers(host):
        yield host
        return
    if os.getuid() != 0 or not shutil.which("dockerd"):
        pytest.skip("no Docker engine answers and none can be started")
    # Not pytest's own folder, which is kept for a while: the images are large.
    with (
        tempfile.TemporaryDirectory(prefix="wh-", ignore_cleanup_errors=True) as folder,
        _started(Path(folder)) as host,
    ):
        yield host


class _started:  # noqa: N801
    """dockerd with its own socket and data; ended by its process id."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = f"unix://{folder}/d.sock"

    def __enter__(self) -> str:
        folder = self.folder
        limits = [f"--default-ulimit={name}={_hard(flag)}"
                  for name, flag in (("nofile", "-Hn"), ("nproc", "-Hu"))]  # fmt: skip
        command = [
            "dockerd", f"--host={self.host}", f"--data-root={folder}/data",
            f"--exec-root={folder}/exec", f"--pidfile={folder}/d.pid", "--iptables=false",
            "--ip6tables=false", "--bridge=none", *limits,
        ]  # fmt: skip
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while not _answers(self.host):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                pytest.skip(f"dockerd does not start: {(folder / 'log').read_text()[-300:]}")
            time.sleep(0.2)
        return self.host

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(60)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        left = [mount for mount in mounts if mount.startswith(f"{self.folder}/")]
        if left:
            subprocess.run(["umount", "--lazy", *left], check=False)
        for line in Path("/proc/mounts").read_text().splitlines():
            point = line.split()[1]
            if point.startswith(f"{self.folder}/"):  # dockerd leaves its network namespaces
                subprocess.run(["umount", point], check=True)


def _hard(flag: str) -> str:
    value = subprocess.check_output(["bash", "-c", f"ulimit {flag}"], text=True).strip()
    return f"{value}:{value}"


def _answers(host: str) -> bool:
    docker = shutil.which("docker")
    if docker is None:
        return False
    command = [docker, "--host", host, "version"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="session")
def base_image(docker_host: str) -> str:
    """A Debian with Python: made here where mmdebstrap is, else the Dockerfile's default."""
    if not shutil.which("mmdebstrap"):
        return "python:3.11-slim-bookworm"
    CACHE.mkdir(parents=True, exist_ok=True)
    archive = CACHE / "bookworm-python.tar"
    if not archive.exists():
        part = archive.with_suffix(f".{os.getpid()}.tar")
        command = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm"]
        subprocess.run([*command, str(part)], check=True, capture_output=True)
        part.rename(archive)
    command = ["docker", "--host", docker_host, "import", str(archive), "warhorse-base:test"]
    subprocess.run(command, check=True, capture_output=True)
    return "warhorse-base:test"


@pytest.fixture(scope="session")
def wheel_server() -> Iterator[str]:
    """URL of a folder with every wheel of the locks, so that the build needs no registry."""
    wheels = CACHE / f"wheels-{sys.version_info.major}.{sys.version_info.minor}"
    locks = [ROOT / "requirements.lock", ROOT / "requirements-torch.lock"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    subprocess.run([*pip, *(word for lock in locks for word in ("-r", str(lock)))], check=True)
    handler = functools.partial(_QuietHandler, directory=str(wheels))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


class _QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """No line per file."""
