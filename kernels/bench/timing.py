"""Times on the device, from replays of a CUDA graph that holds many calls."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Time:
    """Median microseconds of one call, and the spread (80th less 20th percentile) over it."""

    microseconds: float
    spread: float


def elapsed(call: Call) -> float:
    """Microseconds on the device from the start to the end of `call`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return 1e3 * milliseconds


def time_calls(calls: Sequence[Call], graph_us: float = 10_000.0, rounds: int = 11) -> Time:
    """The time of one call. `calls` are equal but for their inputs, which rotate so that no
    cache holds them; the graph repeats them until it lasts about `graph_us`."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    estimate = elapsed(lambda: [call() for call in calls]) / len(calls)
    repeats = max(1, min(200, math.ceil(graph_us / max(estimate, 2.0) / len(calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    count = repeats * len(calls)
    times = [elapsed(graph.replay) / count for _ in range(rounds)]
    median = statistics.median(times)
    fifths = statistics.quantiles(times, n=5) if rounds > 1 else [median, median]
    return Time(median, (fifths[-1] - fifths[0]) / median)
