"""The page docs/kernels.md, from the results in the tree and the marks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernels.bench import obstacles
from kernels.bench.marks import Marks
from kernels.bench.served import TRITON, served

RESULTS = Path(__file__).with_name("results")
PROFILES = Path(__file__).with_name("profiles")
PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"

HEAD = """# Speed of the kernels

Made by `python -m kernels.bench --table` from `kernels/bench/results` and
`kernels/bench/marks.json`. A result file comes from `python -m kernels.bench`: ceilings, our
kernels, the vendor's library and peers in one process on one card; where it was put together
otherwise, its section says so. The output of every row is checked before it is timed; a wrong one
gets no time.

- **floor**: the largest of the bytes that must move over the copy rate, the operations over the
  bf16 rate that plain Triton reaches on the same path, and the bytes from the host over the rate of
  a copy from there. **%** is floor over time.
- **rate**: of what bounds the row: GB/s of memory, of the bus to the host, or bf16 TFLOP/s.
- **peers**: microseconds, and in brackets their time over ours: above 1 we are faster. "library
  bf16" is a bf16 product of the same shape by the vendor's library, on its own choice of
  instructions.
- **mark**: what the row must reach ("met") and, after the stroke, the best peer's figure ("good");
  percent are of the floor.
- **reached**: the mark by our own kernels, which a server without further packages runs.
- **served by**: the back end that a server with humming-kernels takes for the row's weights, by
  kernels/humming/select.json; where that is humming, with its time and what it reaches: "good" is
  the peer's figure or better. All other rows are served by our kernels.

Times are medians of CUDA graph replays over rotating inputs that exceed the caches.

"""

FOOT = """## How to measure and check

Speed, on a machine with a card; the second line makes a newer card run Ampere's instructions:

```
python -m kernels.bench --json kernels/bench/results/CARD.json
TRITON_OVERRIDE_ARCH=sm80 python -m kernels.bench --json kernels/bench/results/CARD-sm80.json
python -m kernels.bench --table
```

Counters of the rows below their mark, on a card of the marks with Nsight Compute:

```
python -m kernels.bench --profile kernels/bench/results/CARD.json \\
  --json kernels/bench/profiles/CARD.json
```

Code, without a card: every variant compiled for sm80, sm86, sm89 and sm90, with shared memory,
registers and spills (`--cache` keeps the code for a server, `--launches` lists launches of the
benchmark that no variant covers):

```
python -m kernels.aot --verbose
```

Results, on a card: the tests of the kernels, each also in a replayed CUDA graph.

```
pytest tests/kernels
```

Memory errors, and races in shared memory, of every kernel in its replayed graph, on a card with the
CUDA toolkit; and of the plain tests with every tensor in an allocation of its own, so that a read
behind a tensor is found (a graph cannot be captured so):

```
for tool in memcheck racecheck; do
  compute-sanitizer --tool $tool --error-exitcode 9 python -m pytest tests/kernels -m gpu -k graph
done
PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \\
  python -m pytest tests/kernels -m "not gpu" -k triton
```
"""

COLUMNS = (
    "operation", "case", "us", "floor us", "%", "rate", "error", "peers", "mark", "reached",
    "served by", "run",
)  # fmt: skip


def page() -> str:
    """The whole page."""
    marks = Marks()
    sections = "".join(_section(result, marks) for result in _read(RESULTS))
    tables = "".join(obstacles.table(profile) for profile in _read(PROFILES))
    return HEAD + sections + (obstacles.HEAD + tables if tables else "") + FOOT


def write_page() -> None:
    """Rewrite docs/kernels.md."""
    PAGE.write_text(page())


def missed(result: dict[str, Any]) -> list[list[str]]:
    """[operation, case] of the rows of `result`, JSON of the benchmark, below their mark."""
    marks = Marks()
    return [
        [row["operation"], row["case"]]
        for row in result["rows"]
        if _reached(row, row, marks) == "missed"
    ]


def _reached(row: dict[str, Any], figures: dict[str, Any], marks: Marks) -> str:
    """What figures reach of the row's mark: good, met, missed or refused."""
    if "refused" in figures:
        return "refused"
    return marks.of(row["operation"], row["case"]).verdict(figures)


def _read(folder: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(path.read_text()) for path in sorted(folder.glob("*.json")))


def _section(result: dict[str, Any], marks: Marks) -> str:
    judged = marks.hold_for(result)
    rows = [_cells(row, result["ceilings"], marks if judged else None) for row in result["rows"]]
    parts = [f"## {result['card']}, {result['path']}", _setting(result)]
    parts += [result["note"]] if "note" in result else []
    parts += [_tally(rows, marks)] if judged else []
    return "\n\n".join([*parts, _table(rows)]) + "\n\n"


def _setting(result: dict[str, Any]) -> str:
    top = result["ceilings"]
    host = f", from the host {top['host_gbs']:.0f} GB/s" if "host_gbs" in top else ""
    return (
        f"`{result['command']}`; torch {result['torch']}, Triton {result['triton']}. Ceilings: "
        f"copy {top['copy_gbs']:.0f} GB/s{host}, bf16 by Triton {top['mma_tflops']:.0f} TFLOP/s, "
        f"by the library {top['library_tflops']:.0f} TFLOP/s."
    )


def _tally(rows: list[dict[str, str]], marks: Marks) -> str:
    own = _count([row["reached"] for row in rows])
    peers = [row["served by"].split()[-1] for row in rows if row["served by"] != TRITON]
    others = f" Served by humming: {_count(peers)}." if peers else ""
    return f"Marks: {own}.{others} Their source: {marks.source}"


def _count(verdicts: list[str]) -> str:
    counts = Counter(verdicts)
    return ", ".join(f"{counts[name]} {name}" for name in ("good", "met", "missed", "refused"))


def _table(rows: list[dict[str, str]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    lines += [[row.get(name, "") for name in COLUMNS] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: dict[str, Any], ceilings: dict[str, float], marks: Marks | None) -> dict[str, str]:
    peers = row.get("peers", {})
    cells = {
        "operation": row["operation"],
        "case": row["case"],
        "run": str(row.get("run", "")),
        "peers": ", ".join(_peer(name, figures, row) for name, figures in peers.items()),
    }
    if marks:
        mark = marks.of(row["operation"], row["case"])
        cells |= {"mark": str(mark), "reached": _reached(row, row, marks)}
        cells["served by"] = _served_by(row, marks)
    if "refused" in row:
        return cells | {"us": f"refused: {row['refused']}".replace("|", "/")}
    return cells | {
        "us": f"{row['us']:.1f}",
        "floor us": f"{row['floor_us']:.1f}",
        "%": f"{100 * row['fraction']:.0f}",
        "rate": _rate(row, ceilings),
        "error": f"{row['error']:.1e}" if "error" in row else f"< {row['error_below']:.1e}",
    }


def _served_by(row: dict[str, Any], marks: Marks) -> str:
    """The back end; a peer with its time and what it reaches."""
    name, figures = served(row)
    if figures is row:
        return name
    time = f"{figures['us']:.1f} us, " if "us" in figures else ""
    return f"{name}: {time}{_reached(row, figures, marks)}"


def _rate(row: dict[str, Any], ceilings: dict[str, float]) -> str:
    """Of what bounds the row: the ceiling that it is nearest to."""
    used = {
        f"{row['gbs']:.0f} GB/s": row["gbs"] / ceilings["copy_gbs"],
        f"{row['tflops']:.0f} TFLOP/s": row["tflops"] / ceilings["mma_tflops"],
    }
    if row.get("host_gbs"):
        used[f"{row['host_gbs']:.1f} GB/s host"] = row["host_gbs"] / ceilings["host_gbs"]
    return max(used, key=lambda name: used[name])


def _peer(name: str, figures: dict[str, Any], row: dict[str, Any]) -> str:
    if "refused" in figures:
        return f"{name} refused ({figures['refused']})".replace("|", "/")
    ratio = f" ({figures['us'] / row['us']:.2f})" if "us" in row else ""
    return f"{name} {figures['us']:.1f}{ratio}"
