"""Which kernels a build makes: for each shape, tiles for ranges of rows.

The tile is humming's own choice for a card, but where tiles.json has one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from kernels.humming.cards import Card
from kernels.humming.forms import FORMS
from kernels.humming.shapes import Shape

TABLE = Path(__file__).with_name("tiles.json")
# Most rows of a kernel, and those that its tile is chosen for: rows of x for a matrix, rows of an
# expert on average for a stack (6 of 256 experts for one token: 0.023).
LIMITS: dict[str, tuple[tuple[float | None, float], ...]] = {
    "dense": (
        (8, 1), (16, 16), (32, 32), (64, 64), (128, 128), (256, 256), (1024, 1024), (None, 4096),
    ),
    "stack": (
        (0.05, 0.0235), (0.25, 0.19), (7, 1.5), (14, 12), (28, 24), (64, 48), (128, 96),
        (None, 192),
    ),
}  # fmt: skip
# Of cards that were not measured. An H200 with Ampere's instructions stands for an A100.
MEASURED_FOR = {"a100": "h200", "rtx3090": "a6000"}
# Shapes that were not measured take the tiles of one that was: the same form, sizes near.
LIKE: dict[tuple[str, str, int, int], tuple[str, str, int, int]] = {
    ("stack", "mxfp4", 4608, 5120): ("stack", "mxfp4", 4096, 4096),
    ("stack", "mxfp4", 5120, 2304): ("stack", "mxfp4", 4096, 2048),
}
# What a tile of humming has beyond its TuningConfig.
NOT_IN_TILE = ("num_sms", "use_f16_accum")


@dataclass(frozen=True)
class Planned:
    """A kernel to be made: `config` has the arguments of HummingKernel."""

    shape: Shape
    rows_up_to: float | None
    tile: dict[str, Any]
    config: dict[str, Any]

    @property
    def key(self) -> str:
        """Equal for kernels of the same code."""
        return json.dumps(self.config, sort_keys=True, default=str)


def rows_of(shape: Shape, sample: float) -> int:
    """Rows of a product: of x, or pairs of all experts."""
    return max(1, round(sample * shape.experts)) if shape.experts else int(sample)


def planned(shape: Shape, rows_up_to: float | None, tile: dict[str, Any]) -> Planned:
    """A kernel with a given tile."""
    compute = {"gemm_type": "indexed" if shape.gemm == "stack" else "dense"}
    layer = json.loads(layer_config(shape).to_str())
    layer.pop("sublayer_name", None)
    config = layer | compute | {key: _tuples(value) for key, value in tile.items()}
    return Planned(shape, rows_up_to, tile, config)


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def weight_schema(form: str) -> Any:
    """humming's HummingWeightSchema of a form."""
    schema = dict(FORMS[form].schema)
    dtypes = import_module("humming").dtypes
    for name in ("b_dtype", "bs_dtype"):
        if name in schema:
            schema[name] = dtypes.DataType.from_str(schema[name])
    return import_module("humming.schema").HummingWeightSchema(**schema)


@cache
def layer_config(shape: Shape) -> Any:
    """humming's LayerConfig of a shape."""
    weight = weight_schema(shape.form)
    return import_module("humming.transform").prepare_layer_config(
        shape.n, shape.k, weight, num_experts=shape.experts or None, torch_dtype=torch.bfloat16
    )


def own_choice(shape: Shape, sample: float) -> dict[str, Any]:
    """The tile that humming chooses for the card that it sees."""
    choose = import_module("humming.tune").get_heuristics_config
    gemm = "indexed" if shape.gemm == "stack" else "dense"
    tile = choose(layer_config(shape), shape_m=rows_of(shape, sample), gemm_type=gemm)
    plain = json.loads(json.dumps(tile, default=str))
    return {key: value for key, value in plain.items() if key not in NOT_IN_TILE}


def plan(shape: Shape, card: Card) -> list[Planned]:
    """The kernels of a shape; neighbours of the same tile are one."""
    found: list[Planned] = []
    for limit, sample in LIMITS[shape.gemm]:
        tile = tuned(card, shape, limit) or own_choice(shape, sample)
        if found and found[-1].tile == tile:
            found.pop()
        found.append(planned(shape, limit, tile))
    return found


def tuned(card: Card, shape: Shape, limit: float | None) -> dict[str, Any] | None:
    """The tile of tiles.json for card and shape, or for those measured in their place, or None."""
    cards = _table()["cards"]
    rows = [*cards.get(card.name, []), *cards.get(MEASURED_FOR.get(card.name, ""), [])]
    tiles = {tuple(row["shape"]): row["tile"] for row in reversed(rows)}
    other = LIKE.get(shape.key, shape.key)
    return tiles.get((*shape.key, limit)) or tiles.get((*other, limit))


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text())
    return table
