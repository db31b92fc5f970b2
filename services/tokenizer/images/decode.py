"""From the bytes of an image file to pixels of the model's size, in worker processes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from services.common.workers import WorkerEndedError, WorkerLimits, WorkerPool
from services.tokenizer.images.errors import ImageError
from services.tokenizer.images.sizing import Sizing

_WORKER = "services.tokenizer.images.decode_worker"
# What the costliest kind, a transparent WebP picture, takes with its turned and flattened copies
# (20 were not enough for 8192 x 8192 pixels), and the worker itself.
_BYTES_PER_PIXEL = 24
_WORKER_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What one image may take. max_pixels: of the file, before resizing."""

    seconds: float = 10.0
    max_pixels: int = 1 << 26

    @property
    def memory_bytes(self) -> int:
        """Address space of a worker."""
        return _WORKER_BYTES + _BYTES_PER_PIXEL * self.max_pixels


class ImageDecoder:
    """Workers that decode and resize, started with the first image. Belongs to one event loop."""

    def __init__(self, sizing: Sizing, limits: DecodeLimits, workers: int) -> None:
        self._limits = limits
        self._workers = WorkerPool(
            _WORKER,
            WorkerLimits(limits.seconds, limits.memory_bytes),
            workers,
            ("--max-pixels", str(limits.max_pixels), "--sizing", _sizing_flag(sizing)),
        )

    async def decode(self, data: bytes, detail: str) -> npt.NDArray[np.uint8]:
        """Return uint8 [height, width, 3], RGB, read-only. Raises ImageError."""
        try:
            reply = await self._workers.ask(detail.encode() + b"\n" + data)
        except WorkerEndedError as error:
            seconds = self._limits.seconds
            raise ImageError(
                f"the image takes more than {seconds:g} s or too much memory to decode"
            ) from error
        end = reply.index(b"\n")
        fields: dict[str, Any] = json.loads(reply[:end])
        if "error" in fields:
            raise ImageError(fields["error"])
        pixels = np.frombuffer(reply, np.uint8, offset=end + 1)
        return pixels.reshape(fields["height"], fields["width"], 3)

    async def close(self) -> None:
        """End all workers."""
        await self._workers.close()


def _sizing_flag(sizing: Sizing) -> str:
    fields = asdict(sizing)  # type: ignore[call-overload]  # every sizing is a dataclass
    return json.dumps({"kind": type(sizing).__name__, **fields})
