"""Owner or user of a region in a process of its own; both wait to be killed.

owner RUN_DIR NAME NBYTES KIND    KIND: shared (users write) or table (sealed, 0x5A bytes)
user  RUN_DIR                     reads a reference (hex) from standard input, touches all of it
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from warhorse.v1 import tensor_pb2

from services.common.broker import RegionBroker
from services.common.shm import Region, open_region


def owner(run_dir: str, name: str, nbytes: str, kind: str) -> None:
    broker = RegionBroker(Path(run_dir) / "offload" / "offload-0.fd", name)
    region = Region.create(int(nbytes), owner=name, read_only_after=kind == "table")
    region.array("u1")[:] = 0x5A
    if kind == "table":
        region.seal_read_only()
    print(broker.publish(region).SerializeToString().hex(), flush=True)
    time.sleep(60)


def user(run_dir: str) -> None:
    ref = tensor_pb2.Region.FromString(bytes.fromhex(sys.stdin.readline().strip()))
    mapped = open_region(ref, Path(run_dir))
    print(int(mapped.array("u1").astype("u8").sum()), flush=True)
    sys.stdin.readline()
    print(int(mapped.array("u1").astype("u8").sum()), flush=True)
    time.sleep(60)


if __name__ == "__main__":
    {"owner": owner, "user": user}[sys.argv[1]](*sys.argv[2:])
