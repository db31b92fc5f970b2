"""`--scale` with `--docker`: the compose document it makes, as the compose program resolves it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.common.cli.up import COMPOSE_FILE, compose_command
from services.common.supervisor.compose_file import load_services
from services.common.supervisor.scale import compose_override
from services.common.supervisor.state import ROOT

VARIABLES = {**os.environ, "WARHORSE_MODEL": "/models/a", "WARHORSE_METRICS_PORT": "9500"}
ENGINES = ["engine", "engine-1", "engine-2"]
Services = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Services:
    """Three engines and two tokenizers."""
    counts = {"engine": 3, "tokenizer": 2}
    document = compose_override(load_services(COMPOSE_FILE, VARIABLES), counts, COMPOSE_FILE)
    file: Path = tmp_path_factory.mktemp("scaled") / "scale.json"
    file.write_text(json.dumps(document))
    command = [*compose_command(), "--file", str(COMPOSE_FILE), "--file", str(file)]
    command += ["config", "--format", "json"]
    output = subprocess.run(command, env=VARIABLES, capture_output=True, check=True).stdout
    found: Services = json.loads(output)["services"]
    return found


def test_each_instance_is_a_service(services: Services) -> None:
    others = {"gateway", "offload", "kvcache", "tokenizer", "tokenizer-1"}
    assert set(services) == others | set(ENGINES)


@pytest.mark.parametrize("name", ENGINES)
def test_instance_has_its_own_name_and_socket(services: Services, name: str) -> None:
    instance = "engine-0" if name == "engine" else name
    service = services[name]
    assert service["environment"].get("WARHORSE_INSTANCE", "engine-0") == instance
    assert f"/run/warhorse/engine/{instance}.sock" in service["healthcheck"]["test"]
    assert "WARHORSE_SCRIPT" in service["environment"], "the rest is inherited"


@pytest.mark.parametrize("name", ENGINES[1:])
def test_further_instances_differ_in_nothing_else(services: Services, name: str) -> None:
    def rest(service: dict[str, Any]) -> dict[str, Any]:
        own = {"environment", "healthcheck", "networks"}
        return {key: value for key, value in service.items() if key not in own}

    assert rest(services[name]) == rest(services["engine"])
    # One DNS name for all: Prometheus finds the instances under it.
    assert services[name]["networks"] == {"default": {"aliases": ["engine"]}}


def test_gateway_is_told_all_addresses_and_starts_after_all(services: Services) -> None:
    gateway = services["gateway"]
    sockets = [f"unix:/run/warhorse/engine/engine-{i}.sock" for i in range(3)]
    assert gateway["environment"]["WARHORSE_ENGINE_ADDRESS"].split(",") == sockets
    sockets = [f"unix:/run/warhorse/tokenizer/tokenizer-{i}.sock" for i in range(2)]
    assert gateway["environment"]["WARHORSE_TOKENIZER_ADDRESS"].split(",") == sockets
    assert set(gateway["depends_on"]) == {"tokenizer", "tokenizer-1", *ENGINES}


def test_one_instance_needs_no_addresses() -> None:
    found = load_services(COMPOSE_FILE, VARIABLES)
    assert compose_override(found, {"engine": 1}, COMPOSE_FILE) == {
        "services": {"gateway": {"environment": {}, "depends_on": {}}}
    }


RECORDER = """
import json, os, sys
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps(sys.argv[1:]) + "\\n")
"""


def test_up_gives_compose_both_files(tmp_path: Path) -> None:
    program = tmp_path / "docker"
    program.write_text(f"#!{sys.executable}\n{RECORDER}")
    program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "RECORD": str(tmp_path / "record"),
        "WARHORSE_HOME": str(tmp_path),
    }
    command = [sys.executable, "-m", "services.common.cli", "up", "--docker", "--scale", "engine=2"]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True)
    calls = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    (up,) = [call for call in calls if "up" in call]
    files = [Path(up[i + 1]) for i, word in enumerate(up) if word == "--file"]
    assert files[0] == COMPOSE_FILE
    assert set(json.loads(files[1].read_text())["services"]) == {"engine-1", "gateway"}
