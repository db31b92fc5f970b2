"""The variants of the hyper-connection kernels that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.mhc import launch
from kernels.mhc.triton import collapse, expand, finish, halve, project, weigh

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
    yield _finish(1, MIXES, given=False, norm=True)
    yield _finish(1, MIXES, given=True, norm=True)
    yield _finish(1, HEAD, given=False, norm=False)
    for values, norm in ((MIXES, True), (HEAD, False)):
        yield _weigh(many, values)
        yield _finish(many, values, given=True, norm=norm)
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
    constants = launch.project_constants(
        tokens, STREAMS, WIDTH, values, exact=True, expands=expands
    )
    label = f"mhc project {values} values, {constants['BT']} tokens{', expands' * expands}"
    unread = {} if expands else {"post": "*bf16", "comb": "*bf16"}
    if tokens > launch.FEW_TOKENS:
        unread["fn"] = "*bf16"
    return Variant(
        label, project, PROJECT | unread, constants, frozenset(PROJECT) - NUMBERS,
        launch.project_warps(constants), launch.project_stages(constants),
    )  # fmt: skip


def _finish(tokens: int, values: int, *, given: bool, norm: bool) -> Variant:
    constants = _constants(tokens, values, given=given, norm=norm)
    label = f"mhc finish {values} values, {constants['S']} splits{', given pre' * given}"
    aligned = frozenset(FINISH) - NUMBERS
    return Variant(label, finish, FINISH, constants, aligned, launch.finish_warps(constants), 3)


def _weigh(tokens: int, values: int) -> Variant:
    constants = launch.weigh_constants(_constants(tokens, values, given=True, norm=True))
    arguments = {name: kind for name, kind in FINISH.items() if name in weigh.arg_names}
    aligned = frozenset(arguments) - NUMBERS
    return Variant(
        f"mhc weigh {values} values", weigh, arguments, constants, aligned, launch.WEIGH_WARPS, 3
    )


def _constants(tokens: int, values: int, *, given: bool, norm: bool) -> dict[str, int | bool]:
    sums = launch.project_constants(tokens, STREAMS, WIDTH, values, exact=True, expands=False)
    few = tokens <= launch.FEW_TOKENS
    return launch.finish_constants(
        sums, ITERATIONS, weighs=few, collapses=True, given=given, norm=norm
    )
