"""Repairs of Triton's interpreter, so that bf16 kernels can be checked on a CPU.

As released (3.6), it keeps bf16 as uint16 and does arithmetic and dot products on those bits,
truncates fp32 to bf16, rounds twice in a fused multiply-add, and takes int() of an array where a
loop's bound is a kernel argument.
`install()` mends these; it must run with TRITON_INTERPRET=1 set before Triton's first import.
What it cannot show: races, alignment, the order of sums in tensor cores, inline assembly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder

# Builder methods that compute on floating point values, beside those named create_f*.
FUNCTIONS = (
    "exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "rsqrt", "erf", "floor", "ceil",
    "minimumf", "maximumf", "minnumf", "maxnumf", "clampf", "precise_divf", "precise_sqrt",
)  # fmt: skip
INSTALLED = "_bf16_repaired"


def bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    """Values of bf16 bits (uint16)."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def fp32_to_bf16(values: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) of the nearest value, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _is_bf16(value: object) -> bool:
    return isinstance(value, Handle) and value.dtype.scalar == tl.bfloat16


def _widened(value: Any) -> Any:
    return Handle(bf16_to_fp32(value.data), tl.float32) if _is_bf16(value) else value


def _narrowed(value: Any) -> Handle:
    return Handle(fp32_to_bf16(value.data), tl.bfloat16)


def _in_fp32(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method on fp32 copies of bf16 operands, its fp32 result rounded to bf16."""

    @wraps(method)
    def wrapped(self: Any, *operands: Any) -> Any:
        if not any(_is_bf16(operand) for operand in operands):
            return method(self, *operands)
        result = method(self, *(_widened(operand) for operand in operands))
        return _narrowed(result) if result.data.dtype == np.float32 else result

    return wrapped


def _arithmetic_methods() -> list[str]:
    elementwise = [
        name
        for name in dir(Builder)
        if name.startswith("create_f") and not name.startswith("create_fp_")
    ]
    return elementwise + [f"create_{f}" for f in FUNCTIONS if hasattr(Builder, f"create_{f}")]


def _repair_casts() -> None:
    original = Builder.cast_impl

    def cast_impl(self: Any, source: Any, target_type: Any) -> Any:
        if target_type.scalar == tl.bfloat16:
            wide = _widened(source)
            return _narrowed(Handle(wide.data.astype(np.float32), tl.float32))
        return original(self, _widened(source), target_type)

    def create_fp_to_fp(self: Any, source: Any, target_type: Any, rounding: Any) -> Any:
        kinds = {source.dtype.scalar, target_type.scalar}
        if tl.bfloat16 in kinds and kinds <= {tl.bfloat16, tl.float16, tl.float32, tl.float64}:
            return cast_impl(self, source, target_type)
        return original_fp(self, source, target_type, rounding)

    original_fp = Builder.create_fp_to_fp
    Builder.cast_impl = cast_impl
    Builder.create_fp_to_fp = create_fp_to_fp


def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """fp32 x y + z, rounded once: the product is exact in fp64, and the sum rounded to odd there.

    An odd last bit says that there was more, so rounding again to fp32 rounds as the exact sum.
    Source: Boldo and Melquiond, "Emulation of a FMA and Correctly Rounded Sums", 2008.
    """
    product, z = x.astype(np.float64) * y, z.astype(np.float64)
    total = product + z
    part = total - product
    lost = (product - (total - part)) + (z - part)  # of the sum, exactly
    bits = total.view(np.int64)
    step = np.where((lost > 0) == (total > 0), 1, -1)
    inexact = np.isfinite(lost) & (lost != 0) & (bits % 2 == 0)
    odd: np.ndarray = np.where(inexact, bits + step, bits).view(np.float64)
    return odd.astype(np.float32)


def _repair_fma() -> None:
    original = Builder.create_fma

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype != np.float32:
            return original(self, x, y, z)
        return Handle(fused(x.data, y.data, z.data), tl.float32)

    Builder.create_fma = create_fma


def _repair_dot() -> None:
    original = Builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return original(self, _widened(a), _widened(b), d, *options)

    Builder.create_dot = create_dot


def _repair_bounds() -> None:
    """A scalar is an array of one element, which numpy no longer turns into an int by itself."""
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = patch


def _remember_builtins() -> None:
    """Each call of a device function looks through all of Triton's modules for what to replace."""
    builtins: dict[Any, list[str]] = {}

    def patch(module: Any, builder: Any, scope: Any) -> None:
        if module not in builtins:
            members = inspect.getmembers(module)
            builtins[module] = [name for name, member in members if tl.core.is_builtin(member)]
        for name in builtins[module]:
            member = getattr(module, name)
            if tl.core.is_builtin(member):  # not replaced yet
                interpreter._patch_attr(module, name, member, builder, scope)

    interpreter._patch_builtin = patch


@contextmanager
def programs_backwards() -> Iterator[None]:
    """Runs the programs of a launch from the last to the first of the grid's first axis."""
    forwards = Builder.set_grid_idx

    def backwards(self: Any, x: int, y: int, z: int) -> None:
        forwards(self, self.grid_dim[0] - 1 - x, y, z)

    Builder.set_grid_idx = backwards
    try:
        yield
    finally:
        Builder.set_grid_idx = forwards


def install() -> None:
    """Mend the interpreter of this process, once.

    Raises RuntimeError where Triton was imported to compile.
    """
    if not knobs.runtime.interpret or not hasattr(tl.sum, "rewriter"):
        raise RuntimeError("TRITON_INTERPRET=1 must be set before Triton is first imported")
    if getattr(Builder, INSTALLED, False):
        return
    _repair_fma()
    for name in _arithmetic_methods():
        setattr(Builder, name, _in_fp32(getattr(Builder, name)))
    _repair_casts()
    _repair_dot()
    _repair_bounds()
    _remember_builtins()
    setattr(Builder, INSTALLED, True)
