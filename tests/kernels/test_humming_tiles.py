"""Which tiles a build takes: those that were measured, else the package's own choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.humming import plan
from kernels.humming.cards import CARDS, card_for
from kernels.humming.shapes import Shape
from kernels.humming.tune import Tile, best, cases, write

SHAPE = Shape("stack", "mxfp4", 4096, 2048, 256)
OWN, OTHER = {"block_shape": [32, 256, 64]}, {"block_shape": [64, 128, 64]}


def row(tile: dict[str, Any], us: float | None, *, case: str = "a") -> dict[str, Any]:
    figures = {"problem": "relative error 1.0e+00"} if us is None else {"us": us}
    return {"case": case, "shape": [*SHAPE.key, 64], "own": tile is OWN, "tile": tile} | figures


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(OWN, 10.0), row(OTHER, 8.0)], [(OTHER, 8.0, 10.0)]),
        ([row(OWN, 7.0), row(OTHER, 8.0)], []),
        ([row(OWN, None), row(OTHER, 8.0)], [(OTHER, 8.0, None)]),
        ([row(OWN, 7.0), row(OTHER, None)], []),
        ([row(OWN, None), row(OTHER, None)], []),
    ],
)
def test_a_candidate_is_taken_where_it_beats_the_packages_choice(
    rows: list[dict[str, Any]], expected: list[tuple[dict[str, Any], float, float | None]]
) -> None:
    found = [(entry["tile"], entry["us"], entry["own_us"]) for entry in best(rows)]
    assert found == expected


def test_a_measured_tile_is_used_for_its_card_shape_and_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "tiles.json"
    table.write_text(json.dumps({"found": "", "cards": {}}))
    for us in (9.0, 8.0):  # a second run replaces the first
        write(table, "h200", "a card", best([row(OWN, 10.0), row(OTHER, us)]))
    (entry,) = json.loads(table.read_text())["cards"]["h200"]
    assert entry["us"] == 8.0 and entry["measured_on"] == "a card"
    monkeypatch.setattr(plan, "TABLE", table)
    plan._table.cache_clear()
    try:
        # Measured in place of an A100, not of others.
        for name, tile in (("h200", OTHER), ("a100", OTHER), ("a6000", None)):
            assert plan.tuned(CARDS[name], SHAPE, 64) == tile
        assert plan.tuned(CARDS["h200"], SHAPE, 28) is None
    finally:
        plan._table.cache_clear()


def test_a_shape_that_was_not_measured_takes_the_tile_of_one_like_it() -> None:
    plan._table.cache_clear()
    for shape, other in plan.LIKE.items():
        found, expected = (
            plan.tuned(CARDS["a100"], Shape(*key, 1), 64)  # type: ignore[arg-type]
            for key in (shape, other)
        )
        assert found is not None and found == expected
        block = found["block_shape"]
        assert shape[2] % block[1] == 0 and shape[3] % block[2] == 0


def test_tiles_of_the_table_beat_the_packages_choice_and_fit_their_shape() -> None:
    for card, rows in json.loads(plan.TABLE.read_text())["cards"].items():
        assert card in CARDS
        for entry in rows:
            gemm, _, n, k, limit = entry["shape"]
            assert limit in dict(plan.LIMITS[gemm]) and entry["us"] < entry["own_us"]
            _, block_n, block_k = entry["tile"]["block_shape"]
            assert n % block_n == 0 and k % block_k == 0


def test_a_card_of_another_target_is_refused() -> None:
    assert card_for(86, None).name == "a6000"
    with pytest.raises(ValueError, match="h200"):
        card_for(86, "h200")


def test_candidates_are_tiles_that_whole_warps_fill() -> None:
    tiles: set[Tile] = {tile for case in cases() for tile in case.tiles}
    for block, warp, stages, blocks in tiles:
        parts = [side // of for side, of in zip(block, warp, strict=True)]
        assert all(part * of == side for part, of, side in zip(parts, warp, block, strict=True))
        threads = 32 * parts[0] * parts[1] * parts[2]
        assert threads * blocks <= 1024 and stages >= 2 and warp[1] in (32, 64) and warp[2] >= 32
    assert all((case.limit, case.sample) in plan.LIMITS[case.shape.gemm] for case in cases())
