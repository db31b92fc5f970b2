"""Matrices of every stored form read from a folder: whole, in parts, in stacks, and damaged."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from kernels.quant_linear import (
    Fp8BlockMatrix,
    Int4Matrix,
    Matrix,
    Mxfp4Matrix,
    dequantize,
    linear,
    prepare,
)
from services.common.checkpoint import Checkpoint, CheckpointError
from services.engine.checkpoints.formats import formats_of
from services.engine.checkpoints.loader import (
    WeightReader,
    even_part,
    make_readers,
    preparation_for,
    text_prefix,
)
from services.engine.checkpoints.tensors import Slice, TensorReader
from services.engine.models.base import Shard
from tests.models.int4 import Int4Layout, int4_value

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
NAME = "layers.0.wq"
ROWS, INPUTS = 192, 512
INT4 = ["ct-sym-g32", "ct-sym-g128", "ct-asym-g32", "ct-asym-g128", "awq-g32", "awq-g128"]
FORMS = [*INT4, "fp8 .scale", "fp8 .weight_scale_inv", "mxfp4 I8", "mxfp4 U8"]
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}


def stored(form: str, name: str = NAME, shape: tuple[int, int] = (ROWS, INPUTS)) -> Tensors:
    """A random matrix in a form."""
    rows, inputs = shape
    torch.manual_seed(zlib.crc32(name.encode()))
    if (layout := Int4Layout.of(form)) is not None:
        return dict(layout.tensors(f"{name}.weight", torch.randn(shape)))
    kind, detail = form.split()
    if kind == "fp8":
        codes = torch.randn(shape).to(torch.float8_e4m3fn)
        scale = e8m0(-(-rows // 32), -(-inputs // 32))
        scale = scale if detail == ".scale" else scale.float()
        return {f"{name}.weight": codes, f"{name}{detail}": scale}
    codes = torch.randint(0, 256, (rows, inputs // 2), dtype=torch.uint8)
    codes = codes.view(torch.int8) if detail == "I8" else codes
    return {f"{name}.weight": codes, f"{name}.scale": e8m0(rows, inputs // 32)}


def e8m0(*shape: int) -> torch.Tensor:
    return torch.randint(110, 128, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def value(tensors: Tensors, name: str = NAME) -> torch.Tensor:
    """fp32 value of a stored matrix by decoders that are not ours."""
    four_bit = int4_value(f"{name}.weight", tensors)
    if four_bit is not None:
        return four_bit
    scale = next(t for n, t in tensors.items() if n.startswith(name) and "scale" in n)
    codes = tensors[f"{name}.weight"]
    codes = codes.view(torch.int8) if codes.dtype == torch.uint8 else codes
    return Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)


def config_of(form: str) -> dict[str, object]:
    layout = Int4Layout.of(form)
    return {"quantization_config": layout.config() if layout else BLOCKS}


def write(folder: Path, tensors: Tensors, config: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def read(
    folder: Path,
    part: Slice | None = None,
    shape: tuple[int, int] = (ROWS, INPUTS),
    shard: Shard | None = None,
) -> Matrix:
    """The matrix, checked first as every load does."""
    with Checkpoint.open(folder) as checkpoint:
        checking, reader = make_readers(checkpoint, CPU, shard or Shard())
        checking.matrix(NAME, shape, part)
        return reader.matrix(NAME, shape, part)


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_and_its_parts_equal_other_decoders(form: str, tmp_path: Path) -> None:
    tensors = stored(form)
    write(tmp_path, tensors, config_of(form))
    expected = value(tensors)
    whole = read(tmp_path)
    assert torch.equal(dequantize(whole), expected)
    assert whole.nbytes <= 1.05 * sum(t.nbytes for t in tensors.values())
    rows = read(tmp_path, Slice(0, ((32, 64), (96, 128))))
    assert torch.equal(dequantize(rows), torch.cat([expected[32:64], expected[96:128]]))
    columns = read(tmp_path, Slice(1, ((384, 512), (0, 128))))
    assert torch.equal(dequantize(columns), torch.cat([expected[:, 384:], expected[:, :128]], 1))


@pytest.mark.parametrize("form", ["ct-asym-g32", "mxfp4 I8"])
def test_rows_are_cut_anywhere_where_each_has_its_own_scales(form: str, tmp_path: Path) -> None:
    tensors = stored(form)
    write(tmp_path, tensors, config_of(form))
    rows = read(tmp_path, Slice(0, ((3, 10), (126, 127))))
    assert torch.equal(dequantize(rows), torch.cat([value(tensors)[3:10], value(tensors)[126:127]]))


@pytest.mark.parametrize(
    ("form", "part", "unit"),
    [
        ("ct-sym-g32", Slice(1, ((0, 16),)), "quantisation block of 32"),
        ("ct-asym-g128", Slice(1, ((128, 320),)), "quantisation block of 128"),
        ("awq-g128", Slice(1, ((64, 128),)), "quantisation block of 128"),
        ("awq-g32", Slice(0, ((0, 12),)), "packed word of 8"),
        ("mxfp4 I8", Slice(1, ((0, 48),)), "quantisation block of 32"),
        ("fp8 .scale", Slice(0, ((16, 32),)), "quantisation block of 32"),
        ("fp8 .scale", Slice(1, ((0, 40),)), "quantisation block of 32"),
    ],
)
def test_a_cut_through_a_stored_unit_is_refused(
    form: str, part: Slice, unit: str, tmp_path: Path
) -> None:
    write(tmp_path, stored(form), config_of(form))
    start, stop = part.ranges[0]
    size = (ROWS, INPUTS)[part.dim]
    with pytest.raises(
        CheckpointError, match=f"{start}:{stop} of {size} .* cuts a {unit}"
    ) as error:
        read(tmp_path, part)
    assert error.value.tensor is not None and error.value.tensor.startswith(NAME)


def test_blocks_at_the_edge_are_partial(tmp_path: Path) -> None:
    tensors = stored("fp8 .scale", shape=(72, 200))
    write(tmp_path, tensors, config_of("fp8 .scale"))
    scale = tensors[f"{NAME}.scale"].float()
    spread = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)[:72, :200]
    expected = tensors[f"{NAME}.weight"].float() * spread
    assert torch.equal(dequantize(read(tmp_path, shape=(72, 200))), expected)
    last = read(tmp_path, Slice(0, ((64, 72),)), (72, 200))
    assert torch.equal(dequantize(last), expected[64:])


@pytest.mark.parametrize("form", [*INT4, "mxfp4 I8"])
@pytest.mark.parametrize("names", [("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")])
def test_experts_are_stacked_gate_above_up(
    form: str, names: tuple[str, str, str], tmp_path: Path
) -> None:
    tensors: Tensors = {}
    for e in range(4):
        for name in names:
            tensors |= stored(form, f"experts.{e}.{name}", (128, 128))
    write(tmp_path, tensors, config_of(form))
    with Checkpoint.open(tmp_path) as checkpoint:
        checking, reader = make_readers(checkpoint, CPU, Shard(rank=1, world=2))
        for each in (checking, reader):
            experts = each.at("experts").experts(4, 128, 128, names)
        assert checking.names == set(tensors) and (experts.first_expert, experts.count) == (2, 2)
        assert reader.nbytes == experts.gate_up.nbytes + experts.down.nbytes
    gate, up, down = (value(tensors, f"experts.3.{name}") for name in names)
    assert not torch.equal(gate, up)
    assert torch.equal(dequantize(experts.gate_up.expert(1)), torch.cat([gate, up]))
    assert torch.equal(dequantize(experts.down.expert(1)), down)


def test_experts_of_two_forms_are_refused_by_name(tmp_path: Path) -> None:
    tensors: Tensors = {}
    for e, form in enumerate(["ct-sym-g32", "ct-asym-g32"]):
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors |= stored(form, f"experts.{e}.{name}", (128, 128))
    write(tmp_path, tensors, {})
    with (
        Checkpoint.open(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match=r"with zero points.*without zero points") as error,
    ):
        make_readers(checkpoint, CPU, Shard())[1].at("experts").experts(2, 128, 128)
    assert error.value.tensor == "experts.1.gate_proj"


def test_an_expert_of_fp8_must_be_whole_blocks(tmp_path: Path) -> None:
    tensors: Tensors = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors |= stored("fp8 .scale", f"experts.0.{name}", (48, 48))
    write(tmp_path, tensors, {"quantization_config": BLOCKS})
    with (
        Checkpoint.open(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match="48 rows of an expert are no multiple") as error,
    ):
        make_readers(checkpoint, CPU, Shard())[1].at("experts").experts(1, 48, 48)
    assert error.value.tensor == "experts.0.gate_proj"


def flip(name: str) -> Callable[[Tensors], object]:
    """The tensor with its dimensions exchanged."""
    return lambda t: t.update({name: t[name].t().contiguous()})


def fill(name: str, byte: int | float) -> Callable[[Tensors], object]:
    """One element set, in e8m0 and e4m3 as a byte."""

    def change(tensors: Tensors) -> None:
        tensor = tensors[name]
        raw = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
        raw.view(-1)[5] = byte

    return change


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda t: t.pop(name)


DAMAGE: list[tuple[str, str, Callable[[str], Callable[[Tensors], object]], str]] = [
    *(
        (form, tensor, drop, "missing tensor")
        for form, *names in (
            ("ct-sym-g32", "weight_packed", "weight_scale", "weight_shape"),
            ("ct-asym-g128", "weight_packed", "weight_scale", "weight_zero_point"),
            ("awq-g32", "qweight", "qzeros", "scales"),
            ("fp8 .scale", "weight", "scale"),
            ("fp8 .weight_scale_inv", "weight", "weight_scale_inv"),
            ("mxfp4 I8", "weight", "scale"),
        )
        for tensor in names
    ),
    *(
        (form, tensor, flip, "disagrees with the config")
        for form, *names in (
            ("ct-asym-g32", "weight_packed", "weight_scale", "weight_zero_point"),
            ("awq-g32", "qweight", "qzeros", "scales"),
            ("fp8 .scale", "weight", "scale"),
            ("mxfp4 I8", "weight", "scale"),
        )
        for tensor in names
    ),
    ("fp8 .scale", "weight", lambda n: fill(n, 0xFF), "1 NaN codes"),
    ("fp8 .weight_scale_inv", "weight", lambda n: fill(n, 0x7F), "1 NaN codes"),
    ("fp8 .scale", "scale", lambda n: fill(n, 255), "not finite"),
    ("mxfp4 I8", "scale", lambda n: fill(n, 255), "not finite"),
    ("fp8 .weight_scale_inv", "weight_scale_inv", lambda n: fill(n, torch.nan), "not finite"),
    ("ct-sym-g32", "weight_scale", lambda n: fill(n, torch.inf), "not finite"),
    ("awq-g32", "scales", lambda n: fill(n, torch.nan), "not finite"),
    ("ct-sym-g32", "weight_shape", lambda n: lambda t: t[n].add_(1), r"says \[193, 513\]"),
]


@pytest.mark.parametrize(("form", "tensor", "damage", "problem"), DAMAGE)
def test_damage_is_refused_with_the_name_of_the_tensor(
    form: str,
    tensor: str,
    damage: Callable[[str], Callable[[Tensors], object]],
    problem: str,
    tmp_path: Path,
) -> None:
    tensors, name = stored(form) | stored(form, "layers.1.wq"), f"{NAME}.{tensor}"
    damage(name)(tensors)
    write(tmp_path, tensors, config_of(form))
    with pytest.raises(CheckpointError, match=problem) as error:
        read(tmp_path)
    assert error.value.tensor == name


def test_groups_of_another_size_than_the_config_says_are_refused(tmp_path: Path) -> None:
    for form, said, name in (
        ("ct-sym-g32", "ct-sym-g128", "weight_scale"),
        ("awq-g128", "awq-g32", "scales"),
    ):
        write(tmp_path, stored(form), config_of(said))
        with pytest.raises(CheckpointError, match="disagrees with the config") as error:
            read(tmp_path)
        assert error.value.tensor == f"{NAME}.{name}"


@pytest.mark.parametrize("form", INT4)
def test_without_a_config_the_siblings_tell_the_form(form: str, tmp_path: Path) -> None:
    tensors = stored(form)
    write(tmp_path, tensors, {})
    assert torch.equal(dequantize(read(tmp_path)), value(tensors))


def test_an_order_of_activations_is_refused_and_the_plain_one_taken(tmp_path: Path) -> None:
    tensors = stored("ct-sym-g32")
    order = torch.arange(INPUTS, dtype=torch.int32) // 32
    name = f"{NAME}.weight_g_idx"
    write(tmp_path, tensors | {name: order}, config_of("ct-sym-g32"))
    assert torch.equal(dequantize(read(tmp_path)), value(tensors))
    write(tmp_path, tensors | {name: order.flip(0)}, config_of("ct-sym-g32"))
    with pytest.raises(CheckpointError, match="order of activations") as error:
        read(tmp_path)
    assert error.value.tensor == name


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq'"),
        ({"bits": 8}, "bits 8"),
        ({"version": "gemv"}, "version 'gemv'"),
        ({"group_size": 48}, "group_size 48"),
        ({"group_size": -1}, "group_size -1"),
    ],
)
def test_config_out_of_range_is_refused_by_field(change: dict[str, object], field: str) -> None:
    layout = Int4Layout("awq", 32, asymmetric=True)
    with pytest.raises(CheckpointError, match=f"quantization_config.{field} is not"):
        formats_of({"quantization_config": layout.config() | change})


def test_e8m0_scales_stay_bytes(tmp_path: Path) -> None:
    tensors = stored("mxfp4 U8")
    write(tmp_path, tensors, config_of("mxfp4 U8"))
    matrix = read(tmp_path)
    assert isinstance(matrix, Mxfp4Matrix) and matrix.scale.dtype == torch.uint8
    assert torch.equal(matrix.scale, tensors[f"{NAME}.scale"].view(torch.uint8))


def test_four_bit_floats_of_their_own_type_are_the_same_bytes(tmp_path: Path) -> None:
    tensors = stored("mxfp4 U8")
    typed = tensors | {f"{NAME}.weight": tensors[f"{NAME}.weight"].view(torch.float4_e2m1fn_x2)}
    write(tmp_path, typed, {})
    with Checkpoint.open(tmp_path) as checkpoint:
        info = checkpoint.info(f"{NAME}.weight")
    assert (info.dtype, info.shape) == ("F4", (ROWS, INPUTS))
    assert torch.equal(dequantize(read(tmp_path)), value(tensors))


def test_other_types_are_read_where_they_are_asked_for(tmp_path: Path) -> None:
    table = torch.randint(-(1 << 40), 1 << 40, (10, 6))
    write(tmp_path, {"gate.tid2eid": table, "embed.weight": torch.zeros(2, 2)}, {})
    with Checkpoint.open(tmp_path) as checkpoint:
        _, reader = make_readers(checkpoint, CPU, Shard())
        root = reader.at(text_prefix(checkpoint))
        assert torch.equal(root.at("gate").tensor("tid2eid", (10, 6), dtypes=("I64",)), table)
        assert reader.nbytes == table.nbytes
        with pytest.raises(CheckpointError, match="type I64 where one of BF16, F16, F32"):
            root.tensor("gate.tid2eid", (10, 6))


@pytest.mark.parametrize("form", FORMS)
def test_a_gpu_gets_matrices_in_the_order_of_its_kernels(form: str, tmp_path: Path) -> None:
    write(tmp_path, stored(form), config_of(form))
    part = even_part(Shard(rank=1, world=2), 0, ROWS, what="rows")
    kept = read(tmp_path, part)
    with Checkpoint.open(tmp_path) as checkpoint:
        tensors, formats = TensorReader(checkpoint), formats_of(checkpoint.config)
        reader = WeightReader(tensors, formats, Shard(), CPU, prepare=prepare)
        ready = reader.at("layers.0").matrix("wq", (ROWS, INPUTS), part)
    assert isinstance(ready, Fp8BlockMatrix | Int4Matrix | Mxfp4Matrix)
    assert ready.order == "fragments"
    x = torch.randn(3, INPUTS)
    assert torch.equal(linear(x, ready), linear(x, kept))
    assert reader.nbytes == kept.nbytes and ready.nbytes <= 1.01 * kept.nbytes


def test_only_cuda_devices_reorder() -> None:
    assert preparation_for(torch.device("cuda", 1)) is prepare
    matrix = Int4Matrix(torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 1), None, 32)
    assert preparation_for(CPU)(matrix) is matrix


@pytest.mark.parametrize("stacked", [False, True])
def test_scales_beyond_the_kernels_are_refused_by_name(stacked: bool, tmp_path: Path) -> None:
    """On a GPU alone: 2^2 as a scale of MXFP4, which the reference takes."""
    tensors: Tensors = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensors |= stored("mxfp4 I8", f"experts.0.{name}", (64, 64))
    fill("experts.0.up_proj.scale", 129)(tensors)
    write(tmp_path, tensors, {})
    with Checkpoint.open(tmp_path) as checkpoint:
        sources = (TensorReader(checkpoint), formats_of({}), Shard(), CPU)
        assert WeightReader(*sources).at("experts").experts(1, 64, 64).count == 1
        reader = WeightReader(*sources, prepare=prepare).at("experts")
        with pytest.raises(CheckpointError, match="e8m0 scale code is 129") as error:
            if stacked:
                reader.experts(1, 64, 64)
            else:
                reader.matrix("0.up_proj", (64, 64))
    assert error.value.tensor == "experts.0.up_proj"
