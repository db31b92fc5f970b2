"""Rules that the compose file keeps, checked on the file as the compose program resolves it."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from services.common.cli.up import COMPOSE_FILE, compose_command

Services = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def services() -> Services:
    command = [*compose_command(), "--file", str(COMPOSE_FILE), "config", "--format", "json"]
    environment = {**os.environ, "WARHORSE_MODEL": "/models/a"}
    output = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    found: Services = json.loads(output)["services"]
    return found


def test_every_service_has_a_health_check_and_restarts(services: Services) -> None:
    for name, service in services.items():
        assert service["healthcheck"]["test"][0] == "CMD", name
        assert service["restart"] == "unless-stopped", name


def test_no_service_has_more_rights_than_it_needs(services: Services) -> None:
    for name, service in services.items():
        assert service["user"] == "10001:10001", name
        assert service["read_only"] is True, name
        assert "privileged" not in service, name
        assert "ipc" not in service, name
        assert "container_name" not in service, name


def test_the_gateway_drains_within_the_time_that_a_stop_gives_it(services: Services) -> None:
    gateway = services["gateway"]
    assert gateway["stop_grace_period"] == "15s"
    assert float(gateway["environment"]["WARHORSE_SHUTDOWN_TIMEOUT"]) <= 10


def test_only_the_gateway_publishes_a_port(services: Services) -> None:
    assert [name for name, service in services.items() if service.get("ports")] == ["gateway"]


def test_all_services_share_the_run_volume_and_none_writes_the_checkpoint(
    services: Services,
) -> None:
    for name, service in services.items():
        targets = {volume["target"]: volume for volume in service["volumes"]}
        assert targets["/run/warhorse"]["source"] == "run", name
        if "/model" in targets:
            assert targets["/model"]["read_only"] is True, name


def test_each_service_is_built_from_its_own_target(services: Services) -> None:
    for name, service in services.items():
        assert service["build"]["target"] == name
        assert "BASE_IMAGE" in service["build"]["args"]


@pytest.mark.parametrize(
    ("asked", "targets"), [((), "80,86,89"), (("86",), "86"), (("none",), "none")]
)
def test_the_engines_image_has_kernels_for_the_cards_that_are_asked_for(
    asked: tuple[str, ...], targets: str
) -> None:
    environment = dict(os.environ, WARHORSE_MODEL="/models/a")
    for name in ("HUMMING_TARGETS", "TRITON_TARGETS"):
        environment |= {f"WARHORSE_{name}": value for value in asked}
    command = [*compose_command(), "--file", str(COMPOSE_FILE), "config", "--format", "json"]
    output = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    found = json.loads(output)["services"]
    arguments = found["engine"]["build"]["args"]
    assert (arguments["HUMMING_TARGETS"], arguments["TRITON_TARGETS"]) == (targets, targets)
    assert arguments["BASE_IMAGE"] == found["gateway"]["build"]["args"]["BASE_IMAGE"]
    assert "HUMMING_TARGETS" not in found["gateway"]["build"]["args"]
