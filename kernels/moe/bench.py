"""The benchmark of the routed experts: served models, random weights, uniform routes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from kernels.bench import humming_peer
from kernels.bench.case import Call, Case, Work
from kernels.humming.select import chosen
from kernels.moe import ExpertWeights
from kernels.moe import routed_experts as chosen_experts
from kernels.moe.launch import Scratch, routed_experts
from kernels.quant_linear import (
    Fp8BlockMatrix,
    Int4Matrix,
    Matrix,
    Mxfp4Matrix,
    dequantize,
    prepare,
)
from kernels.quant_linear.launch import QuantMatrix

MAX_ERROR = 6e-3
CHECKED_TOKENS = 8
# Calls differ in their routes, so that together they read more than any cache holds.
MANY_ROUTES, SOME_ROUTES = 48, 4
FEW_TOKENS = 8


@dataclass(frozen=True)
class Layer:
    """The routed experts of a layer: sizes and how weights are stored."""

    name: str
    weights: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    limit: float | None
    tokens: tuple[int, ...]


LAYERS = (
    Layer("Qwen3.8-Next int4", "int4", 512, 10, 2560, 640, None, (1, 4, 64, 2048)),
    Layer("DeepSeek-V4 mxfp4", "mxfp4", 256, 6, 4096, 2048, 10.0, (1, 6, 64, 512, 2048, 8192)),
    Layer("DeepSeek-V4 1/8 mxfp4", "mxfp4", 256, 6, 4096, 256, 10.0, (1, 6)),
    Layer("GLM-5.3 fp8", "fp8", 288, 8, 4096, 2048, 10.0, (4,)),
)


class Setting:
    """The weights of a layer, made when first used; its cases share them."""

    def __init__(self, layer: Layer, device: str) -> None:
        self.layer, self.device = layer, device

    @cached_property
    def stored(self) -> ExpertWeights:
        """In checkpoint order."""
        layer, make = self.layer, MAKERS[self.layer.weights]
        gate_up = make(layer.experts, 2 * layer.inner, layer.hidden, self.device)
        down = make(layer.experts, layer.hidden, layer.inner, self.device)
        return ExpertWeights(gate_up, down, layer.experts)

    @cached_property
    def experts(self) -> ExpertWeights:
        """In the order of our kernels."""
        gate_up, down = (prepare(m, "triton") for m in (self.stored.gate_up, self.stored.down))
        return ExpertWeights(gate_up, down, self.layer.experts)

    @cached_property
    def humming(self) -> ExpertWeights | None:
        """`stored` in humming's order."""
        found = humming_peer.matrices((self.stored.gate_up, self.stored.down))  # type: ignore[arg-type]
        return None if found is None else ExpertWeights(found[0], found[1], self.layer.experts)


def cases(device: str = "cuda") -> Iterator[Case]:
    for layer in LAYERS:
        setting = Setting(layer, device)
        for tokens in layer.tokens:
            yield Case(
                "moe", f"{layer.name} T={tokens}", partial(work, setting, tokens),
                {"humming": partial(_humming, setting, tokens)},
                chosen("stack", 2 * layer.inner * layer.hidden),
            )  # fmt: skip


class Inputs:
    """Tokens and routes of a case, and the output."""

    def __init__(self, setting: Setting, tokens: int) -> None:
        layer, device = setting.layer, torch.device(setting.device)
        self.x = torch.randn(tokens, layer.hidden, device=device).bfloat16()
        self.weights = torch.rand(tokens, layer.top_k, device=device) + 0.1
        self.out = torch.empty(tokens, layer.hidden, device=device)
        count = MANY_ROUTES if tokens <= FEW_TOKENS else SOME_ROUTES
        self.routes = [
            torch.rand(tokens, layer.experts).topk(layer.top_k).indices for _ in range(count)
        ]


def work(setting: Setting, tokens: int) -> Work:
    layer, experts, given = setting.layer, setting.experts, Inputs(setting, tokens)
    device = torch.device(setting.device)
    scratch = Scratch.allocate(experts, tokens, layer.top_k, device)
    calls: list[Call] = [
        partial(
            routed_experts, given.x, ids.to(device), given.weights, experts, layer.limit,
            given.out, scratch,
        )
        for ids in given.routes
    ]  # fmt: skip
    return _work(setting, experts, given, calls, (scratch.hidden, scratch.products))


def _humming(setting: Setting, tokens: int) -> Work | None:
    layer, experts = setting.layer, setting.humming
    if experts is None:
        return None
    given = Inputs(setting, tokens)
    calls: list[Call] = [
        partial(
            chosen_experts, given.x, ids.to(setting.device), given.weights, experts,
            limit=layer.limit, out=given.out,
        )
        for ids in given.routes
    ]  # fmt: skip
    return _work(setting, setting.stored, given, calls, ())


def _work(
    setting: Setting,
    experts: ExpertWeights,
    given: Inputs,
    calls: list[Call],
    scratch: tuple[torch.Tensor, ...],
) -> Work:
    """`experts` are the weights of the exact result and of the bytes."""
    layer, (tokens, top_k) = setting.layer, given.weights.shape
    hit = sum(len(ids.unique()) for ids in given.routes) / len(given.routes)
    nbytes = hit / layer.experts * (experts.gate_up.nbytes + experts.down.nbytes)
    nbytes += given.x.nbytes + given.out.nbytes
    flops = 6.0 * tokens * top_k * layer.hidden * layer.inner

    def error() -> float:
        for poisoned in (given.out, *scratch):
            poisoned.fill_(torch.nan)
        calls[0]()
        ids, limit = given.routes[0], layer.limit
        return relative_error(given.out, given.x, ids, given.weights, experts, limit)

    return Work(calls, error, MAX_ERROR, nbytes, flops)


def relative_error(
    found: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertWeights,
    limit: float | None,
) -> float:
    """Of the first and last tokens against fp64; infinite where an element was not written."""
    if bool(found.isnan().any()):
        return float("inf")
    tokens = list(range(len(x)))
    if len(tokens) > CHECKED_TOKENS:
        tokens = tokens[: CHECKED_TOKENS // 2] + tokens[-CHECKED_TOKENS // 2 :]
    exact = torch.stack([_exact(x[t], ids[t], weights[t], experts, limit) for t in tokens])
    return float((found[tokens].double() - exact).norm() / exact.norm())


def _exact(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: ExpertWeights,
    limit: float | None,
) -> torch.Tensor:
    """fp64 [H] of one token."""
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert, weight in zip(ids.tolist(), weights.double(), strict=True):
        gate, up = (dequantize(experts.gate_up.expert(expert)).double() @ x.double()).chunk(2)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        hidden = gate * gate.sigmoid() * up
        total += weight * (dequantize(experts.down.expert(expert)).double() @ hidden)
    return total


def _bytes(*shape: int, low: int = 0, high: int = 256, device: str) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, device=device)


def _fp8(e: int, n: int, k: int, device: str) -> QuantMatrix:
    codes = _bytes(e, n, k, device=device).bitwise_and_(0xBF)  # magnitudes below 2
    scale = torch.rand(e, -(-n // 128), -(-k // 128), device=device) * 0.02 + 0.01
    return Fp8BlockMatrix(codes, scale.bfloat16())


def _int4(e: int, n: int, k: int, device: str) -> QuantMatrix:
    codes = _bytes(e, n, k // 2, device=device)
    scale = torch.rand(e, n, k // 128, device=device) * 0.004 + 0.001
    return Int4Matrix(codes, scale.bfloat16())


def _mxfp4(e: int, n: int, k: int, device: str) -> QuantMatrix:
    scale = _bytes(e, n, k // 32, low=117, high=123, device=device)
    return Mxfp4Matrix(_bytes(e, n, k // 2, device=device), scale)


MAKERS: dict[str, Callable[[int, int, int, str], Matrix]] = {
    "fp8": _fp8,
    "int4": _int4,
    "mxfp4": _mxfp4,
}
