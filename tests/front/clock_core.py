"""A core process without a model: its tokens are the time at which they were sent.

Speaks the rings' messages like the real core. A request's `stopping.max_tokens` tokens come in
steps of one token for every live request, `sampling.seed` microseconds apart (0: one step as soon
as the last one is sent). A token id is the low 32 bits of CLOCK_MONOTONIC in microseconds.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass

from warhorse.v1 import engine_pb2 as pb
from warhorse.v1.common_pb2 import ModelInfo
from warhorse.v1.stage_pb2 import (
    CoreCommand,
    CoreDescription,
    CoreEvent,
    CoreReady,
    CoreResetDone,
    CoreStep,
    CoreSubmit,
    RequestUpdate,
)
from warhorse.v1.tokenizer_pb2 import FinishReason

from services.common.ring import Ring
from services.engine.core_end import attach_rings, die_with_front

HEARTBEAT_SECONDS = 0.2
HANG_TOKEN = 13  # a prompt that starts with it hangs the loop
EXIT_TOKEN = 14  # a prompt that starts with it ends the process


def clock_token() -> int:
    return (time.monotonic_ns() // 1000) & 0xFFFFFFFF


def age_seconds(token: int) -> float:
    """Seconds since `token` was made."""
    return ((clock_token() - token) & 0xFFFFFFFF) / 1e6


@dataclass
class Run:
    left: int
    sent: int = 0


class ClockCore:
    """One thread, two rings, no model."""

    def __init__(self, commands: Ring, events: Ring) -> None:
        self.commands = commands
        self.events = events
        self.runs: dict[int, Run] = {}
        self.pace = 0.0
        self.stopped = False

    def run(self) -> None:
        info = ModelInfo(family="clock", vocab_size=1 << 31, max_model_len=1 << 30)
        self.send(CoreEvent(ready=CoreReady(model=info)))
        due = time.monotonic()
        while not self.stopped:
            now = time.monotonic()
            patience = max(0.0, due - now) if self.runs else HEARTBEAT_SECONDS
            updates = self.drain(patience)
            now = time.monotonic()
            if self.runs and now >= due:
                updates += self.step()
                due = max(due + self.pace, now)
            elif not self.runs:
                due = now
            load = pb.LoadResponse(running=len(self.runs))
            self.send(CoreEvent(step=CoreStep(updates=updates, load=load)))

    def drain(self, patience: float) -> list[RequestUpdate]:
        updates = []
        data = self.commands.receive(timeout=patience)
        while data is not None:
            command = CoreCommand.FromString(data)
            match command.WhichOneof("command"):
                case "submit":
                    updates.append(self.submit(command.submit))
                case "abort":
                    self.runs.pop(command.abort.handle, None)
                case "describe":
                    engine = pb.DescribeEngineResponse(max_num_seqs=len(self.runs))
                    ticket = command.describe.ticket
                    description = CoreDescription(ticket=ticket, engine=engine)
                    self.send(CoreEvent(description=description))
                case "reset":
                    done = CoreResetDone(ticket=command.reset.ticket, pages_dropped=5)
                    self.send(CoreEvent(reset_done=done))
                case "stop":
                    self.stopped = True
            data = self.commands.receive(timeout=0)
        return updates

    def submit(self, submit: CoreSubmit) -> RequestUpdate:
        first = int.from_bytes(submit.request.prompt_token_ids[:4], "little")
        if first == EXIT_TOKEN:
            os._exit(3)
        if first == HANG_TOKEN:
            time.sleep(3600)
        self.pace = submit.request.sampling.seed / 1e6
        self.runs[submit.handle] = Run(left=submit.request.stopping.max_tokens)
        return RequestUpdate(
            handle=submit.handle,
            events=[
                pb.GenerateResponse(accepted=pb.Accepted(prompt_tokens=1)),
                pb.GenerateResponse(prompt_done=pb.PromptDone()),
            ],
        )

    def step(self) -> list[RequestUpdate]:
        step = CoreStep()
        for handle, run in tuple(self.runs.items()):
            update = step.updates.add(handle=handle)
            update.events.add().chunk.token_ids.append(clock_token())
            run.left, run.sent = run.left - 1, run.sent + 1
            if run.left == 0:
                finished = update.events.add().finished
                finished.reason = FinishReason.FINISH_REASON_LENGTH
                finished.completion_tokens = run.sent
                del self.runs[handle]
        return list(step.updates)

    def send(self, event: CoreEvent) -> None:
        self.events.send(event.SerializeToString())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--command-fds", required=True)
    parser.add_argument("--event-fds", required=True)
    parser.add_argument("--front-pid", type=int, required=True)
    parser.add_argument("--exit-code", type=int)
    arguments = parser.parse_args()
    die_with_front(arguments.front_pid)
    if arguments.exit_code is not None:
        sys.exit(arguments.exit_code)
    ClockCore(*attach_rings(arguments.command_fds.split(","), arguments.event_fds.split(","))).run()


if __name__ == "__main__":
    main()
