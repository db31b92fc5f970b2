"""Prometheus metrics under the names that existing dashboards of vLLM servers query."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from warhorse.v1 import engine_pb2

from services.gateway.engines import EnginePeer
from services.gateway.events import EngineTimes, Usage

ENGINE = "0"  # label of measurements that the gateway takes over all engines

# fmt: off
LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
           7680)
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5,
               10, 20, 40, 80, 160, 640, 2560)
PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20,
             40, 80)
HTTP = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
CHOICES = (1, 2, 5, 10, 20)
# fmt: on
COUNTS = tuple(step * 10**power for power in range(7) for step in (1, 2, 5))

PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
# Statuses with which a request is refused because of the load, and their names.
REJECTIONS = {429: "rate_limit", 503: "unavailable"}

_LABELS = ("model_name", "engine")


class Metrics:
    """All metrics of one gateway, in a registry of its own."""

    def __init__(self, engines: Sequence[EnginePeer]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engines))
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Time to the first token", FIRST_TOKEN
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Time between tokens", PER_TOKEN
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token", PER_TOKEN
        )
        self._per_token_alias = self._histogram(
            "vllm:time_per_output_token_seconds", "Mean time per token", PER_TOKEN
        )
        self._latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time of a whole request", LATENCY
        )
        self._prompt_size = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request", COUNTS
        )
        self._output_size = self._histogram(
            "vllm:request_generation_tokens", "Output tokens of a request", COUNTS
        )
        self._choices = self._histogram("vllm:request_params_n", "Choices of a request", CHOICES)
        self._max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "max_tokens of a request", COUNTS
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens")
        self._cached_tokens = self._counter("vllm:prompt_tokens_cached", "Cached prompt tokens")
        self._output_tokens = self._counter("vllm:generation_tokens", "Output tokens")
        self._engine_histograms()
        self._success = Counter(
            "vllm:request_success",
            "Finished requests",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._http = Counter(
            "http_requests",
            "HTTP requests",
            ("method", "handler", "status"),
            registry=self.registry,
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "Time of HTTP requests",
            ("method", "handler"),
            buckets=HTTP,
            registry=self.registry,
        )

    def _engine_histograms(self) -> None:
        """What engines say about the requests that they ran."""
        times = {
            "queue": "Time until the first step",
            "prefill": "Time from the first step to the first token",
            "decode": "Time from the first token to the last",
            "inference": "Time from the first step to the last token",
        }
        self._times = {
            name: self._histogram(f"vllm:request_{name}_time_seconds", text, LATENCY)
            for name, text in times.items()
        }
        self._preempted = self._histogram(
            "vllm:request_num_preemptions", "Preemptions of a request", PREEMPTIONS
        )
        self._computed = self._histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens that were computed", COUNTS
        )
        self._longest = self._histogram(
            "vllm:request_max_num_generation_tokens", "Output tokens of a request", COUNTS
        )
        self._sources = Counter(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where they came from",
            (*_LABELS, "source"),
            registry=self.registry,
        )
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused because of the load",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self._tool_parsers = self._counter(
            "vllm:tool_call_parser_invocations", "Outputs parsed for tool calls"
        )
        self._images = self._counter("vllm:mm_cache_queries", "Images of prompts")
        self._kept_images = self._counter("vllm:mm_cache_hits", "Images that were not decoded anew")

    def engine_times(self, model: str, times: EngineTimes) -> None:
        """What an engine spent on one prompt."""
        for name, seconds in (
            ("queue", times.queue),
            ("prefill", times.prefill),
            ("decode", times.decode),
            ("inference", times.prefill + times.decode),
        ):
            self._times[name].labels(model, ENGINE).observe(seconds)
        self._preempted.labels(model, ENGINE).observe(times.preemptions)
        self._computed.labels(model, ENGINE).observe(times.prompt - times.cached)
        for source, tokens in (
            ("local_compute", times.prompt - times.cached),
            ("local_cache_hit", times.cached - times.external),
            ("external_kv_transfer", times.external),
        ):
            self._sources.labels(model, ENGINE, source).inc(tokens)

    def rejected(self, model: str, reason: str) -> None:
        """A request was refused because of the load; `reason` is one of REJECTIONS."""
        self._rejections.labels(model, reason).inc()

    def images(self, model: str, images: int, kept: int) -> None:
        """A prompt holds `images`, `kept` of which were not decoded anew."""
        self._images.labels(model, ENGINE).inc(images)
        self._kept_images.labels(model, ENGINE).inc(kept)

    def parsed_tools(self, model: str, choices: int) -> None:
        """Outputs were parsed for tool calls."""
        self._tool_parsers.labels(model, ENGINE).inc(choices)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, _LABELS, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self.registry)

    def first_token(self, model: str, seconds: float) -> None:
        """The first token of a request went out."""
        self._first_token.labels(model, ENGINE).observe(seconds)

    def inter_token_observer(self, model: str) -> Callable[[float], None]:
        """What to call with the seconds between two updates of a choice.

        Looked up once per request: the labels cost more than the observation.
        """
        return self._inter_token.labels(model, ENGINE).observe

    def per_token(self, model: str, seconds: float, tokens: int) -> None:
        """A request of `tokens` tokens ended `seconds` after its first token."""
        if tokens > 1:
            for histogram in (self._per_token, self._per_token_alias):
                histogram.labels(model, ENGINE).observe(seconds / (tokens - 1))

    def finished(self, model: str, reason: str) -> None:
        """A choice ended, or a whole request by abort or error."""
        self._success.labels(model, ENGINE, reason).inc()

    def request(
        self, model: str, usage: Usage, *, seconds: float, choices: int, max_tokens: int | None
    ) -> None:
        """A request was completed."""
        self._latency.labels(model, ENGINE).observe(seconds)
        self._prompt_size.labels(model, ENGINE).observe(usage.prompt)
        self._output_size.labels(model, ENGINE).observe(usage.completion)
        self._longest.labels(model, ENGINE).observe(usage.completion)
        self._choices.labels(model, ENGINE).observe(choices)
        if max_tokens is not None:
            self._max_tokens.labels(model, ENGINE).observe(max_tokens)
        self._prompt_tokens.labels(model, ENGINE).inc(usage.prompt)
        self._cached_tokens.labels(model, ENGINE).inc(usage.cached)
        self._output_tokens.labels(model, ENGINE).inc(usage.completion)

    def http(self, method: str, handler: str, status: int, seconds: float) -> None:
        """An HTTP request of any kind ended."""
        self._http.labels(method, handler, str(status)).inc()
        self._http_seconds.labels(method, handler).observe(seconds)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


_GAUGES = {
    "vllm:num_requests_running": ("Running requests", "running"),
    "vllm:num_requests_waiting": ("Waiting requests", "waiting"),
    "vllm:kv_cache_usage_perc": ("Use of the fullest cache pool, 0 to 1", "kv_usage"),
    "vllm:gpu_cache_usage_perc": ("Use of the fullest cache pool, 0 to 1", "kv_usage"),
}
STEP_TOKENS = ("1", *(str(8 << n) for n in range(12)), "+Inf")
_COUNTERS = {
    "vllm:spec_decode_num_drafts": ("Steps of sequences with drafts", "drafts"),
    "vllm:spec_decode_num_draft_tokens": ("Draft tokens", "draft_tokens"),
    "vllm:spec_decode_num_accepted_tokens": ("Accepted drafts", "accepted_draft_tokens"),
    "vllm:num_preemptions": ("Preempted requests", "preemptions"),
    "vllm:prefix_cache_queries": ("Tokens looked up", "prefix_queries_tokens"),
    "vllm:prefix_cache_hits": ("Tokens found", "prefix_hit_tokens"),
    "vllm:external_prefix_cache_queries": (
        "Tokens looked up in the store",
        "external_query_tokens",
    ),
    "vllm:external_prefix_cache_hits": ("Tokens found in the store", "external_hit_tokens"),
}


class EngineCollector(Collector):
    """The last load record of every engine that is known, read when metrics are asked for."""

    def __init__(self, engines: Sequence[EnginePeer]) -> None:
        self._engines = engines

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: engines may not be known yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One sample per engine and metric."""
        known = [e for e in self._engines if e.info.model.name]
        for name, (text, field) in _GAUGES.items():
            yield _fill(GaugeMetricFamily(name, text, labels=_LABELS), known, field)
        for name, (text, field) in _COUNTERS.items():
            yield _fill(CounterMetricFamily(name, text, labels=_LABELS), known, field)
        yield _waiting_by_reason(known)
        yield _accepted_by_position(known)
        yield _awake(known)
        yield _step_tokens(known)
        yield _cache_config(known)


def _fill(
    family: GaugeMetricFamily | CounterMetricFamily, engines: Iterable[EnginePeer], field: str
) -> Metric:
    for engine in engines:
        family.add_metric(_labels(engine), _value(engine.load, field))
    return family


def _labels(engine: EnginePeer) -> tuple[str, str]:
    return engine.info.model.name, str(engine.index)


def _waiting_by_reason(engines: Iterable[EnginePeer]) -> Metric:
    """All wait in one queue, for room."""
    family = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason", "Waiting requests", labels=(*_LABELS, "reason")
    )
    for engine in engines:
        family.add_metric((*_labels(engine), "capacity"), float(engine.load.waiting))
    return family


def _accepted_by_position(engines: Iterable[EnginePeer]) -> Metric:
    family = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted drafts by their place in a step",
        labels=(*_LABELS, "position"),
    )
    for engine in engines:
        for position, count in enumerate(engine.load.accepted_by_position):
            family.add_metric((*_labels(engine), str(position)), float(count))
    return family


def _awake(engines: Iterable[EnginePeer]) -> Metric:
    """Engines here never sleep."""
    family = GaugeMetricFamily(
        "vllm:engine_sleep_state", "Whether an engine is awake", labels=(*_LABELS, "sleep_state")
    )
    for engine in engines:
        for state, value in (("awake", 1.0), ("weights_offloaded", 0.0), ("discard_all", 0.0)):
            family.add_metric((*_labels(engine), state), value)
    return family


def _step_tokens(engines: Iterable[EnginePeer]) -> Metric:
    """The histogram that every engine keeps of its steps."""
    family = HistogramMetricFamily(
        "vllm:iteration_tokens_total", "Tokens of a step", labels=_LABELS
    )
    for engine in engines:
        counts = itertools.accumulate(engine.load.steps_by_tokens)
        buckets = [(edge, float(n)) for edge, n in zip(STEP_TOKENS, counts, strict=False)]
        if len(buckets) == len(STEP_TOKENS):
            family.add_metric(_labels(engine), buckets, sum_value=float(engine.load.step_tokens))
    return family


def _cache_config(engines: Iterable[EnginePeer]) -> Metric:
    """Sizes of the pools that hold pages, one series per pool."""
    family = GaugeMetricFamily(
        "vllm:cache_config_info",
        "Pools of the cache",
        labels=(*_LABELS, "group", "block_size", "num_gpu_blocks"),
    )
    for engine in engines:
        for group in engine.info.cache_groups:
            sizes = (group.name, str(group.page_tokens), str(group.total_pages))
            family.add_metric((*_labels(engine), *sizes), 1.0)
    return family


def _value(load: engine_pb2.LoadResponse, field: str) -> float:
    return float(getattr(load, field))
