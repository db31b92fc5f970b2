"""An engine-like process: attaches all tables, reads every row, then tells its memory.

`python -m tests.offload.reader ADDRESS RUN_DIR FOLDER PART`: prints "attached SUM" after reading
every row (SUM over all bytes), and then, for each line on stdin, "RSS PSS" in KiB of the mappings
of files with PART in their paths, as the kernel gives them in /proc/self/smaps.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch

from services.common.checkpoint import Checkpoint
from services.common.ngram_table import find_tables
from services.engine.runtime.tables import attach_tables

_TOKENS = 4096


def mapping_memory(pid: str, part_of_path: str) -> tuple[int, int]:
    """Rss and Pss, KiB, of all mappings of a file."""
    rss = pss = 0
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("Rss", "Pss") and inside:
            value = int(rest.split()[0])
            rss, pss = (rss + value, pss) if name == "Rss" else (rss, pss + value)
        elif "-" in line.split(" ", 1)[0]:
            inside = part_of_path in line
    return rss, pss


def main(address: str, run_dir: str, folder: str, part_of_path: str) -> None:
    """See the module."""
    with Checkpoint.open(Path(folder)) as checkpoint:
        layouts = find_tables(checkpoint)
    tables = asyncio.run(
        attach_tables(
            address, Path(run_dir), layouts, client_id="reader", device=torch.device("cpu")
        )
    )
    total = 0
    for table in tables.values():
        for start in range(0, table.layout.rows, _TOKENS):
            ids = torch.arange(start, min(start + _TOKENS, table.layout.rows)).unsqueeze(1)
            total += int(table.start_gather(ids).wait().long().sum())
    sys.stdout.write(f"attached {total}\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        rss, pss = mapping_memory("self", part_of_path)
        sys.stdout.write(f"{rss} {pss}\n")
        sys.stdout.flush()
    for table in tables.values():
        table.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
