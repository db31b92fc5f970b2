"""The table of docs/kernels.md, from the results in the tree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"

HEAD = """# Speed of the kernels

Made by `python -m kernels.bench --table` from `kernels/bench/results`. Each result file is one
run of `python -m kernels.bench`: ceilings, our kernels, the vendor's library and peers in the same
process on the same card. A row is kept only if its kernel's output was right in that run.

Floor: the larger of the weights' bytes over the copy rate and the operations over the bf16 rate
that plain Triton reaches on the same path. "% of floor" is floor over time. Times are medians of
CUDA graph replays over rotating weights that exceed the caches. "library" is a bf16 product of
the same shape by the vendor's library, on its own choice of instructions.
"""


def write_page() -> None:
    """Rewrite docs/kernels.md."""
    sections = [_section(json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]
    PAGE.write_text("\n".join([HEAD, *sections]))


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
        "| weights | rows | us | floor us | % of floor | GB/s | TFLOP/s | error | peer us "
        "| library us |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [_line(row) for row in result["rows"]] + [""])


def _line(row: dict[str, Any]) -> str:
    peer = f"{row['peer']} {row['peer_us']:.1f}" if "peer_us" in row else "-"
    return (
        f"| {row['case']} | {row['rows']} | {row['us']:.1f} | {row['floor_us']:.1f} "
        f"| {100 * row['fraction']:.0f} | {row['gbs']:.0f} | {row['tflops']:.0f} "
        f"| {row['error']:.1e} | {peer} | {row['library_bf16_us']:.1f} |"
    )
