"""Settings of the kvcache service. Names follow LMCache's server where it has the same setting."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from services.common.logs import LogLevel
from services.common.metrics import HOST_HELP, PORT_HELP
from services.common.tracing import TRACES_HELP
from services.kvcache.storage import EvictionPolicyName, StorageConfig

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class KvCacheConfig:
    """See the help texts."""

    run_dir: Path = field(
        default=Path("/run/warhorse"), metadata={"help": "Directory of all sockets"}
    )
    instance: str = field(default="kvcache-0", metadata={"help": "Name of this instance"})
    listen: str = field(default="", metadata={"help": "Further TCP address, host:port"})
    l1_size_gb: float = field(
        default=1.0, metadata={"help": "Size of the arena in host memory, GiB", "min": 0.001}
    )
    l1_align_bytes: int = field(
        default=4096, metadata={"help": "Alignment of objects in the arena, bytes", "min": 256}
    )
    eviction_policy: EvictionPolicyName = field(
        default="LRU", metadata={"help": "What is evicted first; noop evicts nothing"}
    )
    eviction_trigger_watermark: float = field(
        default=0.8,
        metadata={"help": "Use of the arena above which objects are evicted in the background"},
    )
    eviction_ratio: float = field(
        default=0.2, metadata={"help": "Part of the objects that a background eviction drops"}
    )
    reservation_grace_seconds: float = field(
        default=10.0,
        metadata={"help": "Time before slots that a lost client has reserved are freed", "min": 0},
    )
    silence_seconds: float = field(
        default=15.0,
        metadata={"help": "A session without a ping for this long is closed", "min": 0.1},
    )
    metrics_port: int = field(default=0, metadata={"help": PORT_HELP, "min": 0, "max": 65535})
    metrics_host: str = field(default="127.0.0.1", metadata={"help": HOST_HELP})
    otlp_traces_endpoint: str = field(default="", metadata={"help": TRACES_HELP})
    log_level: LogLevel = field(
        default="info", metadata={"help": "Least severe level that is logged"}
    )

    def __post_init__(self) -> None:
        if self.arena_bytes < 16 * self.storage.align_bytes:
            raise ValueError(
                f"l1_size_gb {self.l1_size_gb} must hold at least 16 blocks of l1_align_bytes "
                f"{self.l1_align_bytes}"
            )

    @property
    def arena_bytes(self) -> int:
        """Size of the arena, a multiple of the alignment."""
        return int(self.l1_size_gb * GIB) // self.l1_align_bytes * self.l1_align_bytes

    @property
    def storage(self) -> StorageConfig:
        """The part that the arena needs."""
        return StorageConfig(
            align_bytes=self.l1_align_bytes,
            eviction_policy=self.eviction_policy,
            eviction_trigger_watermark=self.eviction_trigger_watermark,
            eviction_ratio=self.eviction_ratio,
        )
