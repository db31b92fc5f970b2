"""Reads the part of a compose file that a local process needs.

The file stays the one source of truth for commands, environment, dependencies, health checks
and restart rules. Interpolation follows the Compose specification: ${NAME}, ${NAME:-default},
${NAME:?message}, ${NAME:+value}. Unknown conditions and restart rules are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CONDITIONS = ("service_started", "service_healthy")
RESTARTS = ("no", "always", "unless-stopped", "on-failure")

_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>\w+)(?:(?P<op>:[-?+])(?P<arg>[^}]*))?\})")
_MOUNT = re.compile(r"(?P<source>.+):(?P<target>/[^:]*)(?::(?:ro|rw))?", re.DOTALL)
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?")


class ComposeError(Exception):
    """The compose file or a variable it needs is wrong; the message names the place."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """When a service counts as healthy. Times in seconds."""

    command: tuple[str, ...]
    interval: float
    timeout: float
    retries: int
    start_period: float


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """One service of the file. `mounts` maps a path in the container to its source."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    depends_on: dict[str, str]
    health: HealthCheck
    restart: str
    stop_grace_seconds: float
    mounts: dict[str, str]


def load_services(path: Path, variables: Mapping[str, str]) -> dict[str, ServiceSpec]:
    """Services by name, `variables` filled in."""
    raw = _interpolate(yaml.safe_load(path.read_text()), variables)
    services = {name: _service(name, body) for name, body in raw["services"].items()}
    for service in services.values():
        for other in service.depends_on:
            if other not in services:
                raise ComposeError(f"services.{service.name}.depends_on: no service {other!r}")
    return services


def variable_names(path: Path) -> set[str]:
    """Names of all variables that the file refers to."""
    return {m["name"] for m in _VARIABLE.finditer(path.read_text()) if m["name"]}


def variable_defaults(path: Path) -> dict[str, str | None]:
    """Every variable of the file and what stands in for it when it is not set; None: required."""
    found: dict[str, str | None] = {}
    for match in _VARIABLE.finditer(path.read_text()):
        if match["name"] and match["op"] != ":+":
            found.setdefault(match["name"], None if match["op"] == ":?" else match["arg"] or "")
    return found


def _interpolate(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _fill(match, variables), value)
    if isinstance(value, list):
        return [_interpolate(item, variables) for item in value]
    if isinstance(value, dict):
        return {key: _interpolate(item, variables) for key, item in value.items()}
    return value


def _fill(match: re.Match[str], variables: Mapping[str, str]) -> str:
    if match["name"] is None:
        return "$"
    current = variables.get(match["name"], "")
    match match["op"]:
        case ":-":
            return current or match["arg"]
        case ":+":
            return match["arg"] if current else ""
        case ":?" if not current:
            raise ComposeError(f"{match['name']} is not set: {match['arg']}")
        case _:
            return current


def _service(name: str, body: dict[str, Any]) -> ServiceSpec:
    restart = str(body.get("restart", "no"))
    if restart not in RESTARTS:
        raise ComposeError(f"services.{name}.restart: {restart!r} is not one of {RESTARTS}")
    return ServiceSpec(
        name=name,
        command=tuple(body["command"]),
        environment={key: str(value) for key, value in body.get("environment", {}).items()},
        depends_on=_dependencies(name, body.get("depends_on", {})),
        health=_health(name, body.get("healthcheck")),
        restart=restart,
        stop_grace_seconds=_seconds(body.get("stop_grace_period", "10s")),
        mounts=dict(_mount(text) for text in body.get("volumes", ())),
    )


def _dependencies(name: str, raw: dict[str, dict[str, str]]) -> dict[str, str]:
    conditions = {other: entry["condition"] for other, entry in raw.items()}
    for other, condition in conditions.items():
        if condition not in CONDITIONS:
            raise ComposeError(
                f"services.{name}.depends_on.{other}: {condition!r} is not one of {CONDITIONS}"
            )
    return conditions


def _health(name: str, raw: dict[str, Any] | None) -> HealthCheck:
    if raw is None or raw["test"][0] != "CMD":
        raise ComposeError(f"services.{name}.healthcheck: a test that starts with CMD is needed")
    return HealthCheck(
        command=tuple(raw["test"][1:]),
        interval=_seconds(raw.get("interval", "30s")),
        timeout=_seconds(raw.get("timeout", "30s")),
        retries=int(raw.get("retries", 3)),
        start_period=_seconds(raw.get("start_period", "0s")),
    )


def _mount(text: str) -> tuple[str, str]:
    match = _MOUNT.fullmatch(text)
    if match is None:
        raise ComposeError(f"{text!r} is not a volume such as SOURCE:/TARGET or SOURCE:/TARGET:ro")
    return match["target"], match["source"]


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if not text or match is None:
        raise ComposeError(f"{text!r} is not a duration such as 10s or 1h30m")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds
