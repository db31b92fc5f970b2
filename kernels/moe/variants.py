"""The variants of the experts' kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from kernels.aot.variant import Variant
from kernels.moe import configs, launch
from kernels.moe.triton import (
    PLAIN,
    align_pairs,
    down,
    down_vector,
    gate_up,
    gate_up_vector,
    weighted_sum,
)
from kernels.quant_linear.decode import FP8, INT4, MXFP4
from kernels.quant_linear.launch import Layout
from kernels.quant_linear.tuning import Config
from kernels.quant_linear.variants import TRITON_TYPES, stored_types

KINDS = {
    "x": "*bf16", "hidden": "*bf16", "products": "*bf16", "out": "*fp32", "partial": "*fp32",
    "counters": "*i32", "order": "*i32", "tiles": "*i32", "ids": "*i64", "weights": "*fp32",
    "limit": "fp32",
}  # fmt: skip
# Numbers that launches never specialise.
ANY_NUMBER = frozenset({"P", "first_expert", "experts", "slots", "top_k", "counters_used", "limit"})


@dataclass(frozen=True)
class Model:
    """The experts of a served model; `form` is the layout of their stacks."""

    name: str
    form: Layout
    hidden: int
    inner: int
    top_k: int
    limit: bool

    def rows(self, width: int) -> Layout:
        """The layout of a matrix of `width` inputs."""
        halved = self.form.format in (INT4, MXFP4)
        return replace(self.form, row_bytes=width // 2 if halved else width)


def _form(
    code: int, name: str, scale: torch.dtype, group: int, block_n: int = 1, *, zero: bool = False
) -> Layout:
    zeros = torch.empty(0, dtype=torch.uint8) if zero else None
    return Layout(code, name, torch.empty(0, dtype=scale), zeros, group, block_n, 0)


MODELS = (
    Model("DeepSeek-V4", _form(MXFP4, "mxfp4", torch.uint8, 16), 4096, 2048, 6, True),
    Model("GLM FP8", _form(FP8, "fp8", torch.float32, 128, 128), 4096, 2048, 8, True),
    Model("Qwen INT4", _form(INT4, "int4", torch.bfloat16, 64), 2560, 640, 10, False),
)
# A model's draft layer stays plain; tiles for few rows alone.
DRAFT = Model("GLM draft", _form(PLAIN, "plain", torch.bfloat16, 1), 4096, 2048, 8, True)
# Slices, and formats that differ from MODELS' in their scales alone: few tokens.
OTHERS = (
    Model("DeepSeek-V4.1", _form(MXFP4, "mxfp4", torch.uint8, 16), 5120, 2304, 6, True),
    Model("DeepSeek-V4 1/8", _form(MXFP4, "mxfp4", torch.uint8, 16), 4096, 256, 6, True),
    Model("GLM INT4", _form(INT4, "int4", torch.bfloat16, 64), 4096, 2048, 8, True),
    Model("Qwen AWQ", _form(INT4, "int4", torch.bfloat16, 64, zero=True), 2560, 640, 10, False),
)


def variants(target: int) -> Iterator[Variant]:
    """The same for every target."""
    for model in (*MODELS, *OTHERS):
        yield from _vector(model)
    for model in MODELS:
        for tile in configs.MATRIX_TILES[model.form.name]:
            yield from _grouped(model, tile)
    yield from _grouped(DRAFT, configs.MATRIX_TILES["plain"][0])
    for rows in (16, 32, 64):
        yield _variant("align", align_pairs, {"BM": rows, "BP": 1024}, 4)
    for rows in (16, 32, 64, 128):
        yield _variant("align", align_pairs, {"BM": rows, "BP": 4096}, 8)
    for top_k in sorted({model.top_k for model in MODELS}):
        values = {"TOP_K": top_k, "BN": launch.SUM_COLUMNS}
        yield _variant(f"weighted sum of {top_k}", weighted_sum, values, 4)


def _vector(model: Model) -> Iterator[Variant]:
    first, second = model.rows(model.hidden), model.rows(model.inner)
    config = configs.vector_tile(first.name, first.row_bytes, 2 * model.inner)
    values = {"LIMIT": model.limit, **launch.vector_values(first, config)}
    yield _of_stack(f"{model.name} gate-up", gate_up_vector, first, config, values)
    config = configs.vector_tile(second.name, second.row_bytes, model.hidden)
    splits = configs.expert_splits(-(-model.hidden // config.block_n), model.top_k)
    values = {"SPLIT": splits, **launch.vector_values(second, config)}
    yield _of_stack(f"{model.name} down k{splits}", down_vector, second, config, values)


def _grouped(model: Model, config: Config) -> Iterator[Variant]:
    first, second = model.rows(model.hidden), model.rows(model.inner)
    values = {"LIMIT": model.limit, **launch.matrix_values(first, config)}
    yield _of_stack(f"{model.name} gate-up", gate_up, first, config, values)
    values = launch.matrix_values(second, config)
    yield _of_stack(f"{model.name} down", down, second, config, values)


def _of_stack(
    label: str, kernel: object, form: Layout, config: Config, values: dict[str, int | bool]
) -> Variant:
    if form.format == PLAIN:
        words = scale = zero = TRITON_TYPES[form.scale.dtype]
    else:
        words = "i32"
        scale, zero = stored_types(form)
    kinds = {"words": f"*{words}", "scales": f"*{scale}", "zeros": f"*{zero}"}
    tile = f"{config.kernel} {config.block_m}x{config.block_n}x{config.block_bytes}B"
    return _variant(f"{label} {tile}", kernel, values, config.warps, config.stages, kinds)


def _variant(
    label: str,
    kernel: object,
    values: dict[str, int | bool],
    warps: int,
    stages: int = 3,
    kinds: dict[str, str] | None = None,
) -> Variant:
    known = KINDS | (kinds or {})
    names = [name for name in kernel.arg_names if name not in values]  # type: ignore[attr-defined]
    arguments = {name: known.get(name, "i32") for name in names}
    aligned = frozenset(arguments) - ANY_NUMBER
    return Variant(label, kernel, arguments, values, aligned, warps, stages)
