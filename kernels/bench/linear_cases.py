"""The quantised linear layer: shapes of the served models, random weights, checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.quant_linear import Fp8BlockMatrix, Int4Matrix, Mxfp4Matrix, dequantize, prepare
from kernels.quant_linear.launch import QuantMatrix, quant_linear
from kernels.quant_linear.tuning import Config

# Rotating weights exceed any card's cache by far.
ROTATED_BYTES = 240_000_000
MAX_ERROR = {"fp8": 4.5e-3, "int4": 4.5e-3, "mxfp4": 2.5e-3}
CHECKED_ROWS = 32


@dataclass(frozen=True)
class Case:
    """x [M, K] times weights [N, K] of a format."""

    weights: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def name(self) -> str:
        return f"{self.weights} {self.n}x{self.k}"


ROWS = (1, 4, 16, 64, 2048)
SHAPES = (
    ("fp8", 4096, 4096),
    ("fp8", 16384, 4096),
    ("int4", 17408, 5120),
    ("int4", 5120, 17408),
    ("mxfp4", 4096, 4096),
    ("mxfp4", 16384, 4096),
)


def cases(rows: tuple[int, ...] = ROWS) -> list[Case]:
    return [Case(weights, m, n, k) for weights, n, k in SHAPES for m in rows]


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


def rotation(weights: str, n: int, k: int) -> list[QuantMatrix]:
    """Enough matrices, in checkpoint order, to exceed the caches when used in turn."""
    first = random_matrix(weights, n, k)
    count = max(3, -(-ROTATED_BYTES // first.nbytes))
    return [first, *(random_matrix(weights, n, k) for _ in range(count - 1))]


def prepared(matrices: list[QuantMatrix]) -> list[QuantMatrix]:
    return [prepare(matrix) for matrix in matrices]  # type: ignore[misc]


def relative_error(found: torch.Tensor, x: torch.Tensor, dense: torch.Tensor) -> float:
    """Of the first and last rows against fp64; infinite where an element was not written."""
    if bool(found.isnan().any()):
        return float("inf")
    rows = list(range(len(x)))
    rows = (
        rows
        if len(rows) <= CHECKED_ROWS
        else rows[: CHECKED_ROWS // 2] + rows[-CHECKED_ROWS // 2 :]
    )
    exact = x[rows].double() @ dense.double().t()
    return float((found[rows].double() - exact).norm() / exact.norm())


def checked(
    case: Case, x: torch.Tensor, weight: QuantMatrix, dense: torch.Tensor, config: Config | None
) -> float:
    """The relative error of our kernel. Raises RuntimeError where it is too large."""
    out = torch.full((case.m, case.n), torch.nan, dtype=torch.bfloat16, device="cuda")
    quant_linear(x, weight, out, None, config)
    error = relative_error(out, x, dense)
    if not error < MAX_ERROR[case.weights]:
        raise RuntimeError(f"{case}: relative error {error}")
    return error


def dense_of(weight: QuantMatrix) -> torch.Tensor:
    return dequantize(weight)
