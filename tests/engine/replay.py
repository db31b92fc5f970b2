"""Records every step plan of one crowded run, to see that a refactoring changes none.

Remake the golden file, after a change that is meant to alter plans, with

    PYTHONPATH=.:protos python -m tests.engine.replay
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from services.engine.runtime.executor import LocalExecutor
from services.engine.scheduler.messages import RequestSampling
from services.engine.scheduler.plan import StepPlan, StepResult
from tests.engine.driver import Bench, Log, config, request, run
from tests.engine.test_core import prompt

GOLDEN = Path(__file__).parent / "golden" / "plans.jsonl"


class RecordingExecutor(LocalExecutor):
    """Runs plans and keeps them."""

    plans: list[StepPlan]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.plans = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return super().execute(plan)


def record() -> list[str]:
    """One JSON line per plan of a run with chunks, hits, choices, priorities, preemption, abort."""
    made: list[RecordingExecutor] = []

    def executor(*args: Any) -> RecordingExecutor:
        made.append(RecordingExecutor(*args))
        return made[-1]

    bench = Bench()
    settings = config(max_model_len=96, num_kv_tokens=144, max_num_seqs=3, state_slots=6)
    core = bench.core(settings=settings, make_executor=executor)
    sampling = RequestSampling(temperature=1.0, seed=1, presence_penalty=0.5)
    core.submit(request("long", prompt(60), 20))
    core.submit(request("pair", prompt(20), 9, n=2, sampling=sampling))
    log = Log()
    for _ in range(4):
        log.add(core.step())
    core.submit(request("urgent", prompt(40), 3, priority=-1))
    core.submit(request("again", prompt(60), 4))
    core.submit(request("dropped", prompt(9), 30))
    for _ in range(6):
        log.add(core.step())
    core.abort("dropped")
    run(core, log=log)
    bench.check()
    return [json.dumps(dataclasses.asdict(plan), sort_keys=True) for plan in made[0].plans]


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text("\n".join(record()) + "\n")
