"""The command line of `python -m services.engine`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from services.common.logs import LogLevel
from services.common.metrics import HOST_HELP, PORT_HELP
from services.common.tracing import TRACES_HELP


def _help(text: str, **limits: float) -> dict[str, Any]:
    return {"help": text, **limits}


@dataclass(frozen=True)
class EngineFlags:
    """Every setting of the engine service; names are vLLM's where the meaning is the same."""

    model: Path = field(metadata=_help("folder of the checkpoint"))
    run_dir: Path = field(
        default=Path("/run/warhorse"), metadata=_help("folder of the services' sockets")
    )
    instance: str = field(default="engine-0", metadata=_help("name of this replica"))
    listen: str = field(default="", metadata=_help("host:port to serve on besides the Unix socket"))
    metrics_port: int = field(default=0, metadata={"help": PORT_HELP, "min": 0, "max": 65535})
    metrics_host: str = field(default="127.0.0.1", metadata={"help": HOST_HELP})
    otlp_traces_endpoint: str = field(default="", metadata={"help": TRACES_HELP})
    log_level: LogLevel = field(default="info", metadata=_help("least severe log line"))
    grace_seconds: float = field(
        default=10.0, metadata=_help("seconds that running requests get at a stop", min=0)
    )
    served_model_name: tuple[str, ...] = field(
        default=(), metadata=_help("names in requests; default: folder name")
    )
    max_model_len: int | None = field(
        default=None,
        metadata=_help("longest prompt plus output, tokens; default: the model's", min=1),
    )
    max_num_seqs: int | None = field(
        default=None, metadata=_help("sequences computed at once; default: 64", min=1)
    )
    max_num_batched_tokens: int | None = field(
        default=None, metadata=_help("most tokens computed in one step; default: 2048", min=1)
    )
    max_waiting_tokens: int = field(
        default=1 << 20,
        metadata=_help("prompt tokens that may wait before requests are refused", min=1),
    )
    max_logprobs: int = field(
        default=20, metadata=_help("longest list of log-probabilities", min=0)
    )
    enable_prefix_caching: bool = field(
        default=True, metadata=_help("reuse the cache of equal prompt beginnings")
    )
    prefix_cache_retention_interval: int = field(
        default=1024, metadata=_help("tokens between kept state snapshots; 0 keeps none", min=0)
    )
    kv_cache_memory_bytes: int = field(
        default=256 << 20, metadata=_help("bytes of all cache pools", min=1)
    )
    num_kv_tokens: int | None = field(
        default=None, metadata=_help("capacity of the paged pools, tokens", min=1)
    )
    num_state_slots: int | None = field(
        default=None, metadata=_help("slots of each state pool", min=1)
    )
    dtype: Literal["auto", "float32", "bfloat16"] = field(
        default="auto", metadata=_help("type of activations")
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_ds_mla"] = field(
        default="auto",
        metadata=_help(
            "cache rows as computed, or quantised as in training: DeepSeek (fp8_ds_mla is the same "
            "there), index keys of GLM"
        ),
    )
    device: Literal["auto", "cpu", "cuda"] | None = field(
        default="auto", metadata=_help("where the model runs")
    )
    threads: int | None = field(
        default=None, metadata=_help("CPU threads of the model; default: half of the cores", min=1)
    )
    tensor_parallel_size: int = field(default=1, metadata=_help("ranks per stage; only 1 so far"))
    pipeline_parallel_size: int = field(default=1, metadata=_help("stages; only 1 so far"))
    kvcache_address: str = field(
        default="", metadata=_help("gRPC target of the KV store; none runs without")
    )
    offload_address: str = field(
        default="", metadata=_help("gRPC target of the table service; none runs without")
    )
    watchdog_seconds: float = field(
        default=60.0,
        metadata=_help(
            "seconds without a step while there is work before the engine is unhealthy", min=1
        ),
    )
    merge_tokens: bool | None = field(
        default=None,
        metadata=_help(
            "merge the tokens of a request whose reader is busy; default: for a model only"
        ),
    )
    engine: Literal["model", "scripted"] = field(
        default="model", metadata=_help("run the model, or replay --script")
    )
    script: Path | None = field(default=None, metadata=_help("JSON lines of --engine scripted"))
    profile_dir: Path | None = field(
        default=None, metadata=_help("folder for traces of /start_profile; default: none are made")
    )

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) != 1:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is {getattr(self, name)}; only 1 is supported so far")
        if self.engine == "scripted" and self.script is None:
            raise ValueError("--engine scripted needs --script FILE")

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names under which the model is served; the first one is its own."""
        return self.served_model_name or (self.model.resolve().name,)
