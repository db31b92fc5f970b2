"""Settings of the offload service."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from services.common.logs import LogLevel
from services.common.metrics import HOST_HELP, PORT_HELP
from services.common.tracing import TRACES_HELP

Storage = Literal["memory", "file"]


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """See the help texts."""

    model: Path = field(metadata={"help": "Checkpoint folder"})
    run_dir: Path = field(
        default=Path("/run/warhorse"), metadata={"help": "Directory of all sockets"}
    )
    instance: str = field(default="offload-0", metadata={"help": "Name of this instance"})
    listen: str = field(default="", metadata={"help": "Further TCP address, host:port"})
    table_storage: Storage = field(
        default="memory",
        metadata={
            "help": "Where rows are read from: a copy in the table directory, or the checkpoint's "
            "own files, which needs no memory but is slower"
        },
    )
    table_dir: Path | None = field(
        default=None,
        metadata={
            "help": "Directory of the table files: tmpfs or hugetlbfs keeps them in memory, a disk "
            "serves them from the page cache; none means <run-dir>/offload"
        },
    )
    metrics_port: int = field(default=0, metadata={"help": PORT_HELP, "min": 0, "max": 65535})
    metrics_host: str = field(default="127.0.0.1", metadata={"help": HOST_HELP})
    otlp_traces_endpoint: str = field(default="", metadata={"help": TRACES_HELP})
    log_level: LogLevel = field(
        default="info", metadata={"help": "Least severe level that is logged"}
    )

    @property
    def tables(self) -> Path:
        """Directory of this instance's table files."""
        return (self.table_dir or self.run_dir / "offload") / f"{self.instance}.tables"
