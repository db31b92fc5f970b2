"""`warhorse up`, `warhorse down`, `warhorse logs`: start and stop a stack."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from services.common.cli.base import UserError, add_project, say
from services.common.supervisor.compose_file import ComposeError, load_services, variable_names
from services.common.supervisor.orphans import end_orphans
from services.common.supervisor.scale import (
    compose_override,
    metrics_targets,
    parse_scale,
    scaled,
    with_metrics_ports,
)
from services.common.supervisor.state import ROOT, StackPaths, StackState
from services.common.supervisor.supervisor import Supervisor

if TYPE_CHECKING:
    from services.common.cli.base import Subparsers

COMPOSE_FILE = ROOT / "compose" / "compose.yaml"
DEFAULT_MODEL = ROOT / "services/engine/checkpoints/nano_models/nano-qwen3.8-flash-next"
READY_SECONDS = 3600.0  # large checkpoints load for long; a failed start ends the wait at once


def add_commands(commands: Subparsers) -> None:
    """Register up, down and logs."""
    start = commands.add_parser("up", help="start the five processes", allow_abbrev=False)
    add = start.add_argument
    model = os.environ.get("WARHORSE_MODEL") or DEFAULT_MODEL
    port = os.environ.get("WARHORSE_PORT") or 8000
    host = os.environ.get("WARHORSE_HOST") or "127.0.0.1"
    add("--model", type=Path, default=model, help="folder of a checkpoint; default: the nano one")
    add("--port", type=_port, default=port, help="of the gateway; default: 8000")
    add("--host", default=host, help="address the gateway listens on; default: 127.0.0.1")
    start.add_argument("--detach", action="store_true", help="return when the stack is ready")
    start.add_argument("--docker", action="store_true", help="run in containers")
    scale = "how many of a service run, for example engine=2 or tokenizer=2; may be repeated"
    start.add_argument("--scale", action="append", default=[], metavar="SERVICE=N", help=scale)
    for name in sorted(_setting_flags()):
        start.add_argument(f"--{name}", help=argparse.SUPPRESS)
    start.epilog = "settings: " + " ".join(f"--{name}" for name in sorted(_setting_flags()))
    add_project(start).set_defaults(command=run_up)
    stop = commands.add_parser("down", help="stop the stack")
    stop.add_argument("--docker", action="store_true", help="the one in containers")
    add_project(stop).set_defaults(command=run_down)
    logs = commands.add_parser("logs", help="print the log of a service")
    logs.add_argument("service")
    add_project(logs).set_defaults(command=run_logs)


def _port(text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text) or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65535")
    return int(text)


def _setting_flags() -> set[str]:
    """Flags for the variables of the compose file that have none of their own."""
    own = {"model", "port", "host", "gateway-host", "metrics-host"}
    names = {n.removeprefix("WARHORSE_").lower().replace("_", "-")
             for n in variable_names(COMPOSE_FILE)}  # fmt: skip
    return names - own


def run_up(arguments: argparse.Namespace) -> int:
    """Start the stack; in the foreground until Ctrl-C unless --detach is given."""
    variables = _variables(arguments)
    counts = _scale(arguments)
    if arguments.docker:
        url = _url(arguments.host, arguments.port)
        return _containers(arguments.project, url, variables, counts)
    paths = StackPaths.of(arguments.project)
    running = StackState.read(paths.file)
    if running is not None and running.alive:
        raise UserError(f"already running at {running.url}; stop it with ./warhorse down")
    _check_port(arguments.host, arguments.port)
    _make_writable(paths.state)
    if arguments.detach:
        return _detach(paths)
    with _only_one(paths.state / "lock"):
        return _foreground(arguments, paths, variables, counts)


def _scale(arguments: argparse.Namespace) -> dict[str, int]:
    """How many instances are asked for."""
    try:
        return parse_scale(arguments.scale)
    except ValueError as error:
        raise UserError(f"--scale {error}") from error


def _make_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; WARHORSE_HOME names another place") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"{folder}: not writable; WARHORSE_HOME names another place")


@contextlib.contextmanager
def _only_one(file: Path) -> Iterator[None]:
    """Hold a lock that the kernel gives back however this process ends."""
    with file.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError("another `up` of this project is running") from None
        yield


def _url(host: str, port: int) -> str:
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"


def _containers(project: str, url: str, variables: dict[str, str], counts: dict[str, int]) -> int:
    """Start the containers, which go on running, and wait until all are healthy."""
    program = _compose(project, *_override(project, variables, counts))
    # Orphans: instances of an earlier start with a higher count.
    command = [*program, "up", "--detach", "--wait", "--build", "--remove-orphans"]
    code = subprocess.run(command, env=variables, check=False).returncode
    if code == 0:
        _require_containers(program, variables)
        say(f"ready at {url}\n{_example(url)}")
    return code


def _override(project: str, variables: dict[str, str], counts: dict[str, int]) -> list[Path]:
    """A second compose file where some services run several times."""
    if not any(count > 1 for count in counts.values()):
        return []
    services = load_services(COMPOSE_FILE, variables)
    folder = StackPaths.of(project).state
    _make_writable(folder)
    file = folder / "scale.json"  # JSON is YAML
    file.write_text(json.dumps(compose_override(services, counts, COMPOSE_FILE), indent=1))
    return [file]


def _require_containers(program: list[str], variables: dict[str, str]) -> None:
    """Raise UserError where compose says that all went well and an image was not built."""
    wanted = _services(program, variables, "config", "--services")
    running = _services(program, variables, "ps", "--services", "--status", "running")
    if missing := sorted(wanted - running):
        raise UserError(f"not running: {', '.join(missing)}; the output above says why")


def _services(program: list[str], variables: dict[str, str], *command: str) -> set[str]:
    return set(subprocess.check_output([*program, *command], env=variables, text=True).split())


def _variables(arguments: argparse.Namespace) -> dict[str, str]:
    model = arguments.model.expanduser().resolve()
    if not model.is_dir():
        raise UserError(f"--model {arguments.model}: no such folder")
    given = {
        f"WARHORSE_{name.upper().replace('-', '_')}": value
        for name in _setting_flags()
        if (value := getattr(arguments, name.replace("-", "_"))) is not None
    }
    if arguments.docker and ":" in str(model):
        raise UserError(f"--model {model}: a container cannot mount a folder with : in its name")
    if script := given.get("WARHORSE_SCRIPT") or os.environ.get("WARHORSE_SCRIPT"):
        if not Path(script).is_file():
            raise UserError(f"--script {script}: no such file")
        given["WARHORSE_SCRIPT"] = str(Path(script).resolve())
    if not os.environ.get("WARHORSE_SERVED_MODEL_NAME"):
        given.setdefault("WARHORSE_SERVED_MODEL_NAME", model.name)
    own = {"MODEL": str(model), "PORT": str(arguments.port), "HOST": arguments.host}
    if not arguments.docker:
        own |= {"GATEWAY_HOST": arguments.host, "METRICS_HOST": "127.0.0.1"}
    return {**os.environ, **given, **{f"WARHORSE_{key}": value for key, value in own.items()}}


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(f"--port {port} on {host}: {error.strerror}") from error


def _foreground(
    arguments: argparse.Namespace,
    paths: StackPaths,
    variables: dict[str, str],
    counts: dict[str, int],
) -> int:
    try:
        found = scaled(load_services(COMPOSE_FILE, variables), counts, paths.run)
        services = with_metrics_ports(found)
    except (ComposeError, ValueError) as error:
        raise UserError(str(error)) from error
    logging.basicConfig(level=logging.INFO, format="warhorse: %(message)s")
    end_orphans(paths.run, max(service.stop_grace_seconds for service in services.values()))
    shutil.rmtree(paths.logs, ignore_errors=True)
    shutil.rmtree(paths.run, ignore_errors=True)
    me = psutil.Process()
    url = _url(arguments.host, arguments.port)
    targets = metrics_targets(services, url.removeprefix("http://"))
    paths.metrics.write_text(json.dumps(targets, indent=1))
    state = StackState(me.pid, me.create_time(), url, str(variables["WARHORSE_MODEL"]))
    code = asyncio.run(_supervise(Supervisor(services, paths, state), state))
    shutil.rmtree(paths.run, ignore_errors=True)
    if state.failure:
        raise UserError(state.failure)
    return code


async def _supervise(supervisor: Supervisor, state: StackState) -> int:
    running = asyncio.create_task(supervisor.run())
    started = time.monotonic()
    while not state.ready and not running.done():
        await asyncio.sleep(0.05)
    if state.ready:
        say(f"ready in {time.monotonic() - started:.1f} s at {state.url}\n{_example(state.url)}")
    return await running


def _example(url: str) -> str:
    body = '{"messages": [{"role": "user", "content": "What is 23 + 58?"}]}'
    return f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"


def _detach(paths: StackPaths) -> int:
    """Run the same command without --detach in a session of its own; wait until it is ready."""
    paths.file.unlink(missing_ok=True)
    command = [word for word in sys.argv[1:] if word != "--detach"]
    with (paths.state / "up.log").open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "services.common.cli", *command],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and child.poll() is None:
        state = StackState.read(paths.file)
        if state is not None and state.ready:
            say(f"ready at {state.url}\n{_example(state.url)}")
            return 0
        try:
            time.sleep(0.05)
        except KeyboardInterrupt:
            child.terminate()
            child.wait()
            raise
    raise UserError((paths.state / "up.log").read_text().strip().removeprefix("warhorse: "))


def run_down(arguments: argparse.Namespace) -> int:
    """Stop the stack and wait until all its processes are gone."""
    if arguments.docker:
        return run_compose(arguments.project, "down", "--volumes", "--remove-orphans")
    state = StackState.read(StackPaths.of(arguments.project).file)
    if state is None or not state.alive:
        raise UserError("nothing is running")
    supervisor = psutil.Process(state.pid)
    supervisor.send_signal(signal.SIGTERM)
    supervisor.wait(timeout=60)
    say("stopped")
    return 0


def run_logs(arguments: argparse.Namespace) -> int:
    """Copy a service's log to standard output."""
    logs = StackPaths.of(arguments.project).logs
    file = logs / f"{arguments.service}.log"
    if not re.fullmatch(r"[\w-]+", arguments.service) or not file.exists():
        known = ", ".join(sorted(p.stem for p in logs.glob("*.log"))) or "none yet"
        raise UserError(f"no log of {arguments.service!r}; there are: {known}")
    say(file.read_text(errors="replace"))
    return 0


def run_compose(project: str, *command: str, variables: dict[str, str] | None = None) -> int:
    """A compose command on a project. Without `variables` the file's required ones mean nothing."""
    environment = variables or {**os.environ, "WARHORSE_MODEL": "/"}
    program = [*_compose(project), *command]
    return subprocess.run(program, env=environment, check=False).returncode


def _compose(project: str, *overrides: Path) -> list[str]:
    files = [word for file in (COMPOSE_FILE, *overrides) for word in ("--file", str(file))]
    return [*compose_command(), *files, "--project-name", project]


def compose_command() -> list[str]:
    """The compose program of this machine: Docker's plugin, else the one of the environment."""
    docker = shutil.which("docker")
    if (
        docker
        and subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0
    ):
        return [docker, "compose"]
    standalone = Path(sys.executable).with_name("docker-compose")
    if standalone.exists():
        return [str(standalone)]
    raise UserError("no docker compose found; without --docker the services run as processes")
