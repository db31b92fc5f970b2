"""Where a local stack keeps its state, and the file that tells other commands about it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class StackPaths:
    """Folders of one project (a named local stack)."""

    state: Path
    run: Path

    @classmethod
    def of(cls, project: str, home: Path | None = None) -> StackPaths:
        """State below `home` or .warhorse of the checkout; sockets on tmpfs, with short paths."""
        home = home or Path(os.environ.get("WARHORSE_HOME") or ROOT / ".warhorse")
        state = home / project
        digest = hashlib.sha256(str(state.resolve()).encode()).hexdigest()[:10]
        return cls(state=state, run=_runtime_base() / f"warhorse-{os.getuid()}-{digest}")

    @property
    def file(self) -> Path:
        """The supervisor's report."""
        return self.state / "supervisor.json"

    @property
    def metrics(self) -> Path:
        """Addresses of all metrics, in the form of Prometheus' file_sd_config."""
        return self.state / "metrics.json"

    @property
    def logs(self) -> Path:
        """One file per process."""
        return self.state / "logs"


@dataclass(slots=True)
class ServiceState:
    """One service as the supervisor sees it."""

    service: str
    pid: int = 0
    healthy: bool = False
    restarts: int = 0
    last_exit: int | None = None


@dataclass(slots=True)
class StackState:
    """What the supervisor writes whenever something changes."""

    pid: int
    started: float  # of the supervisor process, as psutil gives it
    url: str
    model: str
    ready: bool = False
    failure: str = ""
    services: list[ServiceState] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Replace the file at once, so that a reader never sees half of it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1))
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> StackState | None:
        """The last report, or None when there is none, or none that this version wrote."""
        if not path.exists():
            return None
        try:
            raw = json.loads(path.read_text())
            return cls(**{**raw, "services": [ServiceState(**s) for s in raw["services"]]})
        except (ValueError, TypeError, KeyError):
            return None

    @property
    def alive(self) -> bool:
        """Whether the supervisor that wrote this still runs (its pid was not reused)."""
        try:
            process = psutil.Process(self.pid)
            running = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
            return running and abs(process.create_time() - self.started) < 1.0
        except psutil.NoSuchProcess:
            return False


def _runtime_base() -> Path:
    shm = Path("/dev/shm")
    candidates = [os.environ.get("XDG_RUNTIME_DIR"), shm if os.access(shm, os.W_OK) else None]
    return Path(next((c for c in candidates if c), tempfile.gettempdir()))
