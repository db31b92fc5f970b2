"""Launches of the experts' kernels: checks, configuration, intermediate results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kernels.humming.matrix import HummingMatrix
from kernels.moe import configs
from kernels.moe.triton import (
    PLAIN,
    align_pairs,
    down,
    down_vector,
    gate_up,
    gate_up_vector,
    weighted_sum,
)
from kernels.quant_linear.launch import Layout, layout_of, matrix_constants, vector_constants
from kernels.quant_linear.matrix import Matrix, PlainMatrix
from kernels.quant_linear.tuning import Config

if TYPE_CHECKING:
    from kernels.moe import ExpertWeights

# Legend: T tokens, k experts of a token, P = T k pairs, E experts, H hidden, I intermediate.

MANY_PAIRS = 4096  # from which on align_pairs reads more at a time
SUM_COLUMNS = 1024


def layout(weight: Matrix) -> Layout:
    """The stack [E, N, K] as the kernels see it; the rows of plain weights count in elements."""
    if isinstance(weight, PlainMatrix):
        return Layout(PLAIN, "plain", weight.data, None, 1, 1, weight.in_features)
    assert not isinstance(weight, HummingMatrix), "both matrices go to one back end"
    return layout_of(weight)


@dataclass(frozen=True, slots=True)
class Plan:
    """How so many tokens are computed: two matrix-vector kernels, or a grouped product."""

    vector: bool
    gate_up: Config
    down: Config
    splits: int
    slots: int

    @classmethod
    def of(cls, experts: ExpertWeights, tokens: int, top_k: int) -> Plan:
        first, second = layout(experts.gate_up), layout(experts.down)
        plain = first.format == PLAIN or second.format == PLAIN
        if tokens <= configs.VECTOR_TOKENS and not plain:
            one = configs.vector_tile(first.name, first.row_bytes, experts.gate_up.out_features)
            two = configs.vector_tile(second.name, second.row_bytes, experts.down.out_features)
            programs = -(-experts.down.out_features // two.block_n)
            return cls(True, one, two, configs.expert_splits(programs, top_k), 0)
        pairs, spread = tokens * top_k, experts.total or experts.count
        one, two = (configs.matrix_tile(m.name, pairs, spread) for m in (first, second))
        assert one.block_m == two.block_m, "both matrices have one layout of pairs"
        return cls(False, one, two, 1, pairs // one.block_m + experts.count)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Device memory of one call, to be used again by calls of the same or a smaller size.

    hidden bf16 [P, I]. products: bf16 [P, H] of a grouped product, or fp32 sums [splits, T, H] of
    the vector kernels. integers, int32: the pairs in order and the tiles [3, slots], or counters.
    """

    hidden: torch.Tensor
    products: torch.Tensor
    integers: torch.Tensor

    @classmethod
    def allocate(
        cls, experts: ExpertWeights, tokens: int, top_k: int, device: torch.device
    ) -> Scratch:
        plan = Plan.of(experts, tokens, top_k)
        pairs, width = tokens * top_k, experts.down.out_features
        hidden = torch.empty(pairs * experts.down.in_features, dtype=torch.bfloat16, device=device)
        if plan.vector:
            size, kind = plan.splits * tokens * width, torch.float32
        else:
            size, kind = pairs * width, torch.bfloat16
        products = torch.empty(size, dtype=kind, device=device)
        count = max(_whole(pairs) + 3 * plan.slots, tokens * width)
        return cls(hidden, products, torch.empty(count, dtype=torch.int32, device=device))


def routed_experts(
    x_TH: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    experts: ExpertWeights,
    limit: float | None,
    out_TH: torch.Tensor,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """Fill `out` fp32 [T, H]. No host synchronisation; can be captured in a CUDA graph.

    x of any floating type, ids int64, weights fp32, all contiguous. Ids out of this rank's range,
    whatever they are, contribute nothing. Two launches for few tokens, else four.
    """
    tokens, top_k = ids_Tk.shape
    assert x_TH.is_contiguous() and ids_Tk.is_contiguous() and weights_Tk.is_contiguous()
    assert ids_Tk.dtype == torch.int64 and weights_Tk.dtype == torch.float32
    assert out_TH.is_contiguous() and out_TH.dtype == torch.float32 and out_TH.shape == x_TH.shape
    assert x_TH.shape == (tokens, experts.gate_up.in_features)
    assert experts.gate_up.out_features == 2 * experts.down.in_features
    assert experts.down.out_features == x_TH.shape[1]
    if tokens == 0:
        return out_TH
    call = Call(x_TH, ids_Tk, weights_Tk, experts, limit, out_TH)
    plan = Plan.of(experts, tokens, top_k)
    scratch = scratch or Scratch.allocate(experts, tokens, top_k, x_TH.device)
    if plan.vector:
        _by_vector(call, plan, scratch)
    else:
        _grouped(call, plan, scratch)
    return out_TH


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of `routed_experts`."""

    x_TH: torch.Tensor
    ids_Tk: torch.Tensor
    weights_Tk: torch.Tensor
    experts: ExpertWeights
    limit: float | None
    out_TH: torch.Tensor


def _tensors(weight: Matrix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words of codes, scales and zero points; others stand for those that a format has not."""
    if isinstance(weight, PlainMatrix):
        assert weight.data.is_contiguous()
        return weight.data, weight.data, weight.data
    assert not isinstance(weight, HummingMatrix)
    form = layout_of(weight)
    scale, zero = form.tensors
    assert weight.codes.is_contiguous() and scale.is_contiguous() and zero.is_contiguous()
    return weight.codes.view(torch.int32), scale, zero


def vector_values(form: Layout, config: Config) -> dict[str, int | bool]:
    """Constants of a vector kernel, without the splits."""
    values = vector_constants(form, config)
    return {name: values[name] for name in values if name not in ("SPLIT", "STAGES")}


def matrix_values(form: Layout, config: Config) -> dict[str, int | bool]:
    """Constants of a grouped product."""
    values = matrix_constants(form, config)
    return {name: values[name] for name in values if name != "SPLIT"}


def _options(config: Config) -> dict[str, Any]:
    return {"num_warps": config.warps, "num_stages": config.stages}


def _by_vector(call: Call, plan: Plan, scratch: Scratch) -> None:
    e, (tokens, top_k) = call.experts, call.ids_Tk.shape
    inner, width = e.down.in_features, e.down.out_features
    tiles = -(-width // plan.down.block_n)
    counters = tokens * tiles if plan.splits > 1 else 0
    assert scratch.hidden.numel() >= tokens * top_k * inner
    assert scratch.products.dtype == torch.float32 and scratch.integers.numel() >= counters
    assert scratch.products.numel() >= plan.splits * tokens * width
    programs = -(-inner // (plan.gate_up.block_n // 2)), tokens * top_k
    assert 32 * programs[0] * programs[1] >= counters
    gate_up_vector[programs](
        call.x_TH, *_tensors(e.gate_up), scratch.hidden, call.ids_Tk,
        scratch.integers,
        e.first_expert, e.count, top_k, counters, call.limit or 0.0, inner, width,
        LIMIT=call.limit is not None, **vector_values(layout(e.gate_up), plan.gate_up),
        **_options(plan.gate_up),
    )  # fmt: skip
    down_vector[(tiles, tokens, plan.splits)](
        scratch.hidden, *_tensors(e.down), call.out_TH, scratch.products,
        scratch.integers, call.ids_Tk, call.weights_Tk, e.first_expert, e.count, top_k, width,
        inner,
        SPLIT=plan.splits, **vector_values(layout(e.down), plan.down), **_options(plan.down),
    )  # fmt: skip


def _grouped(call: Call, plan: Plan, scratch: Scratch) -> None:
    e, (tokens, top_k) = call.experts, call.ids_Tk.shape
    pairs, slots = tokens * top_k, plan.slots
    inner, width = e.down.in_features, e.down.out_features
    assert scratch.hidden.numel() >= pairs * inner
    assert scratch.products.dtype == torch.bfloat16 and scratch.products.numel() >= pairs * width
    order, tiles = scratch.integers[:pairs], scratch.integers[_whole(pairs) :]
    assert tiles.numel() >= 3 * slots
    block, warps = alignment(pairs)
    align_pairs[(e.count,)](
        call.ids_Tk, order, tiles, pairs, e.first_expert, e.count, slots,
        BM=plan.gate_up.block_m, BP=block, num_warps=warps,
    )  # fmt: skip
    gate_up[(slots * -(-inner // (plan.gate_up.block_n // 2)),)](
        call.x_TH, *_tensors(e.gate_up), scratch.hidden, order, tiles, slots,
        top_k,
        call.limit or 0.0, inner, width, LIMIT=call.limit is not None,
        **matrix_values(layout(e.gate_up), plan.gate_up), **_options(plan.gate_up),
    )  # fmt: skip
    down[(slots * -(-width // plan.down.block_n),)](
        scratch.hidden, *_tensors(e.down), scratch.products, order, tiles, slots,
        width, inner,
        **matrix_values(layout(e.down), plan.down), **_options(plan.down),
    )  # fmt: skip
    weighted_sum[(tokens, -(-width // SUM_COLUMNS))](
        scratch.products, call.ids_Tk, call.weights_Tk, call.out_TH, e.first_expert, e.count,
        width, TOP_K=top_k, BN=SUM_COLUMNS, num_warps=4,
    )  # fmt: skip


def _whole(count: int) -> int:
    """Keeps what follows `count` integers aligned."""
    return -(-count // 32) * 32


def alignment(pairs: int) -> tuple[int, int]:
    """Pairs that align_pairs reads at a time, and its warps."""
    return (4096, 8) if pairs > MANY_PAIRS else (1024, 4)
