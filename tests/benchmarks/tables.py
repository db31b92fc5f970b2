"""N-gram tables in both storages: starts, memory, gathers, printed with the method.

    python -m tests.benchmarks.tables [--gib 1] [--table-dir /dev/shm]

Two Engram tables with rows of 264 bytes, as in the released model, together --gib GiB, are written
to the temporary directory. For each storage: a first start (the checkpoint's pages not in memory),
a restart that takes over, the service's memory as the kernel gives it (`own` is private, the rest
shared or page cache), and the table's bytes in the table directory. Gathers are those of one engine
through its own mapping, from the call to the rows, of random rows, 24 a token; medians, but one
only of `cold` gathers, whose pages are not in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from services.common.checkpoint import Checkpoint
from services.common.ngram.layout import TableLayout
from services.common.ngram_table import find_tables
from services.engine.runtime.tables import MappedTable, attach_tables
from services.offload.config import Storage
from tests.offload.engram import HEADS, LAYERS, make_engram
from tests.service_process import RunDir, ServiceProcess

FULL_NAME = "warhorse.v1.OffloadService"
ROW_BYTES = 264
ROWS_PER_TOKEN = 24
TOKENS = (1, 64, 4096)
ROUNDS = 15
MIB = 1 << 20


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="wh-") as folder:
        model = Path(folder)
        base = int(options.gib * (1 << 30)) // (ROW_BYTES * HEADS * len(LAYERS))
        make_engram(model, base=base, values=256)
        with Checkpoint.open(model) as checkpoint:
            layouts = find_tables(checkpoint)
        _say(f"tables: {sum(t.nbytes for t in layouts) / MIB:.0f} MiB")
        for storage in ("memory", "file"):
            _measure(model, layouts, storage, options.table_dir)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--table-dir", type=Path, default=Path("/dev/shm"))
    return parser.parse_args()


def _measure(
    model: Path, layouts: tuple[TableLayout, ...], storage: Storage, table_dir: Path
) -> None:
    with _directory(table_dir) as (run_dir, tables):
        flags = ["--model", str(model), "--table-storage", storage, "--table-dir", str(tables)]
        service = ServiceProcess("offload", FULL_NAME, run_dir.path, flags)
        nbytes = sum(t.nbytes for t in layouts)
        _forget(model)
        seconds = _started(service)
        _say(f"{storage}: first start {seconds:.2f} s, {nbytes / seconds / 1e9:.2f} GB/s")
        service.kill()
        _say(f"{storage}: restart {_started(service):.2f} s")
        memory = psutil.Process(service.pid).memory_full_info()
        kept = sum(p.stat().st_size for p in tables.rglob("*") if p.is_file())
        _say(
            f"{storage}: service own {memory.uss / MIB:.0f} MiB, table directory "
            f"{kept / MIB:.0f} MiB"
        )
        for tokens in TOKENS:
            if storage == "file":
                _forget(model)
                _say(
                    f"file: gather of {tokens} tokens, cold: {_gather(service, layouts, tokens, 1)}"
                )
                _warm(model)
            _say(f"{storage}: gather of {tokens} tokens: {_gather(service, layouts, tokens)}")
        service.stop()


@contextmanager
def _directory(parent: Path) -> Iterator[tuple[RunDir, Path]]:
    run_dir = RunDir()
    with tempfile.TemporaryDirectory(prefix="wh-", dir=parent) as tables:
        yield run_dir, Path(tables)
    run_dir.close()


def _started(service: ServiceProcess) -> float:
    before = time.perf_counter()
    service.start(3600.0)
    return time.perf_counter() - before


def _gather(
    service: ServiceProcess, layouts: tuple[TableLayout, ...], tokens: int, rounds: int = ROUNDS
) -> str:
    """Of one table, with other rows in every round."""
    attached = asyncio.run(
        attach_tables(
            service.address, service.run_dir, layouts, client_id="b", device=torch.device("cpu")
        )
    )
    table = attached[layouts[0].name]
    _timed(table, 20, seed=-1)  # starts the threads
    taken = statistics.median(_timed(table, tokens, seed) for seed in range(rounds))
    for each in attached.values():
        each.close()
    return f"{taken * 1e6:.0f} us, {taken * 1e6 / tokens:.1f} us a token"


def _timed(table: MappedTable, tokens: int, seed: int) -> float:
    generator = torch.Generator().manual_seed((tokens << 8) + seed)
    ids = torch.randint(0, table.layout.rows, (tokens, ROWS_PER_TOKEN), generator=generator)
    before = time.perf_counter()
    table.start_gather(ids).wait()
    return time.perf_counter() - before


def _forget(model: Path) -> None:
    """Drop the files' pages from the page cache; those mapped by anyone stay."""
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _warm(model: Path) -> None:
    """Read the files, so that the page cache holds them."""
    for path in model.glob("*.safetensors"):
        path.read_bytes()


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
