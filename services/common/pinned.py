"""Page-locking of a mapping for copies between host and GPU, where there is a GPU.

Only this module of `services/common` knows of torch, and only by asking whether it is installed:
processes without it import everything here and get pageable memory.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.common.shm import MappedRegion, Region

_log = logging.getLogger(__name__)

# cuda_runtime_api.h
_HOST_REGISTER_DEFAULT = 0x00
_HOST_REGISTER_READ_ONLY = 0x08
_SUCCESS = 0


class PinnedRegistration:
    """One registration of a whole region's data with the CUDA driver of this process.

    `pinned` says whether it took effect; if not, the region is used pageable and `reason` says
    why. Registered in one call, since a copy must not cross from one registration into another.
    Undone by `close`, at the latest by the region's own `close`, always before it is unmapped; no
    copy may then be in flight.
    """

    def __init__(self, region: Region | MappedRegion) -> None:
        self._address = region.address()
        self._runtime = _cuda_runtime()
        self.pinned = False
        self.reason = ""
        if self._runtime is None:
            self.reason = "no CUDA device in this process"
            _log.info("host memory stays pageable: %s", self.reason)
            return
        self._register(region.nbytes, read_only=region.view.readonly)
        region.before_unmap(self.close)

    def _register(self, nbytes: int, *, read_only: bool) -> None:
        assert self._runtime is not None
        flags = _HOST_REGISTER_READ_ONLY if read_only else _HOST_REGISTER_DEFAULT
        code = int(self._runtime.cudaHostRegister(self._address, nbytes, flags))
        self.pinned = code == _SUCCESS
        if not self.pinned:
            self.reason = f"cudaHostRegister of {nbytes} bytes gave error {code}"
            _log.warning("host memory stays pageable: %s", self.reason)

    def close(self) -> None:
        """Undo the registration. Idempotent."""
        if not self.pinned:
            return
        assert self._runtime is not None
        self.pinned = False
        code = int(self._runtime.cudaHostUnregister(self._address))
        if code != _SUCCESS:
            _log.warning("cudaHostUnregister gave error %d", code)

    def __enter__(self) -> PinnedRegistration:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _cuda_runtime() -> Any | None:
    """torch's handle on the CUDA runtime, or None without torch or without a device."""
    if importlib.util.find_spec("torch") is None:
        return None
    cuda = importlib.import_module("torch.cuda")
    return cuda.cudart() if cuda.is_available() else None
