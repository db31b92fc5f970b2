"""Settings of the tokenizer service."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from services.common.logs import LogLevel
from services.tokenizer.rendering.pool import RenderLimits


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """Command line and environment of `python -m services.tokenizer`."""

    model: Path = field(metadata={"help": "Checkpoint folder: config.json and tokenizer.json"})
    run_dir: Path = field(
        default=Path("/run/warhorse"), metadata={"help": "Directory of the sockets of this host"}
    )
    instance: str = field(
        default="tokenizer-0", metadata={"help": "Name of this process among its replicas"}
    )
    listen: str = field(default="", metadata={"help": "Further TCP address, host:port"})
    served_model_name: str = field(
        default="", metadata={"help": "Name of the model; empty: the folder's name"}
    )
    max_model_len: int = field(
        default=0,
        metadata={"help": "Longest prompt plus output, tokens; 0: the checkpoint's", "min": 0},
    )
    tool_call_parser: str = field(
        default="", metadata={"help": "Tool-call parser; empty: the checkpoint's; none: off"}
    )
    reasoning_parser: str = field(
        default="", metadata={"help": "Reasoning parser; empty: the checkpoint's; none: off"}
    )
    chat_template: Path | None = field(
        default=None, metadata={"help": "Chat template file instead of the checkpoint's"}
    )
    render_workers: int = field(
        default=1,
        metadata={"help": "Processes that render the chat template", "min": 1, "max": 64},
    )
    render_timeout: float = field(
        default=5.0,
        metadata={"help": "Seconds after which a rendering is ended", "min": 0.05, "max": 300},
    )
    render_memory_mb: int = field(
        default=2048,
        metadata={"help": "Address space of a rendering process, MiB", "min": 256, "max": 65536},
    )
    log_level: LogLevel = field(
        default="info", metadata={"help": "Least severe level that is logged"}
    )

    @property
    def limits(self) -> RenderLimits:
        """Limits of one rendering."""
        return RenderLimits(seconds=self.render_timeout, memory_bytes=self.render_memory_mb << 20)
