"""Reading a compose file: interpolation, refusals, and the file of this repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.common.supervisor.compose_file import (
    ComposeError,
    load_services,
    variable_names,
)

COMPOSE_FILE = Path(__file__).parents[2] / "compose" / "compose.yaml"

SERVICE = """
services:
  one:
    command: ["python", "-m", "x", "--size", "${{SIZE:-4}}", "{command}"]
    restart: {restart}
    volumes: ["run:/run/x", "${{MODEL:?folder}}:/model:ro"]
    depends_on: {{{depends}}}
    healthcheck: {{test: ["CMD", "true"], interval: {interval}, start_period: 1h30m}}
"""


def write(folder: Path, **values: str) -> Path:
    defaults = {"command": "a", "restart": "always", "depends": "", "interval": "10s"}
    file = folder / "compose.yaml"
    file.write_text(SERVICE.format(**{**defaults, **values}))
    return file


def test_defaults_and_given_values_fill_variables(tmp_path: Path) -> None:
    file = write(tmp_path, command="${NAME:+named} ${NAME:-none} $$HOME")
    unset = load_services(file, {"MODEL": "/m"})["one"]
    given = load_services(file, {"MODEL": "/m", "SIZE": "8", "NAME": "n"})["one"]
    assert unset.command[4:] == ("4", " none $HOME")
    assert given.command[4:] == ("8", "named n $HOME")


def test_durations_and_mounts_are_read(tmp_path: Path) -> None:
    service = load_services(write(tmp_path, interval="1m0.5s"), {"MODEL": "/m"})["one"]
    assert service.health.interval == 60.5
    assert service.health.start_period == 5400
    assert service.mounts == {"/run/x": "run", "/model": "/m"}


@pytest.mark.parametrize(
    ("values", "variables", "words"),
    [
        ({}, {}, "MODEL is not set: folder"),
        ({"restart": "sometimes"}, {"MODEL": "/m"}, "services.one.restart: 'sometimes'"),
        ({"interval": "soon"}, {"MODEL": "/m"}, "'soon' is not a duration"),
        (
            {"depends": "two: {condition: service_healthy}"},
            {"MODEL": "/m"},
            "depends_on: no service 'two'",
        ),
        (
            {"depends": "one: {condition: service_happy}"},
            {"MODEL": "/m"},
            "services.one.depends_on.one: 'service_happy'",
        ),
    ],
)
def test_a_wrong_file_names_the_place(
    tmp_path: Path, values: dict[str, str], variables: dict[str, str], words: str
) -> None:
    with pytest.raises(ComposeError) as caught:
        load_services(write(tmp_path, **values), variables)
    assert words in str(caught.value)


def test_the_file_of_this_repository_has_the_five_services() -> None:
    services = load_services(COMPOSE_FILE, {"WARHORSE_MODEL": "/models/a"})
    assert set(services) == {"gateway", "tokenizer", "engine", "kvcache", "offload"}
    assert services["engine"].depends_on["offload"] == "service_healthy"
    assert services["engine"].mounts["/model"] == "/models/a"
    assert {"WARHORSE_MODEL", "WARHORSE_PORT", "WARHORSE_SCRIPT"} <= variable_names(COMPOSE_FILE)


@pytest.mark.parametrize("folder", ["/m", "/a:b", "/a:/b", "/with space/ümlaut"])
def test_a_folder_of_any_name_is_mounted(tmp_path: Path, folder: str) -> None:
    service = load_services(write(tmp_path), {"MODEL": folder})["one"]
    assert service.mounts["/model"] == folder


def test_a_volume_without_a_target_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path)
    file.write_text(file.read_text().replace("run:/run/x", "run"))
    with pytest.raises(ComposeError, match="'run' is not a volume"):
        load_services(file, {"MODEL": "/m"})
