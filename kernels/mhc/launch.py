"""Launches of the Triton kernels. None synchronises with the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.mhc.triton import collapse as collapse_kernel
from kernels.mhc.triton import expand as expand_kernel
from kernels.mhc.triton import finish, finish_few, halve, project, project_few, weigh

# Legend: T tokens, n streams, D hidden, M mixing values, S splits of D.

COLUMNS, POINTWISE_WARPS = 1024, 4
FEW_TOKENS, FEW_BLOCK = 64, 16
SPLIT_COLUMNS, MANY_STEPS = 32, 16  # of a step of `project`, and its steps with many tokens
FINISH_WARPS = 4  # of `finish_few`, each of which does all of Sinkhorn
# Tokens of a program of `weigh`: eight of a warp.
WEIGHED, WEIGH_WARPS = 32, 4


@dataclass(frozen=True, slots=True)
class Mixer:
    """What makes the weights of a sublayer, or of the head: see `kernels.mhc.mhc_mix`."""

    fn_MX: torch.Tensor
    base_M: torch.Tensor
    scale: torch.Tensor
    norm_eps: float
    hc_eps: float
    iterations: int = 1
    post_scale: float = 1.0


Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def mix(
    x_TnD: torch.Tensor, mixer: Mixer, expanded: tuple[torch.Tensor, Weights] | None = None
) -> tuple[torch.Tensor, Weights]:
    """The streams and the weights of `mixer`: launches as of `pre`, of many tokens one less."""
    x_TnD, partial = _project(x_TnD, mixer, expanded)
    return x_TnD, _finish(x_TnD, mixer, partial, None, None, None)


def pre(
    x_TnD: torch.Tensor,
    mixer: Mixer,
    norm_D: torch.Tensor | None,
    given_Tn: torch.Tensor | None = None,
    expanded: tuple[torch.Tensor, Weights] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Weights]:
    """The streams, the block input [T, D] of their type, and the weights: two launches, or
    four of many tokens, five where their streams are new.

    `expanded` (y, weights) first adds a block's output y [T, D] to the streams as `expand` does;
    then the streams are new. Without `norm_D` the input is the collapse as it is; `given_Tn`
    collapses in place of the weights made here.
    """
    x_TnD, partial = _project(x_TnD, mixer, expanded)
    tokens, _, width = x_TnD.shape
    y_TD = torch.empty(tokens, width, dtype=x_TnD.dtype, device=x_TnD.device)
    return x_TnD, y_TD, _finish(x_TnD, mixer, partial, y_TD, norm_D, given_Tn)


def collapse(x_TnD: torch.Tensor, pre_Tn: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[T, D]: one launch."""
    x_TnD, pre_Tn = x_TnD.contiguous(), pre_Tn.contiguous()
    tokens, count, width = x_TnD.shape
    out = torch.empty(tokens, width, dtype=dtype, device=x_TnD.device)
    if tokens:
        grid = (tokens, -(-width // COLUMNS))
        collapse_kernel[grid](
            x_TnD, pre_Tn, out, width, NS=count, BLOCK=COLUMNS, num_warps=POINTWISE_WARPS
        )
    return out


def expand(
    x_TnD: torch.Tensor,
    y_TD: torch.Tensor,
    post_Tn: torch.Tensor,
    comb_Tnn: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[T, n, D]: one launch."""
    x_TnD, y_TD = x_TnD.contiguous(), y_TD.contiguous()
    post_Tn, comb_Tnn = post_Tn.contiguous(), comb_Tnn.contiguous()
    tokens, count, width = x_TnD.shape
    out = torch.empty(x_TnD.shape, dtype=dtype, device=x_TnD.device)
    if tokens:
        expand_kernel[(tokens, -(-width // COLUMNS))](
            x_TnD, y_TD, post_Tn, comb_Tnn, out, width, NS=count, BLOCK=COLUMNS,
            num_warps=POINTWISE_WARPS,
        )  # fmt: skip
    return out


def project_constants(
    tokens: int, count: int, width: int, values: int, *, expands: bool
) -> dict[str, int | bool]:
    """Few tokens: as many splits as the card has multiprocessors, and new streams are made beside
    their product; many: less partial sums, of streams that are there.
    """
    few = tokens <= FEW_TOKENS
    blocks = -(-width // SPLIT_COLUMNS)
    form: dict[str, int | bool] = {"EXPAND": expands} if few else {"STEPS": min(MANY_STEPS, blocks)}
    return form | {
        "D": width,
        "NS": count,
        "M": values,
        "BM": max(16, _power_of_two(values + 1)),
        "BT": FEW_BLOCK if few else 64,
        "BD": SPLIT_COLUMNS,
    }


def project_stages(constants: dict[str, int | bool], *, bf16: bool) -> int:
    """Loads of two steps ahead, of one where values are not bf16; none where there is one step."""
    if constants.get("STEPS", 1) == 1:
        return 1
    return 3 if bf16 else 2


def project_warps(constants: dict[str, int | bool], *, bf16: bool) -> int:
    """Many tokens in bf16: 32 rows of a product a warp, each of which reads all of fn."""
    if constants["BT"] == FEW_BLOCK:
        return 4
    return 2 if bf16 else 8


def splits(constants: dict[str, int | bool]) -> int:
    """S of the constants of `project`."""
    return -(-constants["D"] // (constants["BD"] * constants.get("STEPS", 1)))


def finish_constants(
    project: dict[str, int | bool], iterations: int, *, collapses: bool, given: bool, norm: bool
) -> dict[str, int | bool]:
    """Of `finish_few`, from the constants of `project_few`."""
    width = project["D"]
    return weighing(project, iterations) | {
        "BLOCK": _power_of_two(width),
        "COLLAPSE": collapses,
        "GIVEN": given,
        "NORM": norm,
    }


def collapse_constants(width: int, count: int, *, norm: bool) -> dict[str, int | bool]:
    """Of `finish`."""
    return {"D": width, "NS": count, "BLOCK": _power_of_two(width), "NORM": norm}


def weighing(project: dict[str, int | bool], iterations: int) -> dict[str, int | bool]:
    """What the kernels that make weights share."""
    count = splits(project)
    return {name: project[name] for name in ("D", "NS", "M", "BM")} | {
        "S": count,
        "BS": _power_of_two(count),
        "ITERATIONS": iterations,
        "HEAD": project["M"] == project["NS"],
    }


def finish_programs(constants: dict[str, int | bool]) -> int:
    """Of a token of `finish_few`: a head has no `post` and `comb`."""
    return 1 if constants["HEAD"] else 2


def finish_warps(constants: dict[str, int | bool]) -> int:
    """32 values of the streams a thread."""
    return min(16, max(1, constants["BLOCK"] * constants["NS"] // 1024))


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Partial:
    """Sums of splits, fp32 [S, T, BM], and the constants that made them."""

    sums: torch.Tensor
    constants: dict[str, int | bool]


def _project(
    x_TnD: torch.Tensor, mixer: Mixer, expanded: tuple[torch.Tensor, Weights] | None
) -> tuple[torch.Tensor, _Partial]:
    x_TnD = x_TnD.contiguous()
    tokens, count, width = x_TnD.shape
    assert count == _power_of_two(count) and mixer.fn_MX.is_contiguous()
    assert mixer.fn_MX.dtype == torch.float32
    if expanded is not None and tokens > FEW_TOKENS:
        y, (_, post, comb) = expanded
        x_TnD, expanded = expand(x_TnD, y, post, comb, x_TnD.dtype), None
    constants = project_constants(
        tokens, count, width, mixer.fn_MX.shape[0], expands=expanded is not None
    )
    bf16 = x_TnD.dtype == torch.bfloat16
    shape = (splits(constants), tokens, int(constants["BM"]))
    sums = torch.empty(shape, dtype=torch.float32, device=x_TnD.device)
    y = post = comb = out = x_TnD
    if expanded is not None:
        y, (_, post, comb) = expanded
        y, post, comb, out = y.contiguous(), post.contiguous(), comb.contiguous(), _like(x_TnD)
    grid = (-(-tokens // constants["BT"]), splits(constants))
    options = {
        "num_warps": project_warps(constants, bf16=bf16),
        "num_stages": project_stages(constants, bf16=bf16),
    }
    if tokens > FEW_TOKENS:
        fn = _parts(mixer.fn_MX) if bf16 else mixer.fn_MX
        project[grid](x_TnD, fn, sums, tokens, **constants, **options)
    elif tokens:
        project_few[grid](
            x_TnD, y, post, comb, out, mixer.fn_MX, sums, tokens, **constants, **options
        )
    return out, _Partial(sums, constants)


def _parts(fn_MX: torch.Tensor) -> torch.Tensor:
    """bf16 [2, M, n D] for many tokens, each of whose programs would split fn again: one launch."""
    parts = torch.empty((2, *fn_MX.shape), dtype=torch.bfloat16, device=fn_MX.device)
    size = fn_MX.numel()
    halve[(-(-size // COLUMNS),)](fn_MX, parts, size, BLOCK=COLUMNS, num_warps=POINTWISE_WARPS)
    return parts


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _finish(
    x_TnD: torch.Tensor,
    mixer: Mixer,
    partial: _Partial,
    y_TD: torch.Tensor | None,
    norm_D: torch.Tensor | None,
    given_Tn: torch.Tensor | None,
) -> Weights:
    tokens, count, width = x_TnD.shape
    fp32 = partial.sums
    pre_Tn, post_Tn = fp32.new_empty(2, tokens, count)
    comb_Tnn = fp32.new_empty(tokens, count, count)
    assert mixer.base_M.is_contiguous() and mixer.scale.is_contiguous()
    assert norm_D is None or norm_D.is_contiguous()
    weights = (pre_Tn, post_Tn, comb_Tnn)
    shared = pre_Tn if given_Tn is None else given_Tn.contiguous()
    norm = x_TnD if norm_D is None else norm_D
    y = x_TnD if y_TD is None else y_TD
    made = (partial.sums, mixer.base_M, mixer.scale)
    numbers = (tokens, mixer.norm_eps, mixer.hc_eps, mixer.post_scale)
    if tokens > FEW_TOKENS:
        weigh[(-(-tokens // WEIGHED),)](
            *made, *weights, *numbers, **weighing(partial.constants, mixer.iterations), BT=WEIGHED,
            num_warps=WEIGH_WARPS,
        )  # fmt: skip
        if y_TD is not None:
            last = collapse_constants(width, count, norm=norm_D is not None)
            finish[(tokens,)](
                x_TnD, shared, norm, y, tokens, mixer.norm_eps, **last,
                num_warps=finish_warps(last),
            )  # fmt: skip
    elif tokens:
        constants = finish_constants(
            partial.constants, mixer.iterations, collapses=y_TD is not None,
            given=given_Tn is not None, norm=norm_D is not None,
        )  # fmt: skip
        finish_few[(tokens, finish_programs(constants))](
            x_TnD, *made, shared, norm, *weights, y, *numbers, **constants,
            num_warps=FINISH_WARPS,
        )  # fmt: skip
    return weights
