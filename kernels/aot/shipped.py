"""Triton's cache in an image that cannot be written: what it ships, before a folder of its own.

TRITON_CACHE_MANAGER=kernels.aot.shipped:ShippedCache makes Triton use it. WARHORSE_TRITON_CACHE is
the folder that `python -m kernels.aot --cache` filled, at the path where it was filled, and
TRITON_CACHE_DIR one that can be written: the code of launches that were not shipped.
"""

from __future__ import annotations

import os

from triton.runtime.cache import FileCacheManager

VARIABLE = "WARHORSE_TRITON_CACHE"


class ShippedCache(FileCacheManager):  # type: ignore[misc]
    """One entry of the cache: reads those that are shipped, writes others."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override, dump)
        folder = os.environ.get(VARIABLE)
        if folder and not (override or dump) and os.path.isdir(os.path.join(folder, key)):
            self.cache_dir = os.path.join(folder, key)

    def put(self, data: str | bytes, filename: str, binary: bool = True) -> str:
        """Write a file of an entry that is not shipped in full.

        RuntimeError where it is shipped: the folder is another version's.
        """
        if self.cache_dir != os.path.dirname(self.lock_path):
            raise RuntimeError(f"{self.cache_dir} lacks {filename}: built by another version?")
        path: str = super().put(data, filename, binary)
        return path
