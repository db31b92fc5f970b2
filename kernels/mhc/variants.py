"""The variants of the hyper-connection kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kernels.aot.variant import Variant
from kernels.mhc import launch
from kernels.mhc.triton import (
    collapse,
    expand,
    finish,
    finish_few,
    halve,
    project,
    project_few,
    weigh,
)

WIDTH, STREAMS, ITERATIONS = 4096, 4, 20  # of DeepSeek-V4, V4.1 and GLM-5.3
MIXES, HEAD = 24, 4
PROJECT = {
    "x": "*bf16", "y": "*bf16", "post": "*fp32", "comb": "*fp32", "out": "*bf16", "fn": "*fp32",
    "partial": "*fp32", "T": "i32",
}  # fmt: skip
FINISH = {
    "x": "*bf16", "partial": "*fp32", "base": "*fp32", "scale": "*fp32", "given": "*fp32",
    "weight": "*bf16", "pre": "*fp32", "post": "*fp32", "comb": "*fp32", "y": "*bf16", "T": "i32",
    "norm_eps": "fp32", "hc_eps": "fp32", "post_scale": "fp32",
}  # fmt: skip
COLLAPSE = {"x": "*bf16", "pre": "*fp32", "out": "*fp32", "D": "i32"}
EXPAND = {
    "x": "*bf16", "y": "*bf16", "post": "*fp32", "comb": "*fp32", "out": "*bf16", "D": "i32",
}  # fmt: skip
HALVE = {"fn": "*fp32", "parts": "*bf16", "X": "i32"}
NUMBERS = {"T", "norm_eps", "hc_eps", "post_scale"}


def variants(target: int) -> Iterator[Variant]:
    """The same for every target."""
    many = 2 * launch.FEW_TOKENS
    for values in (MIXES, HEAD):
        yield _project(1, values, False)
        yield _project(many, values, False)
    yield _project(1, MIXES, True)
    yield _finish_few(MIXES, given=False, norm=True)
    yield _finish_few(MIXES, given=True, norm=True)
    yield _finish_few(HEAD, given=False, norm=False)
    for values, norm in ((MIXES, True), (HEAD, False)):
        yield _weigh(many, values)
        yield _finish(norm=norm)
    constants: dict[str, int | bool] = {"NS": STREAMS, "BLOCK": launch.COLUMNS}
    yield Variant(
        "mhc halve", halve, HALVE, {"BLOCK": launch.COLUMNS}, frozenset(HALVE),
        launch.POINTWISE_WARPS, 3,
    )  # fmt: skip
    for kernel, arguments in ((collapse, COLLAPSE), (expand, EXPAND)):
        yield Variant(
            f"mhc {kernel.fn.__name__}", kernel, arguments, constants, frozenset(arguments),
            launch.POINTWISE_WARPS, 3,
        )  # fmt: skip


def _project(tokens: int, values: int, expands: bool) -> Variant:
    constants = _sums(tokens, values, expands=expands)
    label = f"mhc project {values} values, {constants['BT']} tokens{', expands' * expands}"
    few = tokens <= launch.FEW_TOKENS
    unread = {} if expands else {"post": "*bf16", "comb": "*bf16"}
    kernel = project_few if few else project
    types = PROJECT | unread | ({} if few else {"fn": "*bf16"})
    return Variant(
        label, kernel, _of(kernel, types), constants, frozenset(PROJECT) - NUMBERS,
        launch.project_warps(constants, bf16=True), launch.project_stages(constants, bf16=True),
    )  # fmt: skip


def _finish_few(values: int, *, given: bool, norm: bool) -> Variant:
    constants = launch.finish_constants(
        _sums(1, values), ITERATIONS, collapses=True, given=given, norm=norm
    )
    label = f"mhc finish {values} values, {constants['S']} splits{', given pre' * given}"
    return _finishing(label, finish_few, constants, launch.FINISH_WARPS)


def _finish(*, norm: bool) -> Variant:
    constants = launch.collapse_constants(WIDTH, STREAMS, norm=norm)
    label = f"mhc finish many tokens{', normed' * norm}"
    return _finishing(label, finish, constants, launch.finish_warps(constants))


def _finishing(label: str, kernel: Any, constants: dict[str, int | bool], warps: int) -> Variant:
    aligned = frozenset(FINISH) - NUMBERS
    return Variant(label, kernel, _of(kernel, FINISH), constants, aligned, warps, 3)


def _weigh(tokens: int, values: int) -> Variant:
    constants = launch.weighing(_sums(tokens, values), ITERATIONS) | {"BT": launch.WEIGHED}
    aligned = frozenset(FINISH) - NUMBERS
    return Variant(
        f"mhc weigh {values} values", weigh, _of(weigh, FINISH), constants, aligned,
        launch.WEIGH_WARPS, 3,
    )  # fmt: skip


def _of(kernel: Any, types: dict[str, str]) -> dict[str, str]:
    """Those of the kernel's arguments."""
    return {name: kind for name, kind in types.items() if name in kernel.arg_names}


def _sums(tokens: int, values: int, *, expands: bool = False) -> dict[str, int | bool]:
    return launch.project_constants(tokens, STREAMS, WIDTH, values, expands=expands)
