"""python -m kernels.humming: plan, build or tune the prebuilt kernels.

`build` and `plan` need the package humming-kernels and nvcc or NVRTC, but no card; `tune` needs a
card too. A server needs only what `build` wrote.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from kernels.humming.cards import CARDS, USUAL, Card, card_for
from kernels.humming.runtime import FOLDER
from kernels.humming.shapes import MODELS, SERVED, Shape, shapes_of


def main() -> int:
    arguments = _parser().parse_args()
    card = card_for(arguments.target, arguments.card)
    with tempfile.TemporaryDirectory(prefix="wh-humming-") as scratch:
        from kernels.humming import standin

        standin.install(card, arguments.cache or Path(scratch), arguments.compiler)
        return {"plan": _plan, "build": _build, "tune": _tune}[arguments.action](arguments, card)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kernels.humming", description=__doc__)
    parser.add_argument("action", choices=("plan", "build", "tune"))
    parser.add_argument("--target", type=int, choices=tuple(USUAL), required=True)
    parser.add_argument("--card", choices=tuple(CARDS), help="h200 runs target 80's code")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the folders sm80, ...")
    parser.add_argument(
        "--models", type=lambda text: text.split(","), default=list(SERVED),
        help=f"of {', '.join(MODELS)}; those that are served if not given",
    )  # fmt: skip
    parser.add_argument("--ranks", type=_numbers, default=[1], help="tensor-parallel, such as 1,4")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--compiler", choices=("nvcc", "nvrtc"), help="nvcc if it is found")
    parser.add_argument("--cache", type=Path, help="keeps what is compiled; temporary if not given")
    parser.add_argument("--only", default="", help="tune: cases whose name contains this")
    parser.add_argument("--json", type=Path, help="tune: all that was measured")
    parser.add_argument("--write", action="store_true", help="tune: put the best into tiles.json")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _shapes(arguments: argparse.Namespace) -> list[Shape]:
    found = [s for ranks in arguments.ranks for s in shapes_of(arguments.models, ranks)]
    return list({shape.key: shape for shape in found}.values())


def _plan(arguments: argparse.Namespace, card: Card) -> int:
    from kernels.humming.plan import plan

    kernels = [kernel for shape in _shapes(arguments) for kernel in plan(shape, card)]
    for kernel in kernels:
        print(*kernel.shape.key, kernel.rows_up_to, _short(kernel.tile))
    print(f"{len({kernel.key for kernel in kernels})} kernels, {len(kernels)} entries")
    return 0


def _short(tile: dict[str, object]) -> str:
    names = ("block_shape", "warp_shape", "num_stages", "num_ctas_per_sm", "use_stream_k")
    return " ".join(str(tile[name]) for name in names)


def _build(arguments: argparse.Namespace, card: Card) -> int:
    from kernels.humming.build import build

    manifest = build(_shapes(arguments), card, arguments.out, arguments.workers)
    files = {entry.file for entry in manifest.entries}
    folder = arguments.out / f"sm{card.target}"
    size = sum((folder / file).stat().st_size for file in files)
    print(f"{len(files)} cubins, {size / 1e6:.1f} MB, {len(manifest.entries)} entries in {folder}")
    return 0


def _tune(arguments: argparse.Namespace, card: Card) -> int:
    from kernels.humming.tune import tune

    return tune(arguments, card)


if __name__ == "__main__":
    sys.exit(main())
