"""What a process says about itself in every Describe answer."""

from __future__ import annotations

import os
import secrets
from functools import cache
from importlib import metadata
from pathlib import Path

from warhorse.v1 import common_pb2

API_VERSION = "1.0.0"
_PACKAGE = "warhorse"


def new_generation() -> int:
    """A random number, never 0, that tells one life of an owner from the next (63 bits)."""
    return secrets.randbits(63) or 1


def service_info(instance_id: str, generation: int) -> common_pb2.ServiceInfo:
    """Identity, versions and resident memory (bytes) of this process, now."""
    return common_pb2.ServiceInfo(
        api_version=API_VERSION,
        build_version=build_version(),
        instance_id=instance_id,
        generation=generation,
        pid=os.getpid(),
        resident_bytes=resident_bytes(),
    )


@cache
def build_version() -> str:
    """Version of the installed package; `source` when it runs from an uninstalled checkout."""
    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return "source"


def resident_bytes() -> int:
    """Resident memory of this process in bytes, shared pages included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
