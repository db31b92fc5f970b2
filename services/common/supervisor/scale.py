"""Several instances of a service: one process each, with a name, a socket and a metrics port."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.common.grpc_client import socket_target
from services.common.supervisor.compose_file import ServiceSpec

SCALABLE = ("engine", "tokenizer")
MAX_INSTANCES = 64
METRICS_PORT = "WARHORSE_METRICS_PORT"

_SCALE = re.compile(r"(?P<service>[a-z]+)=(?P<count>\d{1,3})")
_INSTANCE = re.compile(r"(?P<service>[a-z]+)-\d+")


def parse_scale(texts: Iterable[str]) -> dict[str, int]:
    """`["engine=2"]` -> `{"engine": 2}`. Raises ValueError that names text and range."""
    counts: dict[str, int] = {}
    for text in texts:
        match = _SCALE.fullmatch(text)
        if match is None or match["service"] not in SCALABLE:
            raise ValueError(f"{text!r} is not SERVICE=COUNT with one of {', '.join(SCALABLE)}")
        count = int(match["count"])
        if not 1 <= count <= MAX_INSTANCES:
            raise ValueError(f"{text!r}: the count must be 1 to {MAX_INSTANCES}")
        counts[match["service"]] = count
    return counts


def service_of(name: str) -> str:
    """The service that a process of the stack belongs to: `engine` of `engine-1` and `engine`."""
    match = _INSTANCE.fullmatch(name)
    return match["service"] if match else name


def instance_of(name: str) -> str:
    """The instance that a process of the stack is: `engine-0` of `engine`."""
    return name if _INSTANCE.fullmatch(name) else f"{name}-0"


def scaled(
    services: Mapping[str, ServiceSpec], counts: Mapping[str, int], run_dir: Path
) -> dict[str, ServiceSpec]:
    """The services of a stack in which `counts` of them run several times.

    A service that runs once keeps its name; the instances of others are `engine-0` and so on.
    Whatever depends on a service depends on all its instances, and the gateway is told all their
    addresses. Instances share everything else: command, environment, health check, restart rule.
    """
    several = {name: count for name, count in counts.items() if count > 1}
    names = {
        name: [f"{name}-{i}" for i in range(several[name])] if name in several else [name]
        for name in services
    }
    result = {}
    for name, spec in services.items():
        depends = {i: rule for other, rule in spec.depends_on.items() for i in names[other]}
        for instance in names[name]:
            made = replace(spec, depends_on=depends)
            result[instance] = _instance(made, instance) if name in several else made
    return _with_addresses(result, names, several, run_dir)


def _instance(spec: ServiceSpec, name: str) -> ServiceSpec:
    """One of several: its own name, and its own socket in the health check."""
    own, first = f"/{name}.sock", f"/{spec.name}-0.sock"
    command = tuple(part.replace(first, own) for part in spec.health.command)
    return replace(
        spec,
        name=name,
        environment={**spec.environment, "WARHORSE_INSTANCE": name},
        health=replace(spec.health, command=command),
    )


def _with_addresses(
    services: dict[str, ServiceSpec],
    names: Mapping[str, list[str]],
    several: Mapping[str, int],
    run_dir: Path,
) -> dict[str, ServiceSpec]:
    addresses = {
        f"WARHORSE_{name.upper()}_ADDRESS": ",".join(
            socket_target(run_dir, name, instance) for instance in names[name]
        )
        for name in several
    }
    if addresses:
        gateway = services["gateway"]
        services["gateway"] = replace(gateway, environment={**gateway.environment, **addresses})
    return services


def compose_override(
    services: Mapping[str, ServiceSpec], counts: Mapping[str, int], file: Path
) -> dict[str, Any]:
    """The compose document that is read after `file` and runs services several times.

    `services` are those of `file`. The first instance keeps the service's name; each further one
    extends it, answers to its name on the network, and has its own socket on the run volume.
    """
    run_dir = Path(services["gateway"].environment["WARHORSE_RUN_DIR"])
    several = {name: count for name, count in counts.items() if count > 1}
    made = scaled(services, several, run_dir)
    further = {f"{n}-{i}": n for n, count in several.items() for i in range(1, count)}
    document: dict[str, Any] = {
        instance: _further(made[instance], name, file) for instance, name in further.items()
    }
    addresses = {f"WARHORSE_{name.upper()}_ADDRESS" for name in several}
    gateway = made["gateway"]
    document["gateway"] = {
        "environment": {key: gateway.environment[key] for key in sorted(addresses)},
        "depends_on": {i: {"condition": gateway.depends_on[i]} for i in further},
    }
    return {"services": document}


def _further(spec: ServiceSpec, service: str, file: Path) -> dict[str, Any]:
    return {
        "extends": {"file": str(file), "service": service},
        "environment": {"WARHORSE_INSTANCE": spec.name},
        "healthcheck": {"test": ["CMD", *spec.health.command]},
        "networks": {"default": {"aliases": [service]}},
    }


def with_metrics_ports(services: Mapping[str, ServiceSpec]) -> dict[str, ServiceSpec]:
    """On one host each process needs a port of its own: counted up from the one that is set.

    The gateway has none: it answers `/metrics` on its HTTP port. Raises ValueError where the last
    port would be above 65535.
    """
    result, taken = {}, 0
    for name, spec in services.items():
        first = int(spec.environment.get(METRICS_PORT) or 0)
        result[name] = spec
        if first:
            if first + taken > 65535:
                raise ValueError(f"--metrics-port {first}: the port of {name} would be above 65535")
            environment = {**spec.environment, METRICS_PORT: str(first + taken)}
            result[name] = replace(spec, environment=environment)
            taken += 1
    return result


def metrics_targets(services: Mapping[str, ServiceSpec], gateway: str) -> list[dict[str, object]]:
    """What a Prometheus file_sd_config lists: every process and the service it belongs to.

    `gateway` is host:port of its HTTP interface.
    """
    found: list[dict[str, object]] = [_target(gateway, "gateway", "gateway")]
    for name, spec in services.items():
        if port := int(spec.environment.get(METRICS_PORT) or 0):
            found.append(_target(f"127.0.0.1:{port}", service_of(name), instance_of(name)))
    return found


def _target(address: str, service: str, instance: str) -> dict[str, object]:
    return {"targets": [address], "labels": {"service": service, "replica": instance}}
