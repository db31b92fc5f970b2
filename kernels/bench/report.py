"""The table of docs/kernels.md, from the results in the tree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"

HEAD = """# Speed of the kernels

Made by `python -m kernels.bench --table` from `kernels/bench/results`. A result file comes from
`python -m kernels.bench`: ceilings, our kernels, the vendor's library and peers in one process on
one card; where it was put together otherwise, its section says so. A run ends with an error at the
first row whose output is wrong.

Floor: the larger of the bytes that must move over the copy rate and the operations over the bf16
rate that plain Triton reaches on the same path. "%" is floor over time. Times are medians of CUDA
graph replays over rotating inputs that exceed the caches. "library bf16" is a bf16 product of the
same shape by the vendor's library, on its own choice of instructions.
"""


def page() -> str:
    """The whole page."""
    sections = [_section(json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    return "\n".join([HEAD, *sections])


def write_page() -> None:
    """Rewrite docs/kernels.md."""
    PAGE.write_text(page())


def _section(result: dict[str, Any]) -> str:
    ceilings = result["ceilings"]
    lines = [
        f"## {result['card']}, {result['path']}",
        "",
        f"`{result['command']}`; torch {result['torch']}, Triton {result['triton']}. "
        f"Ceilings: copy {ceilings['copy_gbs']:.0f} GB/s, bf16 by Triton "
        f"{ceilings['mma_tflops']:.0f} TFLOP/s, by the library "
        f"{ceilings['library_tflops']:.0f} TFLOP/s.",
        "",
        *([result["note"], ""] if "note" in result else []),
        "| operation | case | us | floor us | % | GB/s | TFLOP/s | error | peers: us (%) | run |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [_line(row) for row in result["rows"]] + [""])


def _line(row: dict[str, Any]) -> str:
    head = f"| {row['operation']} | {row['case']}"
    peers = ", ".join(_peer(name, figures) for name, figures in row.get("peers", {}).items())
    if "refused" in row:
        return f"{head} | refused: {row['refused']} | | | | | | {peers} | {row.get('run', '')} |"
    error = f"{row['error']:.1e}" if "error" in row else f"< {row['error_below']:.1e}"
    return (
        f"{head} | {row['us']:.1f} | {row['floor_us']:.1f} | {100 * row['fraction']:.0f} "
        f"| {row['gbs']:.0f} | {row['tflops']:.0f} | {error} | {peers} | {row.get('run', '')} |"
    )


def _peer(name: str, figures: dict[str, Any]) -> str:
    if "refused" in figures:
        return f"{name} refused ({figures['refused']})"
    return f"{name} {figures['us']:.1f} ({100 * figures['fraction']:.0f})"
