"""The stack in containers: built from this checkout, asked, killed, asked again."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from services.common.supervisor.state import ROOT

pytestmark = [pytest.mark.containers, pytest.mark.slow, pytest.mark.timeout(1500)]

SERVICES = {"gateway", "tokenizer", "engine", "kvcache", "offload"}


@dataclass(frozen=True)
class Containers:
    """A running stack and how to talk about it."""

    url: str
    project: str
    environment: dict[str, str]

    def warhorse(self, *arguments: str) -> str:
        command = [str(ROOT / "warhorse"), *arguments, "--project", self.project]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def docker(self, *arguments: str) -> str:
        return subprocess.check_output(["docker", *arguments], env=self.environment, text=True)

    def container(self, service: str) -> str:
        return self.docker("ps", "--quiet", "--filter", f"name={self.project}-{service}-").strip()

    def address(self) -> str:
        """The gateway's address on the project's network (published ports need iptables)."""
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return self.docker("inspect", "--format", form, self.container("gateway")).strip()


@pytest.fixture(scope="module")
def containers(docker_host: str, base_image: str, wheel_server: str) -> Iterator[Containers]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "DOCKER_HOST": docker_host,
        "DOCKER_BUILDKIT": "0",
        "WARHORSE_BASE_IMAGE": base_image,
        "WARHORSE_BUILD_NETWORK": "host",
        "WARHORSE_PIP_ARGS": f"--no-index --find-links {wheel_server}",
        "WARHORSE_HUMMING_TARGETS": "none",  # no compiler comes from the wheel server
        "WARHORSE_TRITON_TARGETS": "none",
    }
    stack = Containers(f"http://127.0.0.1:{port}", "warhorsetest", environment)
    try:
        stack.warhorse("up", "--docker", "--port", str(port))
        yield stack
    finally:
        stack.warhorse("down", "--docker")


def ask(stack: Containers) -> str:
    body = {
        "messages": [{"role": "user", "content": "What is 23 + 58?"}],
        "temperature": 0,
        "max_tokens": 200,
    }
    response = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def states(stack: Containers) -> dict[str, dict[str, Any]]:
    lines = stack.warhorse("status", "--docker", "--json").splitlines()
    return {entry["Service"]: entry for entry in map(json.loads, lines)}


def test_all_five_containers_are_healthy_and_answer(containers: Containers) -> None:
    found = states(containers)
    assert set(found) == SERVICES
    assert {entry["Health"] for entry in found.values()} == {"healthy"}
    assert "81" in ask(containers)


def test_containers_run_without_root_and_share_no_ipc(containers: Containers) -> None:
    for service in SERVICES:
        name = containers.container(service)
        form = "{{.Config.User}} {{.HostConfig.IpcMode}} {{.HostConfig.ReadonlyRootfs}}"
        assert containers.docker("inspect", "--format", form, name).split() == [
            "10001:10001", "private", "true",
        ]  # fmt: skip


def test_gateway_and_tokenizer_images_hold_no_torch(containers: Containers) -> None:
    find = ["python", "-c", "import importlib.util as u; print(u.find_spec('torch'))"]
    for service in ("gateway", "tokenizer"):
        assert containers.docker("exec", containers.container(service), *find).strip() == "None"


def test_a_killed_engine_container_comes_back_and_answers(containers: Containers) -> None:
    name = containers.container("engine")
    before = containers.docker("inspect", "--format", "{{.State.StartedAt}}", name)
    # From outside, as a crash would: `docker kill` counts as a wish to stop.
    os.kill(int(containers.docker("inspect", "--format", "{{.State.Pid}}", name)), 9)

    def came_back() -> bool:
        started = containers.docker("inspect", "--format", "{{.State.StartedAt}}", name)
        health = states(containers).get("engine", {}).get("Health")
        return started != before and health == "healthy"

    deadline = time.monotonic() + 90
    while not came_back():
        assert time.monotonic() < deadline, "the engine is not healthy again within 90 s"
        time.sleep(1)
    assert "81" in ask(containers)
