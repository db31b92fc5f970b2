"""The benchmark of the quantised linear layer: shapes of the served models, random weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from kernels.bench import humming_peer
from kernels.bench.case import Call, Case, Work
from kernels.humming.select import chosen
from kernels.quant_linear import (
    Fp8BlockMatrix,
    HummingMatrix,
    Int4Matrix,
    Mxfp4Matrix,
    dequantize,
    linear,
    prepare,
)
from kernels.quant_linear.launch import QuantMatrix, Workspace, quant_linear
from kernels.quant_linear.tuning import Config

# Rotating weights exceed any card's cache by far.
ROTATED_BYTES = 240_000_000
MAX_ERROR = {"fp8": 4.5e-3, "int4": 4.5e-3, "mxfp4": 2.5e-3}
PEER_ERROR = 1e-2
CHECKED_ROWS = 32
ROWS = (1, 16, 64, 2048)
SHAPES = (
    ("fp8", 4096, 4096),
    ("fp8", 16384, 4096),
    ("int4", 17408, 5120),
    ("mxfp4", 16384, 4096),
    ("mxfp4", 4096, 4096),
    ("int4", 5120, 17408),
)


@dataclass(frozen=True)
class Product:
    """x [M, K] times weights [N, K] of a format."""

    weights: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def shape(self) -> str:
        return f"{self.weights} {self.n}x{self.k}"


class Setting:
    """The weights of one shape, made when first used; the cases of a shape share them."""

    def __init__(self, weights: str, n: int, k: int) -> None:
        self.shape = (weights, n, k)

    @cached_property
    def matrices(self) -> list[QuantMatrix]:
        """Enough, in checkpoint order, to exceed the caches when used in turn."""
        first = random_matrix(*self.shape)
        count = max(3, -(-ROTATED_BYTES // first.nbytes))
        return [first, *(random_matrix(*self.shape) for _ in range(count - 1))]

    @cached_property
    def ready(self) -> list[QuantMatrix]:
        return [prepare(matrix, "triton") for matrix in self.matrices]  # type: ignore[misc]

    @cached_property
    def dense(self) -> torch.Tensor:
        """The first matrix in fp32."""
        return dequantize(self.matrices[0])

    @cached_property
    def library(self) -> list[torch.Tensor]:
        others = (torch.randn_like(self.dense, dtype=torch.bfloat16) for _ in range(2))
        return [self.dense.bfloat16(), *others]

    @cached_property
    def humming(self) -> list[HummingMatrix] | None:
        return humming_peer.matrices(self.matrices)


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        setting = Setting(*shape)
        for m in ROWS:
            yield _case(Product(shape[0], m, *shape[1:]), setting)


def products(only: str = "") -> list[Product]:
    """What is tuned: products whose case contains one of the comma-separated parts of `only`."""
    found = [Product(weights, m, n, k) for weights, n, k in SHAPES for m in ROWS]
    parts = only.split(",")
    return [p for p in found if any(part in f"quant_linear {_name(p)}" for part in parts)]


def _name(product: Product) -> str:
    return f"{product.shape} M={product.m}"


def _case(product: Product, setting: Setting) -> Case:
    return Case(
        "quant_linear",
        _name(product),
        partial(_ours, product, setting),
        {
            "humming": partial(_humming, product, setting),
            "library bf16": partial(_library, product, setting),
        },
        chosen("dense", product.n * product.k),
    )


def _ours(product: Product, setting: Setting) -> Work:
    x, out = inputs(product), outputs(product)
    workspace = Workspace.allocate(setting.ready[:1], [product.m], x.device)
    calls = [partial(quant_linear, x, w, out, workspace) for w in setting.ready]
    return _work(product, setting, calls, x, out, MAX_ERROR[product.weights])


def _humming(product: Product, setting: Setting) -> Work | None:
    if setting.humming is None:
        return None
    x, out = inputs(product), outputs(product)
    calls = [partial(linear, x, matrix, out=out) for matrix in setting.humming]
    return _work(product, setting, calls, x, out, PEER_ERROR)


def _library(product: Product, setting: Setting) -> Work:
    x, out = inputs(product), outputs(product)
    calls = [partial(torch.mm, x, w.t(), out=out) for w in setting.library]
    return _work(product, setting, calls, x, out, PEER_ERROR)


def _work(
    product: Product,
    setting: Setting,
    calls: Sequence[Call],
    x: torch.Tensor,
    out: torch.Tensor,
    bound: float,
) -> Work:
    def error() -> float:
        out.fill_(torch.nan)
        calls[0]()
        return relative_error(out, x, setting.dense)

    return Work(calls, error, bound, setting.ready[0].nbytes, product.flops)


def inputs(product: Product) -> torch.Tensor:
    return torch.randn(product.m, product.k, device="cuda").bfloat16()


def outputs(product: Product) -> torch.Tensor:
    return torch.empty(product.m, product.n, dtype=torch.bfloat16, device="cuda")


def random_matrix(weights: str, n: int, k: int) -> QuantMatrix:
    """In checkpoint order, on the device, with scales of usual sizes."""
    if weights == "fp8":
        codes = torch.randn(n, k, device="cuda").mul_(60).clamp_(-440, 440)
        scale = torch.rand(n // 128, k // 128, device="cuda") * 2e-4 + 1e-4
        return Fp8BlockMatrix(codes.to(torch.float8_e4m3fn).view(torch.uint8), scale)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    if weights == "int4":
        scale = (torch.rand(n, k // 128, device="cuda") * 0.01 + 0.002).bfloat16()
        return Int4Matrix(codes, scale)
    exponents = torch.randint(117, 123, (n, k // 32), dtype=torch.uint8, device="cuda")
    return Mxfp4Matrix(codes, exponents)


def relative_error(found: torch.Tensor, x: torch.Tensor, dense: torch.Tensor) -> float:
    """Of the first and last rows against fp64; infinite where an element was not written."""
    if bool(found.isnan().any()):
        return float("inf")
    rows = list(range(len(x)))
    if len(rows) > CHECKED_ROWS:
        rows = rows[: CHECKED_ROWS // 2] + rows[-CHECKED_ROWS // 2 :]
    exact = x[rows].double() @ dense.double().t()
    return float((found[rows].double() - exact).norm() / exact.norm())


def checked(product: Product, x: torch.Tensor, setting: Setting, config: Config) -> torch.Tensor:
    """The output with `config`. Raises RuntimeError where its relative error is too large."""
    out = outputs(product).fill_(torch.nan)
    quant_linear(x, setting.ready[0], out, None, config)
    error = relative_error(out, x, setting.dense)
    if not error < MAX_ERROR[product.weights]:
        raise RuntimeError(f"{product}: relative error {error}")
    return out
