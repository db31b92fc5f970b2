"""The row kernels give the bytes of the reference: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.cache_rows import (
    COMPRESSED_ROWS,
    INDEX_ROWS,
    WINDOW_ROWS,
    RowFormat,
    latent_rows,
    launch,
    reference,
)

DEVICE = "cpu" if backend.interpreted() else "cuda"
FORMS = {
    "window": (WINDOW_ROWS, 512),
    "compressed": (COMPRESSED_ROWS, 512),
    "compressed-padded": (COMPRESSED_ROWS, 48),
    "index": (INDEX_ROWS, 128),
    "latent": (latent_rows(512, 64), 512),
    "odd-width": (RowFormat("e2m1", 32, "ue8m0", plain=6, plain_type=torch.float32, pad=5), 102),
}
forms = pytest.mark.parametrize("name", FORMS)


def drawn(rows: int, width: int) -> torch.Tensor:
    """Magnitudes of 60 powers of two, some rows of ties, zeros of both signs and one peak."""
    values = torch.randn(rows, width) * torch.exp2(torch.randint(-40, 20, (rows, 1)).float())
    values[::5] = torch.randint(-48, 49, values[::5].shape) / 8  # ties of e2m1, and of its scales
    values[1::7] = 0.0
    values[2::7] = -0.0
    values[3::7, 1:] = 0.0
    return values


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 65])
def test_encoded_bytes_equal_the_reference(name: str, dtype: torch.dtype, rows: int) -> None:
    form, width = FORMS[name]
    values = drawn(rows, width).to(dtype)
    found = launch.encode_rows(values.to(DEVICE), form).cpu()
    assert torch.equal(found, reference.encode_rows(values, form))


@pytest.mark.parametrize("width", [32, 48])
def test_infinities_in_a_group_with_an_e4m3_scale_equal_the_reference(width: int) -> None:
    values = drawn(3, width)
    values[0, 5], values[1, 18], values[2, :2] = torch.inf, -torch.inf, torch.inf
    found = launch.encode_rows(values.to(DEVICE), COMPRESSED_ROWS).cpu()
    assert torch.equal(found, reference.encode_rows(values, COMPRESSED_ROWS))


def test_e4m3_codes_with_e4m3_scales_are_refused() -> None:
    with pytest.raises(ValueError, match="e4m3 scales"):
        RowFormat("e4m3", 32, "e4m3")


@forms
def test_every_code_and_scale_decodes_to_the_value_of_the_reference(name: str) -> None:
    form, width = FORMS[name]
    size, places = form.row_bytes(width), torch.arange(form.row_bytes(width))
    rows = ((torch.arange(256)[:, None] + places * 7) % 256).to(torch.uint8)
    coded = width - form.plain
    codes = coded // (2 if form.codes == "e2m1" else 1)
    first = codes + form.plain_bytes
    rows[:, first : first + coded // form.group] = torch.arange(256, dtype=torch.uint8)[:, None]
    nan = ((rows & 0x7F) == 0x7F) & ((places < codes) & (form.codes == "e4m3") | (places >= first))
    rows[nan] = 0x01
    rows[:, codes:first] &= 0xBF  # plain values stay finite
    found = launch.decode_rows(rows.to(DEVICE), form).cpu()
    assert found.shape == (256, width) and rows.shape[1] == size
    assert torch.equal(found, reference.decode_rows(rows, form))


def test_every_e4m3_number_and_halfway_point_is_rounded_to_even() -> None:
    """One group of peak 448 has the scale 1, so codes are those of the values."""
    grid = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2])
    for scale in (1 - 2.0**-20, 1.0, 1 + 2.0**-20):
        values = torch.cat([points * scale, -points * scale]).clamp(-448, 448)
        padded = torch.zeros(-(-len(values) // 31) * 31)
        padded[: len(values)] = values
        groups = torch.cat([padded.view(-1, 31), torch.full((len(padded) // 31, 1), 448.0)], 1)
        found = launch.encode_rows(groups.to(DEVICE), WINDOW_ROWS).cpu()
        assert torch.equal(found[:, :32], groups.to(torch.float8_e4m3fn).view(torch.uint8))
        assert (found[:, 32] == 127).all()


def test_values_beside_a_tie_of_e2m1_are_not_taken_for_it() -> None:
    """A peak of 6 s makes the scale s; a tie lies between code c and c + 1, c = 0 to 6."""
    scales = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:, None]
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) * scales
    code = torch.arange(7, dtype=torch.uint8)
    for values, expected in (
        (torch.nextafter(ties, torch.tensor(0.0)), code),
        (ties, code + code % 2),
        (torch.nextafter(ties, torch.tensor(torch.inf)), code + 1),
    ):
        groups = torch.cat([values, 6 * scales, -values, torch.zeros_like(scales)], dim=1)
        found = launch.encode_rows(groups.to(DEVICE), COMPRESSED_ROWS).cpu()
        assert torch.equal(found[:, 8], torch.arange(1, 0x7F, dtype=torch.uint8))
        codes = torch.stack([found[:, :8] & 0xF, found[:, :8] >> 4], dim=2).flatten(1)
        assert (codes[:, :7] == expected).all() and (codes[:, 8:15] == expected + 8).all()


def test_leading_dimensions_stay_and_no_rows_are_no_rows() -> None:
    values = torch.randn(2, 0, 3, 128, device=DEVICE)
    rows = launch.encode_rows(values, INDEX_ROWS)
    assert rows.shape == (2, 0, 3, 68)
    assert launch.decode_rows(rows, INDEX_ROWS).shape == values.shape


@pytest.mark.gpu
@forms
def test_a_replayed_graph(name: str) -> None:
    form, width = FORMS[name]
    values = drawn(1000, width).bfloat16().cuda()
    launch.decode_rows(launch.encode_rows(values, form), form)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = launch.encode_rows(values, form)
        back = launch.decode_rows(rows, form)
    values.copy_(drawn(1000, width))
    graph.replay()
    expected = reference.encode_rows(values.cpu(), form)
    assert torch.equal(rows.cpu(), expected)
    assert torch.equal(back.cpu(), reference.decode_rows(expected, form))
