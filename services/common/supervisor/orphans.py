"""Services that outlive their supervisor: they were told to stop, and may still be draining."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

KILL_SECONDS = 5.0


def end_orphans(run_dir: Path, grace_seconds: float) -> int:
    """End the services of an earlier run in `run_dir`; returns how many there were.

    A service removes its sockets when it ends, by name, so a new one in the same folder must not
    start before. Call it only while no supervisor of this folder runs.
    """
    found = [process for process in psutil.process_iter() if _serves(process, run_dir)]
    if found:
        log.warning("waiting for %d processes of an earlier run to end", len(found))
    for process in found:
        _signal(process, kill=False)
    _, left = psutil.wait_procs(found, timeout=grace_seconds)
    for process in left:
        _signal(process, kill=True)
    psutil.wait_procs(left, timeout=KILL_SECONDS)
    return len(found)


def _serves(process: psutil.Process, run_dir: Path) -> bool:
    """Whether this is `python -m services.X` with that run directory."""
    try:
        flag, module = (*process.cmdline()[1:3], "", "")[:2]
        if flag != "-m" or not module.startswith("services.") or "common" in module:
            return False
        return process.environ().get("WARHORSE_RUN_DIR") == str(run_dir)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.NoSuchProcess:
        return
