"""Metrics of a process, the instances of a stack, and the dashboard over both."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

from services.common.cli.up import COMPOSE_FILE
from services.common.errors import StartupError
from services.common.metrics import ProcessMetrics, Reading, single
from services.common.supervisor.compose_file import load_services
from services.common.supervisor.scale import (
    metrics_targets,
    parse_scale,
    scaled,
    with_metrics_ports,
)
from services.engine.front_watch import FrontWatch
from services.gateway.metrics import Metrics
from services.kvcache.service import KvCacheServicer
from services.tokenizer.lanes import ParseWatch
from tests.stack.conftest import free_port

DASHBOARD = COMPOSE_FILE.with_name("grafana") / "warhorse.json"
RUN = Path("/run/user/1")


def test_a_process_answers_on_its_port_and_refuses_a_taken_one() -> None:
    metrics, port = ProcessMetrics(), free_port()
    metrics.add(Reading("warhorse:things", "Things", "counter", single(lambda: 3)))
    metrics.rpc("TokenizerService/Render", "OK", 0.002)
    with metrics.served("127.0.0.1", port):
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        with (
            pytest.raises(StartupError, match=f"--metrics-port {port}"),
            ProcessMetrics().served("127.0.0.1", port),
        ):
            pass
    assert "warhorse:things_total 3.0" in text
    assert 'warhorse:rpcs_total{code="OK",method="TokenizerService/Render"} 1.0' in text


def test_every_name_on_the_dashboard_is_one_that_a_process_shows() -> None:
    """Queries must not go stale when a metric is renamed."""
    process, gateway = ProcessMetrics(), Metrics([])
    process.add(*FrontWatch().readings())
    process.add(*ParseWatch().readings())
    known = {"process_resident_memory_bytes"}
    for registry in (process.registry, gateway.registry):
        for family in registry.collect():
            known |= {family.name, f"{family.name}_total", f"{family.name}_bucket"}
    store = KvCacheServicer(None, None, 1.0)  # type: ignore[arg-type]  # names are all we ask for
    known |= {reading.name for reading in store.readings()}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            used = set(re.findall(r"(?:vllm:|warhorse:|http_|process_)\w+", target["expr"]))
            assert used and used <= known, (panel["title"], used - known)


@pytest.mark.parametrize("text", ["engine", "engine=0", "engine=65", "kvcache=2", "engine=-1", ""])
def test_a_scale_that_cannot_be_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_scale([text])


def test_instances_have_their_own_name_socket_and_port() -> None:
    given = {"WARHORSE_MODEL": "/m", "WARHORSE_METRICS_PORT": "9500"}
    found = scaled(load_services(COMPOSE_FILE, given), parse_scale(["engine=2"]), RUN)
    found = with_metrics_ports(found)
    assert list(found) == ["offload", "kvcache", "tokenizer", "engine-0", "engine-1", "gateway"]
    for name in ("engine-0", "engine-1"):
        assert found[name].environment["WARHORSE_INSTANCE"] == name
        assert f"/run/warhorse/engine/{name}.sock" in found[name].health.command
        assert found[name].restart == "unless-stopped"
        assert found["gateway"].depends_on[name] == "service_started"
    sockets = ",".join(f"unix:{RUN}/engine/engine-{i}.sock" for i in (0, 1))
    assert found["gateway"].environment["WARHORSE_ENGINE_ADDRESS"] == sockets
    assert "WARHORSE_TOKENIZER_ADDRESS" not in found["gateway"].environment
    addresses = [t["targets"][0] for t in metrics_targets(found, "127.0.0.1:8000")]  # type: ignore[index]
    assert addresses == ["127.0.0.1:8000", *(f"127.0.0.1:{9500 + i}" for i in range(5))]


def test_a_stack_that_runs_once_is_as_the_file_says() -> None:
    services = load_services(COMPOSE_FILE, {"WARHORSE_MODEL": "/m"})
    assert with_metrics_ports(scaled(services, {"engine": 1}, RUN)) == services
