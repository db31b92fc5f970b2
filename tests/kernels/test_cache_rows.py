"""Quantised cache rows against a search for the nearest representable value."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.cache_rows import (
    COMPRESSED_ROWS,
    INDEX_ROWS,
    WINDOW_ROWS,
    RowFormat,
    decode_rows,
    encode_rows,
    rounded,
)

FORMS = {"window": WINDOW_ROWS, "compressed": COMPRESSED_ROWS, "index": INDEX_ROWS}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Finite magnitudes in the order of their codes.
E4M3 = tuple((8 + c % 8) * 2.0 ** (c // 8 - 10) if c >= 8 else c * 2.0**-9 for c in range(0x7F))


def nearest(value: float, grid: tuple[float, ...]) -> float:
    """The grid value nearest to `value`; halfway to the one with the even code."""
    magnitude = min(abs(value), grid[-1])
    best = min(range(len(grid)), key=lambda c: (abs(grid[c] - magnitude), c % 2))
    return math.copysign(grid[best], value)


def least_power(x: float) -> float:
    """2^ceil(log2(x)), by frexp."""
    mantissa, exponent = math.frexp(x)
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


def expected_group(group: list[float], form: RowFormat) -> list[float]:
    peak = max(map(abs, group))
    grid = E4M3 if form.codes == "e4m3" else E2M1
    if form.scale == "e4m3":
        single = float(torch.tensor(peak) / 6)  # fp32 division
        scale = nearest(min(max(single, 2.0**-9), 448.0), E4M3)
    else:
        floor = 1e-4 if form.codes == "e4m3" else 6 * 2.0**-126
        reciprocal = torch.tensor(1.0 / grid[-1])
        scale = least_power(float(torch.tensor(max(peak, floor)) * reciprocal))
    return [nearest(float(torch.tensor(v) / scale), grid) * scale for v in group]


@pytest.mark.parametrize("name", FORMS)
def test_values_are_the_nearest_of_their_groups_grid(name: str) -> None:
    form = FORMS[name]
    generator = torch.Generator().manual_seed(3)
    magnitudes = torch.logspace(-7, 4, 12)[:, None]
    values = torch.randn(12, 64, generator=generator) * magnitudes
    values[3], values[4, 1:] = 0.0, 0.0
    found = decode_rows(encode_rows(values, form), form)
    expected = [
        [v for g in range(0, 64, form.group) for v in expected_group(row[g : g + form.group], form)]
        for row in values.tolist()
    ]
    assert torch.equal(found, torch.tensor(expected))


def test_ties_go_to_the_even_code() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    values = torch.tensor([*ties, *(-v for v in ties)]).repeat(2)
    found = rounded(values, INDEX_ROWS)[:16]
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert found.tolist() == [*even, *(-v for v in even)]


@pytest.mark.parametrize(
    ("name", "width", "nbytes"),
    [("window", 512, 528), ("compressed", 512, 288), ("index", 128, 68)],
)
def test_rows_have_the_bytes_of_the_release(name: str, width: int, nbytes: int) -> None:
    form = FORMS[name]
    assert form.row_bytes(width) == nbytes and form.row_values(nbytes) == width
    assert encode_rows(torch.zeros(2, width), form).shape == (2, nbytes)


def test_rows_without_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="whole groups of 32"):
        WINDOW_ROWS.row_bytes(48)
