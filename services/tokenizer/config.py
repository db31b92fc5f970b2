"""Settings of the tokenizer service."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from services.common.logs import LogLevel
from services.common.metrics import HOST_HELP, PORT_HELP
from services.common.tracing import TRACES_HELP
from services.tokenizer.images.decode import DecodeLimits
from services.tokenizer.images.fetch import FetchLimits
from services.tokenizer.images.publish import CacheLimits
from services.tokenizer.images.reader import ImageLimits
from services.tokenizer.rendering.pool import RenderLimits

ToolCallRecovery = Literal["repair", "strict"]


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
    tool_call_recovery: ToolCallRecovery = field(
        default="repair",
        metadata={"help": "Broken tool-call markup: make calls where it is safe, or none"},
    )
    reasoning_effort_map: str = field(
        default="",
        metadata={"help": "Other meanings of reasoning_effort: name=value,...; unset: no effort"},
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
    images_per_request: int = field(
        default=32,
        metadata={"help": "Most images of one request; 0: none are taken", "min": 0, "max": 1024},
    )
    allow_image_urls: bool = field(
        default=False,
        metadata={"help": "Fetch images from http(s) URLs of public addresses, not data URLs only"},
    )
    image_max_bytes: int = field(
        default=20 << 20, metadata={"help": "Largest image file, bytes", "min": 1, "max": 1 << 30}
    )
    image_max_pixels: int = field(
        default=1 << 26,
        metadata={"help": "Most pixels of an image file", "min": 1, "max": 1 << 29},
    )
    image_workers: int = field(
        default=2, metadata={"help": "Processes that decode images", "min": 1, "max": 64}
    )
    image_decode_timeout: float = field(
        default=10.0,
        metadata={"help": "Seconds after which decoding is ended", "min": 0.05, "max": 300},
    )
    image_fetch_timeout: float = field(
        default=10.0,
        metadata={"help": "Seconds after which fetching is ended", "min": 0.05, "max": 300},
    )
    image_cache_mb: int = field(
        default=512,
        metadata={"help": "Shared memory for decoded images, MiB", "min": 64, "max": 1 << 20},
    )
    image_cache_seconds: float = field(
        default=60.0,
        metadata={"help": "A decoded image is kept at least so long after its use", "min": 0},
    )
    metrics_port: int = field(default=0, metadata={"help": PORT_HELP, "min": 0, "max": 65535})
    metrics_host: str = field(default="127.0.0.1", metadata={"help": HOST_HELP})
    otlp_traces_endpoint: str = field(default="", metadata={"help": TRACES_HELP})
    log_level: LogLevel = field(
        default="info", metadata={"help": "Least severe level that is logged"}
    )

    @property
    def limits(self) -> RenderLimits:
        """Limits of one rendering."""
        return RenderLimits(seconds=self.render_timeout, memory_bytes=self.render_memory_mb << 20)

    @property
    def image_limits(self) -> ImageLimits:
        """Limits of the images of one request and of all together."""
        fetching = FetchLimits(self.image_fetch_timeout, self.image_max_bytes)
        return ImageLimits(
            per_request=self.images_per_request,
            max_bytes=self.image_max_bytes,
            decoding=DecodeLimits(self.image_decode_timeout, self.image_max_pixels),
            fetching=fetching if self.allow_image_urls else None,
            caching=CacheLimits(self.image_cache_mb << 20, self.image_cache_seconds),
            workers=self.image_workers,
        )
