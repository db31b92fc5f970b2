"""Cache rows as the model was trained with them, against the vendor's numbers for that mode."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.cache_rows import INDEX_ROWS, decode_rows, encode_rows, latent_rows
from kernels.hadamard import hadamard
from services.common.checkpoint import CheckpointError
from services.engine.models import deepseek_v4_config
from services.engine.models.registry import load_model
from tests.models.deepseek_v4.conftest import CPU, GOLDENS, GetNano, Model, prompt
from tests.models.runner import Runner

CASES: dict[str, list[int]] = {
    name: case["input_ids"]
    for name, case in json.loads((GOLDENS / "cases.json").read_text())["cases"].items()
}
# One rounding that falls the other way moves logits by units; it happens in the longer prompts.
EXACT_CASES = ("one", "short5", "win17", "len33", "repeat64", "tiny_embed")


def load_quantised(folder: Path) -> Model:
    model = load_model(folder, device=CPU, compute_dtype=torch.float32, quantised_cache=True)
    return model  # type: ignore[return-value]


@pytest.fixture(scope="module")
def golden() -> Model:
    """The vendor's run keeps the rotated part of a row in fp32, where records have bf16."""
    patch = pytest.MonkeyPatch()
    patch.setattr(
        deepseek_v4_config,
        "latent_rows",
        lambda width, rope: replace(latent_rows(width, rope), plain_type=torch.float32),
    )
    model = load_quantised(GOLDENS)
    patch.undo()
    return model


@pytest.mark.parametrize("name", EXACT_CASES)
def test_logits_equal_the_vendors(golden: Model, name: str) -> None:
    ids = CASES[name]
    wanted = torch.from_numpy(np.load(GOLDENS / "logits_kv.npz")[f"{name}.prefill_logits"])
    found = Runner([golden]).run(ids, len(ids))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_longer_logits_differ_by_single_roundings_only(golden: Model) -> None:
    """Far nearer to the vendor's quantised run than that is to the exact one."""
    ids = CASES["long300"]
    key = "long300.prefill_logits"
    wanted, exact = (
        torch.from_numpy(np.load(GOLDENS / f"logits_{m}.npz")[key]) for m in ("kv", "exact")
    )
    found = Runner([golden]).run(ids, 300)
    assert (found - wanted).abs().mean() < 0.2 * (exact - wanted).abs().mean()
    assert (found.argmax(1) == wanted.argmax(1)).float().mean() > 0.95


@pytest.fixture(scope="module")
def quantised(get_nano: GetNano) -> Model:
    return load_quantised(get_nano("0731"))


@pytest.mark.parametrize("chunk", [7, 64])
def test_chunk_size_changes_no_bit(quantised: Model, chunk: int) -> None:
    ids, runner = prompt(150, seed=11), Runner([quantised])
    assert torch.equal(runner.run(ids, chunk), runner.run(ids, 150))


def test_only_rows_of_the_pools_get_smaller(quantised: Model, nano: Model) -> None:
    sizes = {g.name: (g.page_bytes, g.page_tokens, g.stride) for g in quantised.groups}
    for group in nano.groups:
        page_bytes, *layout = sizes[group.name]
        assert layout == [group.page_tokens, group.stride]
        assert page_bytes < group.page_bytes or group.kind == "state"


def test_sizes_of_released_records() -> None:
    form = latent_rows(512, 64)
    assert form.row_bytes(512) == 584 and form.row_values(584) == 512
    assert INDEX_ROWS.row_bytes(128) == 68


def test_a_record_keeps_the_rotated_part_in_bf16_and_rounds_the_rest() -> None:
    """Against torch's own e4m3 type and a scale found by trying powers of two."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(20, 512, generator=generator)
    values *= torch.logspace(-6, 4, 20)[:, None]
    form = latent_rows(512, 64)
    found = decode_rows(encode_rows(values, form), form)
    assert torch.equal(found[:, 448:], values[:, 448:].to(torch.bfloat16).float())
    for row in range(20):
        for group in range(7):
            part = values[row, 64 * group : 64 * group + 64]
            peak = max(float(part.abs().max()), 1e-4)
            power = next(2.0**e for e in range(-126, 127) if 2.0**e * 448 >= peak)
            wanted = (part / power).to(torch.float8_e4m3fn).float() * power
            assert torch.equal(found[row, 64 * group : 64 * group + 64], wanted)


@pytest.mark.parametrize("width", [1, 2, 64, 128])
def test_hadamard_equals_the_sylvester_matrix(width: int) -> None:
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    x = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(hadamard(x), x @ matrix * width**-0.5, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(hadamard(x)), x, rtol=1e-5, atol=1e-5)


def test_heads_without_whole_groups_are_refused_by_name() -> None:
    from tests.models.deepseek_v4.test_loading import RELEASED

    for field, value in (("head_dim", 500), ("index_head_dim", 96)):
        with pytest.raises(CheckpointError, match=field):
            deepseek_v4_config.parse_config({**RELEASED, field: value}, quantised_cache=True)


def test_families_without_such_rows_are_refused_by_name(tmp_path: Path) -> None:
    from tests.models.tiny import save_tiny

    folder = save_tiny(tmp_path, "qwen3_5", "bf16").folder
    with pytest.raises(CheckpointError, match="not for qwen3_5"):
        load_quantised(folder)
