"""Finding Engram tables in a checkpoint folder, and refusing damaged ones before serving."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.checkpoint import Checkpoint, CheckpointError
from services.common.errors import StartupError
from services.common.ngram.layout import TableLayout
from services.common.ngram.stored import copy_rows
from services.common.ngram_table import find_tables
from services.offload.config import Storage
from services.offload.tables import open_tables
from tests.offload.checkpoint import rewrite
from tests.offload.engram import LAYERS, make_engram, tensor_name

WEIGHT, SCALE = tensor_name(4, "weight"), tensor_name(4, "scale")


def layouts_of(folder: Path) -> tuple[TableLayout, ...]:
    with Checkpoint.open(folder) as checkpoint:
        return find_tables(checkpoint)


@pytest.mark.parametrize("values", [32, 64, 256])
def test_a_served_row_is_its_values_then_its_scales(tmp_path: Path, values: int) -> None:
    tables = make_engram(tmp_path, values=values)
    found = layouts_of(tmp_path)
    assert [t.name for t in found] == list(tables)
    assert [t.layer for t in found] == list(LAYERS)
    for layout in found:
        expected = tables[layout.name]
        assert (layout.rows, layout.row_bytes) == tuple(expected.shape)
        assert (layout.row_values, layout.row_scale_bytes) == (values, values // 32)
        out = np.full((layout.rows, layout.row_bytes), 0xA5, np.uint8)
        copy_rows(layout, out)
        assert torch.equal(torch.from_numpy(out), expected)
    if values == 256:
        assert found[0].row_bytes == 264  # as in the released model


def edit(**change: Any) -> Callable[[Path], None]:
    """Changes keys of the text config; None removes one."""

    def apply(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        text = config["text_config"] | change
        config["text_config"] = {k: v for k, v in text.items() if v is not None}
        path.write_text(json.dumps(config))

    return apply


def replaced(name: str, value: torch.Tensor | None) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, {name: value})


def truncated(folder: Path) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def codes(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).to(torch.float8_e4m3fn)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "values gone": (replaced(WEIGHT, None), r"no such tensor.*layers\.4\.engram\.embed\.weight"),
    "scales gone": (replaced(SCALE, None), r"no such tensor.*layers\.4\.engram\.embed\.scale"),
    "file gone": (
        lambda f: (f / "model-00002-of-00002.safetensors").unlink(),
        r"missing shard.*model-00002-of-00002\.safetensors",
    ),
    "file truncated": (
        truncated,
        r"truncated.*model-00002-of-00002\.safetensors.*expected \d+ bytes.*found \d+ bytes",
    ),
    "a row too few": (
        replaced(WEIGHT, codes(3456, 64)),
        r"is F8_E4M3 \[3456, 64\], expected F8_E4M3 \[3457, 64\].*embed\.weight.*model-00001.*"
        r"expected 221248 bytes; found 221184 bytes",
    ),
    "rows of another width": (
        replaced(WEIGHT, codes(3457, 32)),
        r"\[3457, 32\], expected F8_E4M3 \[3457, 64\]",
    ),
    "values of another type": (
        replaced(WEIGHT, torch.zeros(3457, 64).bfloat16()),
        r"is BF16 \[3457, 64\], expected F8_E4M3.*expected 221248 bytes; found 442496 bytes",
    ),
    "scales of another group": (
        replaced(SCALE, torch.zeros(3457, 4).to(torch.float8_e8m0fnu)),
        r"is F8_E8M0 \[3457, 4\], expected F8_E8M0 \[3457, 2\].*embed\.scale",
    ),
    "scales of another type": (
        replaced(SCALE, torch.zeros(3457, 2, dtype=torch.uint8)),
        r"is U8 \[3457, 2\], expected F8_E8M0",
    ),
    "other rows in the config": (
        edit(engram_num_embeddings=[1, 2]),
        r"engram_num_embeddings says 1 rows for layer 1, the hash has \d+",
    ),
    "too few row counts in the config": (
        edit(engram_num_embeddings=[1]),
        r"engram_num_embeddings has 1 entries for 2 layers",
    ),
    "an odd width in the config": (
        edit(engram_head_dim=48),
        r"engram_head_dim is 48, not a multiple of 32",
    ),
    "no size of the compressed vocabulary": (
        edit(engram_compressed_vocab_size=None),
        r"engram_compressed_vocab_size is None",
    ),
    "other heads than the tables": (
        edit(engram_n_heads=4, engram_num_embeddings=None),
        r"expected F8_E4M3 \[\d+, 64\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_table_is_refused_with_its_file_and_tensor(tmp_path: Path, damage: str) -> None:
    make_engram(tmp_path)
    apply, message = DAMAGES[damage]
    apply(tmp_path)
    with pytest.raises(CheckpointError) as error:
        layouts_of(tmp_path)
    assert re.search(message, str(error.value)), str(error.value)


def with_byte(name: str, row: int, byte: int) -> Callable[[Path, dict[str, torch.Tensor]], None]:
    """Puts a byte at the end of a stored row."""

    def apply(folder: Path, tables: dict[str, torch.Tensor]) -> None:
        table = tables["deepseek_v41.layers.4.engram"]
        scale = name.endswith("scale")
        stored = (table[:, 64:] if scale else table[:, :64]).clone()
        stored[row, -1] = byte
        dtype = torch.float8_e8m0fnu if scale else torch.float8_e4m3fn
        rewrite(folder, {name: stored.view(dtype)})

    return apply


@pytest.mark.parametrize("storage", ["memory", "file"])
@pytest.mark.parametrize(
    ("name", "byte"), [(WEIGHT, 0x7F), (WEIGHT, 0xFF), (SCALE, 0xFF)], ids=["+nan", "-nan", "scale"]
)
def test_a_nan_is_refused_before_serving_and_leaves_nothing_to_adopt(
    tmp_path: Path, storage: Storage, name: str, byte: int
) -> None:
    tables = make_engram(tmp_path / "model")
    with_byte(name, 3456, byte)(tmp_path / "model", tables)
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(CheckpointError, match=r"NaN.*rows 0 to 3456") as error:
        open_tables(layouts_of(tmp_path / "model"), storage, run, "test")
    assert error.value.tensor == name
    assert error.value.file is not None and error.value.file.parent == tmp_path / "model"
    assert not [p for p in run.iterdir() if "layers.4" in p.name]


@pytest.mark.parametrize("storage", ["memory", "file"])
def test_a_file_cut_short_after_it_was_opened_is_refused(tmp_path: Path, storage: Storage) -> None:
    make_engram(tmp_path / "model")
    found = layouts_of(tmp_path / "model")
    truncated(tmp_path / "model")
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(CheckpointError, match=r"ends within rows 0 to 3456.*expected.*found"):
        open_tables(found, storage, run, "test")


def test_a_host_without_room_is_told_of_the_other_storage(tmp_path: Path) -> None:
    make_engram(tmp_path / "model")
    run = tmp_path / "run"
    run.mkdir()
    huge = [dataclasses.replace(t, rows=1 << 50) for t in layouts_of(tmp_path / "model")]
    with pytest.raises(StartupError, match=r"no room for table .*bytes.*--table-storage file"):
        open_tables(huge, "memory", run, "test")
    assert not list(run.iterdir())
