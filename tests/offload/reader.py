"""An engine-like process: attaches the table, reads every row, then tells its memory.

`python -m tests.offload.reader ADDRESS RUN_DIR FOLDER`: prints "attached SUM" after reading every
row (SUM over all bytes), and then, for each line on stdin, "RSS PSS" of the table's mapping in
KiB as the kernel gives them in /proc/self/smaps.
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


def main(address: str, run_dir: str, folder: str) -> None:
    """See the module."""
    with Checkpoint.open(Path(folder)) as checkpoint:
        (layout,) = find_tables(checkpoint)
    (table,) = asyncio.run(
        attach_tables(
            address, Path(run_dir), [layout], client_id="reader", device=torch.device("cpu")
        )
    ).values()
    total = 0
    for start in range(0, layout.rows, _TOKENS):
        ids = torch.arange(start, min(start + _TOKENS, layout.rows)).unsqueeze(1)
        total += int(table.start_gather(ids).wait().long().sum())
    sys.stdout.write(f"attached {total}\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        rss, pss = mapping_memory("self", layout.name)
        sys.stdout.write(f"{rss} {pss}\n")
        sys.stdout.flush()
    table.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
