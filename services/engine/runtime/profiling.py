"""Traces of the engine's steps, in the format of Chrome's and Perfetto's viewers."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from warhorse.v1.common_pb2 import ErrorReason

from services.engine.scheduler.messages import RequestRefused

logger = logging.getLogger(__name__)


class StepProfiler:
    """Records what the core's thread and its devices do. One caller, the core's thread.

    `folder` receives the traces; None: nothing is ever recorded.
    """

    def __init__(self, folder: Path | None, instance: str) -> None:
        self._folder = folder
        self._instance = instance
        self._profile: profile | None = None

    def start(self) -> None:
        """Begin to record. Raises RequestRefused without a folder, and while recording."""
        if self._folder is None:
            reason = ErrorReason.ERROR_REASON_UNSUPPORTED
            raise RequestRefused(reason, "the engine was started without --profile-dir")
        if self._profile is not None:
            raise _wrong("a trace is being recorded already")
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self) -> str:
        """Write the trace; the name of its file in the folder. Raises RequestRefused."""
        if self._profile is None or self._folder is None:
            raise _wrong("no trace is being recorded")
        recorded, self._profile = self._profile, None
        recorded.stop()
        name = f"{self._instance}-{time.time_ns() // 1_000_000}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(self._folder / name))
        except (OSError, RuntimeError) as error:
            logger.error("no trace was written: %s", error)
            reason = ErrorReason.ERROR_REASON_INTERNAL
            raise RequestRefused(reason, "the trace could not be written") from error
        logger.info("trace written", extra={"trace": name})
        return name


def _wrong(message: str) -> RequestRefused:
    return RequestRefused(ErrorReason.ERROR_REASON_INVALID_FIELD, message, field="start")
