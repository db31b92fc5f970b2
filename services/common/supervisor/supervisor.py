"""Runs the services of a compose file as local processes.

One asyncio task per service: wait for its dependencies, start it, watch its health, start it
again when it ends. A service that ends before it was ever healthy fails the whole start, with
its first error line: a wrong checkpoint is not worth a second try. So does one that is still not
healthy when its start period and the retries after it are over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from services.common import probe
from services.common.supervisor.compose_file import HealthCheck, ServiceSpec
from services.common.supervisor.state import ROOT, ServiceState, StackPaths, StackState

log = logging.getLogger(__name__)

STARTING_POLL_SECONDS = 0.25
BACKOFF_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
STEADY_SECONDS = 10.0  # a life this long resets the back-off, as Docker's does
PROBE = ("python", "-m", "services.common.probe")


class Supervisor:
    """Owns the processes of one stack. Single-threaded; `run` is the only entry."""

    def __init__(
        self, services: Mapping[str, ServiceSpec], paths: StackPaths, state: StackState
    ) -> None:
        self._services = services
        self._paths = paths
        self._state = state
        self._stopping = asyncio.Event()
        self._changed = asyncio.Condition()
        self._records = {name: ServiceState(service=name) for name in services}
        self._once_healthy: set[str] = set()
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        state.services = list(self._records.values())

    async def run(self) -> int:
        """Keep all services until SIGINT or SIGTERM, or until a start fails. Exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stopping.set)
        self._paths.logs.mkdir(parents=True, exist_ok=True)
        self._paths.run.mkdir(parents=True, exist_ok=True)
        self._state.write(self._paths.file)
        tasks = [asyncio.create_task(self._keep(spec)) for spec in self._services.values()]
        for task in tasks:
            task.add_done_callback(self._kept)
        await self._stopping.wait()
        await self._stop_all()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._paths.file.unlink() if not self._state.failure else self._publish()
        return 1 if self._state.failure else 0

    def _kept(self, task: asyncio.Task[None]) -> None:
        """A service that cannot be looked after any more ends the stack."""
        if error := task.exception():
            log.error("a service cannot be kept", exc_info=error)
            self._fail(str(error))

    async def _keep(self, spec: ServiceSpec) -> None:
        failures = 0
        while await self._dependencies_met(spec):
            started = time.monotonic()
            code = await self._live(spec)
            if self._stopping.is_set() or not self._restartable(spec, code):
                return
            failures = 0 if time.monotonic() - started > STEADY_SECONDS else failures + 1
            await self._pause(BACKOFF_SECONDS[min(failures, len(BACKOFF_SECONDS) - 1)])
            self._records[spec.name].restarts += 1

    async def _live(self, spec: ServiceSpec) -> int:
        """One life of a service, from start to exit."""
        record = self._records[spec.name]
        process = await self._start(spec)
        self._processes[spec.name] = process
        record.pid = process.pid
        await self._notify()
        watch = asyncio.create_task(self._watch_health(spec))
        code = await process.wait()
        watch.cancel()
        record.pid, record.healthy, record.last_exit = 0, False, code
        if not self._stopping.is_set():
            log.warning("%s ended with code %d", spec.name, code)
        await self._notify()
        return code

    def _restartable(self, spec: ServiceSpec, code: int) -> bool:
        if spec.name not in self._once_healthy:
            self._fail(f"{spec.name} could not start: {self._first_error(spec.name)}")
            return False
        return spec.restart in ("always", "unless-stopped") or (
            spec.restart == "on-failure" and code != 0
        )

    def _fail(self, reason: str) -> None:
        self._state.failure = self._state.failure or reason
        self._stopping.set()

    async def _start(self, spec: ServiceSpec) -> asyncio.subprocess.Process:
        command = [sys.executable if part == "python" else self._local(spec, part)
                   for part in spec.command]  # fmt: skip
        environment = {key: self._local(spec, value) for key, value in spec.environment.items()}
        launch = Path(__file__).with_name("launch.py")
        with (self._paths.logs / f"{spec.name}.log").open("ab") as output:
            return await asyncio.create_subprocess_exec(
                sys.executable, str(launch), str(os.getpid()), *command,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, **environment}, cwd=ROOT, start_new_session=True,
            )  # fmt: skip

    def _local(self, spec: ServiceSpec, text: str) -> str:
        """`text` with its source here in place of a path in the container."""
        for target, source in spec.mounts.items():
            here = str(self._paths.run) if source == "run" else source
            if text == target or text.startswith(f"{target}/"):
                return here + text.removeprefix(target)
        return text

    async def _watch_health(self, spec: ServiceSpec) -> None:
        check, record, bad = spec.health, self._records[spec.name], 0
        deadline = time.monotonic() + check.start_period + check.retries * check.interval
        command = tuple(self._local(spec, part) for part in check.command)
        while True:
            good = await _healthy(command, check)
            bad = 0 if good else bad + 1
            healthy = good or (record.healthy and bad < check.retries)
            if healthy != record.healthy:
                record.healthy = healthy
                await self._notify()
            if spec.name not in self._once_healthy and time.monotonic() > deadline:
                self._fail(f"{spec.name} did not become healthy in time")
            await asyncio.sleep(check.interval if record.healthy else STARTING_POLL_SECONDS)

    async def _dependencies_met(self, spec: ServiceSpec) -> bool:
        def met() -> bool:
            return self._stopping.is_set() or all(
                name in self._once_healthy
                if condition == "service_healthy"
                else self._records[name].pid > 0
                for name, condition in spec.depends_on.items()
            )

        if spec.name not in self._once_healthy:
            async with self._changed:
                await self._changed.wait_for(met)
        return not self._stopping.is_set()

    async def _notify(self) -> None:
        self._once_healthy |= {n for n, record in self._records.items() if record.healthy}
        self._state.ready = all(record.healthy for record in self._records.values())
        self._publish()
        async with self._changed:
            self._changed.notify_all()

    def _publish(self) -> None:
        self._state.write(self._paths.file)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    async def _stop_all(self) -> None:
        async with self._changed:
            self._changed.notify_all()
        await asyncio.gather(*(self._stop(spec) for spec in self._services.values()))

    async def _stop(self, spec: ServiceSpec) -> None:
        process = self._processes.get(spec.name)
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), spec.stop_grace_seconds)
        except TimeoutError:
            log.warning("%s did not stop in time", spec.name)
            process.kill()

    def _first_error(self, name: str) -> str:
        """The message of the first error line: what follows it is its consequence."""
        lines = (self._paths.logs / f"{name}.log").read_text(errors="replace").splitlines()
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                if str(entry["level"]).upper() in ("ERROR", "CRITICAL"):
                    return str(entry["message"])
        return lines[-1] if lines else "no output"


async def _healthy(command: tuple[str, ...], check: HealthCheck) -> bool:
    """Run a health check; our own probe runs in this process, which saves an interpreter."""
    run = _run_probe if command[:3] == PROBE else _run_process
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(check.timeout):
            return await run(command)
    return False


async def _run_probe(command: tuple[str, ...]) -> bool:
    return await asyncio.to_thread(probe.probe_failure, list(command[len(PROBE) :])) is None


async def _run_process(command: tuple[str, ...]) -> bool:
    process = await asyncio.create_subprocess_exec(*command)
    try:
        return await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
