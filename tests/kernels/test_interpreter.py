"""The repaired interpreter against torch's bf16."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl

from kernels import backend

pytestmark = pytest.mark.skipif(not backend.interpreted(), reason="compiled on this machine")

N = 64


@triton.jit
def _arithmetic(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, x * y + x)


@triton.jit
def _round(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(a + i).to(tl.bfloat16))


@triton.jit
def _product(a, b, c, steps, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    acc = tl.zeros((N, N), tl.float32)
    for _ in range(0, steps):
        acc = tl.dot(tl.load(a + at), tl.load(b + at), acc)
    tl.store(c + at, acc)


@triton.jit
def _fused(a, b, c, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.fma(tl.load(a + i), tl.load(b + i), tl.load(c + i)))


def test_fused_multiply_add_rounds_the_exact_sum_once() -> None:
    a, b = torch.randn(N), torch.randn(N)
    c = -a * b  # the sum is the product's rounding error
    a[-2:] = torch.tensor([4097.0, -4097.0]) * 2.0**-30
    b[-2:], c[-2:] = 16773121 * 2.0**-30, torch.tensor([1.0, -1.0])  # 2^-60 beyond a tie of fp32
    c[: N // 2] += torch.randn(N // 2)
    out = torch.full((N,), torch.nan)
    _fused[(1,)](a, b, c, out, N)
    below, above = (torch.nextafter(out, torch.tensor(end)) for end in (-torch.inf, torch.inf))
    for x, y, z, *results in zip(*(t.tolist() for t in (a, b, c, out, below, above)), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        found, *others = (abs(Fraction(result) - exact) for result in results)
        assert found < min(others)


def test_bf16_arithmetic_rounds_each_result() -> None:
    a, b = torch.randn(N).bfloat16(), torch.randn(N).bfloat16()
    out = torch.full((N,), torch.nan, dtype=torch.bfloat16)
    _arithmetic[(1,)](a, b, out, N)
    assert torch.equal(out, a * b + a)


def test_fp32_rounds_to_the_nearest_bf16_with_ties_to_even() -> None:
    ties = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.4e38, 1e-40, 0.0, float("inf")])
    values = torch.cat([ties, torch.randn(N - len(ties))])
    out = torch.empty(N, dtype=torch.bfloat16)
    _round[(1,)](values, out, N)
    assert torch.equal(out, values.bfloat16())


def test_nan_stays_nan() -> None:
    out = torch.zeros(N, dtype=torch.bfloat16)
    _round[(1,)](torch.full((N,), torch.nan), out, N)
    assert out.isnan().all()


def test_bf16_dot_sums_in_fp32_over_a_run_time_number_of_steps() -> None:
    a, b = torch.randn(N, N).bfloat16(), torch.randn(N, N).bfloat16()
    c = torch.full((N, N), torch.nan)
    _product[(1,)](a, b, c, 3, N)
    torch.testing.assert_close(c, 3 * (a.float() @ b.float()), rtol=1e-5, atol=1e-4)
