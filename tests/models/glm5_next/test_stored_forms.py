"""Every matrix is read as independent decoders read it, and decided by its own tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.quant_linear import Fp8BlockMatrix, Int4Matrix, Matrix, PlainMatrix, dequantize
from services.common.checkpoint import Checkpoint
from services.engine.checkpoints.loader import make_readers
from services.engine.checkpoints.nano.glm import Layout, build_nano
from services.engine.models.base import Shard
from tests.models.glm5_next import oracle
from tests.models.glm5_next.conftest import CPU, GetNano, load, prompt
from tests.models.runner import Runner

TEXT = "model.language_model."


def matrices(folder: Path) -> dict[str, tuple[Matrix, torch.Tensor]]:
    """As the reader gives them, and their values by the independent decoders."""
    reader = make_readers(Checkpoint.open(folder), CPU, Shard())[1]
    values = oracle.values_of(oracle.stored_tensors(folder))
    modules = {
        name.removesuffix(".weight"): value
        for name, value in values.items()
        if name.endswith(".weight") and "_proj" in name and value.dim() == 2
    }
    return {n: (reader.matrix(n, (v.shape[0], v.shape[1])), v) for n, v in modules.items()}


@pytest.mark.parametrize(
    ("layout", "form", "count"),
    # fp8: 2 dense MLPs, 4 x (8 experts and a shared one), 4 projections of 3 attention layers
    [("fp8", Fp8BlockMatrix, 3 * 2 + 3 * 4 * 9 + 4 * 3), ("awq", Int4Matrix, 3 * 3 * 8)],
)
def test_every_stored_matrix_equals_an_independent_decoder_exactly(
    get_nano: GetNano, layout: Layout, form: type, count: int
) -> None:
    found = matrices(get_nano(layout))
    assert sum(isinstance(matrix, form) for matrix, _ in found.values()) == count
    assert all(isinstance(matrix, form | PlainMatrix) for matrix, _ in found.values())
    for name, (matrix, value) in found.items():
        assert torch.equal(dequantize(matrix), value), name


def test_projections_of_the_two_kinds_of_attention_are_told_apart(get_nano: GetNano) -> None:
    """Both have an o_proj; the release has codes for that of the latent attention alone."""
    found = matrices(get_nano("fp8"))
    for layer, form in ((0, PlainMatrix), (1, Fp8BlockMatrix), (5, Fp8BlockMatrix)):
        assert isinstance(found[f"{TEXT}layers.{layer}.self_attn.o_proj"][0], form)
    assert isinstance(found[f"{TEXT}layers.1.self_attn.kv_b_proj"][0], PlainMatrix)
    assert isinstance(found[f"{TEXT}layers.5.eh_proj"][0], PlainMatrix)


def test_the_draft_layer_of_the_four_bit_release_is_plain(get_nano: GetNano) -> None:
    found = matrices(get_nano("awq"))
    for layer, form in ((4, Int4Matrix), (5, PlainMatrix)):
        assert isinstance(found[f"{TEXT}layers.{layer}.mlp.experts.0.up_proj"][0], form)


def test_lists_of_the_config_decide_nothing(get_nano: GetNano, tmp_path: Path) -> None:
    ids = prompt(20, seed=2)
    expected = Runner([load(get_nano("fp8"))]).run(ids, 20)
    for file in get_nano("fp8").glob("*.*"):
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = [f"{TEXT}layers.1.mlp", "mlp.experts"]
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(Runner([load(tmp_path)]).run(ids, 20), expected)


def test_mixing_weights_of_the_streams_may_be_stored_in_two_bytes(tmp_path: Path) -> None:
    """The BF16 release does so; they are computed with in fp32 all the same."""
    folder = build_nano(tmp_path, "bf16")
    ids = prompt(20, seed=3)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        rounded = {n: t.bfloat16() if ".hc_" in n else t for n, t in tensors.items()}
        save_file(rounded, path)
    found = Runner([load(folder)]).run(ids, 20)
    expected = oracle.logits(oracle.oracle_of(folder), ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
