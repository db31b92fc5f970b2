"""Tensors of a nano checkpoint of the DeepSeek family: how they are drawn and stored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from services.engine.checkpoints.nano.mx import quantize_fp8, quantize_mxfp4, quantize_rows

Form = Literal["fp8", "mxfp4", "rows", "bf16", "f32", "experts"]


@dataclass(frozen=True, slots=True)
class Drawing:
    """How a tensor is stored and drawn: normal values around `mean`."""

    name: str
    shape: tuple[int, ...]
    form: Form = "bf16"
    std: float = 1.0
    mean: float = 0.0


def linear(name: str, rows: int, columns: int, form: Form = "fp8", gain: float = 1.0) -> Drawing:
    return Drawing(f"{name}.weight", (rows, columns), form, gain * columns**-0.5)


def norm(name: str, width: int) -> Drawing:
    return Drawing(f"{name}.weight", (width,), std=0.2, mean=1.0)


def biased(name: str, rows: int, columns: int) -> Iterator[Drawing]:
    yield linear(name, rows, columns, "bf16")
    yield Drawing(f"{name}.bias", (rows,), std=0.2)


def tower(
    *,
    hidden: int,
    width: int,
    inner: int,
    layers: int,
    patch: int,
    unfold: int,
    roles: Iterable[str],
) -> Iterator[Drawing]:
    """A vision tower with its aligner and the embeddings of the tokens around an image."""
    for which in roles:
        yield Drawing(f"image_{which}", (hidden,))
    yield from biased("vision.patch_embed.proj", width, 3 * patch**2)
    for index in range(layers):
        block = f"vision.blocks.{index}"
        yield norm(f"{block}.norm1", width)
        yield from biased(f"{block}.attn.wqkv", 3 * width, width)
        yield from biased(f"{block}.attn.wo", width, width)
        yield norm(f"{block}.norm2", width)
        yield linear(f"{block}.mlp.w1", 2 * inner, width, "bf16")
        yield linear(f"{block}.mlp.w2", width, inner, "bf16")
    yield norm("vision.norm", width)
    yield from biased("aligner.w1", hidden, width * unfold**2)
    yield from biased("aligner.w2", hidden, hidden)


def stored_tensors(
    drawings: Iterable[Drawing], config: Mapping[str, Any], seed: int
) -> dict[str, Tensor]:
    """Every drawing as stored; a tensor depends on the seed and its name alone."""
    block = config["quantization_config"]["weight_block_size"][0]
    tensors: dict[str, Tensor] = {}
    for drawing in drawings:
        tensors |= _stored(drawing, generator_for(drawing.name, seed), config, block)
    return tensors


def generator_for(name: str, seed: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def _stored(
    drawing: Drawing, generator: torch.Generator, config: Mapping[str, Any], block: int
) -> dict[str, Tensor]:
    if drawing.form == "experts":
        return {drawing.name: _expert_table(drawing.shape, config["n_routed_experts"], generator)}
    values = torch.randn(drawing.shape, generator=generator) * drawing.std + drawing.mean
    scale_name = f"{drawing.name.removesuffix('.weight')}.scale"
    match drawing.form:
        case "fp8":
            codes, scale = quantize_fp8(values, block)
            return {drawing.name: codes, scale_name: scale}
        case "mxfp4":
            codes, scale = quantize_mxfp4(values)
            return {drawing.name: codes, scale_name: scale}
        case "rows":
            codes, scale = quantize_rows(values)
            return {drawing.name: codes, scale_name: scale}
        case "bf16":
            return {drawing.name: values.to(torch.bfloat16)}
        case "f32":
            return {drawing.name: values}


def _expert_table(shape: tuple[int, ...], experts: int, generator: torch.Generator) -> Tensor:
    """int64 [vocab, k], each row distinct experts."""
    vocab, top_k = shape
    order = torch.rand(vocab, experts, generator=generator).argsort(dim=1)
    return order[:, :top_k].contiguous()
