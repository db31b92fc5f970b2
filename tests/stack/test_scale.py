"""A stack with two engines and two tokenizers, and what it tells about one request."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.stack.collector import Collector, Span, collecting
from tests.stack.conftest import Stack, running, wait_until

pytestmark = pytest.mark.slow

PROCESSES = {
    "gateway", "tokenizer-0", "tokenizer-1", "engine-0", "engine-1", "kvcache", "offload"
}  # fmt: skip
SECRET = "zanzibar"  # a word of every prompt


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that are free."""
    for first in range(21000 + secrets.randbelow(200) * 50, 40000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


@dataclass
class Scaled:
    stack: Stack
    collector: Collector

    def complete(self, prompt: str, **headers: str) -> str:
        """Run a completion to its end; the text."""
        body = {"prompt": f"{SECRET} {prompt}", "max_tokens": 8, "temperature": 0}
        url = f"{self.stack.url}/v1/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def chat(self, text: str, **headers: str) -> None:
        body = {
            "messages": [{"role": "user", "content": f"{SECRET} {text}"}],
            "max_tokens": 8,
        }
        url = f"{self.stack.url}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text

    def log_lines(self, process: str) -> list[dict[str, object]]:
        text = (self.stack.paths.logs / f"{process}.log").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def metric(self, replica: str, name: str) -> float:
        """The sum over all series of a metric of one process."""
        targets = json.loads(self.stack.paths.metrics.read_text())
        (address,) = [t["targets"][0] for t in targets if t["labels"]["replica"] == replica]
        text = httpx.get(f"http://{address}/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        )

    def prompts_of(self, engine: str) -> int:
        """Requests that an engine has answered."""
        lines = self.log_lines(engine)
        return sum(line["message"] == "request ended" for line in lines)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scaled]:
    scale = ("--scale", "engine=2", "--scale", "tokenizer=2", "--log-level", "debug")
    with collecting() as collector:
        flags = (
            *scale,
            f"--metrics-port={free_ports(6)}",
            f"--otlp-traces-endpoint={collector.url}",
        )
        stack = Stack(tmp_path_factory.mktemp("scale"))
        with running(stack, *flags):
            yield Scaled(stack, collector)


def test_status_shows_every_instance(scaled: Scaled) -> None:
    rows = scaled.stack.status()
    assert rows.keys() == PROCESSES
    assert all(row["healthy"] for row in rows.values())
    assert rows["engine-1"]["load"].startswith("0 running")
    assert len({row["pid"] for row in rows.values()}) == len(PROCESSES)


def test_prompts_with_one_prefix_go_to_one_engine(scaled: Scaled) -> None:
    before = [scaled.prompts_of(f"engine-{i}") for i in (0, 1)]
    prefix = "one two three four five six seven " * 12
    scaled.complete(prefix)
    wait_until(
        lambda: sum(scaled.prompts_of(f"engine-{i}") for i in (0, 1)) == sum(before) + 1, 5, "end"
    )
    first = scaled.prompts_of("engine-0") == before[0]
    holder, other = ("engine-1", "engine-0") if first else ("engine-0", "engine-1")
    idle = scaled.prompts_of(other)
    wait_until(lambda: scaled.metric(holder, "warhorse:running") == 0, 5, "the load is told")
    for n in range(4):
        scaled.complete(f"{prefix} and {n}")
    assert scaled.prompts_of(other) == idle


def test_one_id_in_the_logs_of_every_process_that_took_part(scaled: Scaled) -> None:
    mine = f"id-{secrets.token_hex(6)}"
    scaled.chat(
        "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 6, **{"x-request-id": mine}
    )

    def services() -> set[object]:
        lines = [line for name in PROCESSES for line in scaled.log_lines(name)]
        return {line["service"] for line in lines if line.get("request_id") == mine}

    wanted = {"gateway", "tokenizer", "engine", "engine-core", "kvcache"}
    wait_until(lambda: services() == wanted, 10, f"{services()} == {wanted}")


def test_no_log_line_holds_text_of_a_prompt(scaled: Scaled) -> None:
    scaled.chat("hello")
    for process in PROCESSES:
        assert SECRET not in (scaled.stack.paths.logs / f"{process}.log").read_text(), process


def test_one_request_is_one_trace_over_the_processes(scaled: Scaled) -> None:
    trace, caller = secrets.token_hex(16), secrets.token_hex(8)
    numbers = " ".join(str(n * 7919) for n in range(60))
    scaled.chat(numbers, traceparent=f"00-{trace}-{caller}-01")
    wanted = {
        ("warhorse-gateway", "POST /v1/chat/completions"),
        ("warhorse-tokenizer", "TokenizerService/Render"),
        ("warhorse-tokenizer", "parse"),
        ("warhorse-engine", "engine"),
        ("warhorse-engine-core", "queue"),
        ("warhorse-engine-core", "prefill"),
        ("warhorse-engine-core", "decode"),
        ("warhorse-engine-core", "table gather"),
        ("warhorse-engine-core", "store lookup"),
        ("warhorse-kvcache", "KvCacheService/Lookup"),
    }

    def found() -> dict[tuple[str, str], Span]:
        return {(s.service, s.name): s for s in scaled.collector.trace(trace)}

    wait_until(lambda: found().keys() >= wanted, 15, f"{found().keys()} >= {wanted}")
    spans = found()
    ids = {s.id for s in spans.values()} | {caller}
    assert {s.parent for s in spans.values()} <= ids
    root = spans["warhorse-gateway", "POST /v1/chat/completions"]
    engine = spans["warhorse-engine", "engine"]
    assert root.parent == caller and engine.parent == root.id
    for name in ("queue", "prefill", "decode"):
        assert spans["warhorse-engine-core", name].parent == engine.id
    assert spans["warhorse-kvcache", "KvCacheService/Lookup"].parent == (
        spans["warhorse-engine-core", "store lookup"].id
    )
    assert 0 < spans["warhorse-engine-core", "prefill"].seconds < engine.seconds < root.seconds


def test_every_process_counts(scaled: Scaled) -> None:
    scaled.chat("and now")

    def total(name: str, *replicas: str) -> float:
        return sum(scaled.metric(replica, name) for replica in replicas)

    tokenizers, engines = ("tokenizer-0", "tokenizer-1"), ("engine-0", "engine-1")
    assert total("warhorse:parse_tokens_total", *tokenizers) > 0
    assert total("warhorse:rpc_seconds_count", *tokenizers) > 0
    wait_until(lambda: total("warhorse:core_gathered_rows_total", *engines) > 0, 5, "gathers")
    assert total("warhorse:generation_tokens_total", *engines) > 0
    assert total("warhorse:ring_hop_seconds_total", *engines) > 0
    assert total("warhorse:cache_pages", *engines) > 0
    assert total("warhorse:store_lookups_total", "kvcache-0") > 0
    assert total("warhorse:table_bytes", "offload-0") > 0
    assert total("vllm:request_prefill_time_seconds_sum", "gateway") > 0
    assert total("vllm:iteration_tokens_total_count", "gateway") > 0
    assert all(scaled.metric(r, "warhorse:region_bytes") > 0 for r in (*engines, "kvcache-0"))


def test_with_one_engine_killed_requests_go_on_with_the_other(scaled: Scaled) -> None:
    """The last test of this stack: an engine is started again in the end."""
    text = scaled.complete("what is left")
    restarts = scaled.stack.report()["engine-0"]["restarts"]
    scaled.stack.kill("engine-0")
    assert [scaled.complete("what is left") for _ in range(3)] == [text] * 3
    scaled.stack.wait_restarted("engine-0", restarts + 1)
    assert scaled.stack.report()["engine-1"]["restarts"] == 0
