"""Time per token of the nano model on one CPU thread: `python -m tests.benchmarks.nano_model`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from services.common.checkpoint import Checkpoint
from services.engine.checkpoints.local_table import local_tables
from services.engine.models.registry import load_model
from tests.models.runner import Live, Part, Runner

NANO = Path("services/engine/checkpoints/nano_models/nano-qwen3.8-flash-next")


def milliseconds(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Least and median CPU time of `run`: the wall time of a machine with nothing else to do."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append((time.process_time() - start) * 1e3)
    return min(times), statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    model = load_model(NANO, device=torch.device("cpu"), compute_dtype=torch.float32)
    runner = Runner([model], local_tables(Checkpoint.open(NANO)), pages=256)
    ids = [8 + i % 400 for i in range(256)]

    def prefill() -> None:
        live = Live()
        runner.step([Part(live, ids)])
        runner.release(live)

    least, median = milliseconds(prefill, 7)
    print(f"prefill of 256: {least / 256:.2f} ms/token least, {median / 256:.2f} median")
    for batch in (1, 8, 32):
        lives = [Live() for _ in range(batch)]
        runner.step([Part(live, ids[:20]) for live in lives])
        decode = [Part(live, ids[:1]) for live in lives]
        least, median = milliseconds(lambda parts=decode: runner.step(parts), 30)
        print(f"decode, batch {batch}: {least:.1f} ms/step least, {median:.1f} median")
        for live in lives:
            runner.release(live)


if __name__ == "__main__":
    main()
