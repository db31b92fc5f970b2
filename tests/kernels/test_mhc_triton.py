"""Hyper-connection kernels against fp64 formulas: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import backend, mhc
from kernels.mhc import bench, launch
from kernels.mhc.exact import expanded, head_weights, mixing_weights, normed_collapse

DEVICE = "cpu" if backend.interpreted() else "cuda"
STREAMS, VALUES = 4, 24
ERROR = {torch.float32: 1e-5, torch.bfloat16: 3e-3}
OPTIONS = {"norm_eps": 1e-6, "hc_eps": 1e-6}
SHAPES = [(0, 32), (1, 96), (5, 65), (67, 65)]


def made(
    tokens: int, width: int, dtype: torch.dtype, iterations: int = 2
) -> tuple[torch.Tensor, launch.Mixer]:
    x = (torch.randn(tokens, STREAMS, width) * 3).to(dtype)
    fn = torch.randn(VALUES, STREAMS * width) / 20
    mixer = launch.Mixer(
        fn.to(DEVICE),
        torch.randn(VALUES).to(DEVICE),
        (torch.rand(3) + 0.5).to(DEVICE),
        iterations=iterations,
        post_scale=2.0,
        **OPTIONS,
    )
    return x.to(DEVICE), mixer


def near(found: torch.Tensor, exact: torch.Tensor) -> bool:
    assert found.shape == exact.shape
    return bool((found.double() - exact).norm() <= ERROR[found.dtype] * exact.norm())


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(
    ("tokens", "width", "iterations"), [(0, 32, 1), (1, 96, 20), (3, 65, 3), (65, 96, 1)]
)
def test_mix(tokens: int, width: int, iterations: int, dtype: torch.dtype) -> None:
    x, mixer = made(tokens, width, dtype, iterations)
    for found, exact in zip(launch.mix(x, mixer)[1], mixing_weights(x, mixer), strict=True):
        assert found.dtype == torch.float32 and near(found, exact)


@pytest.mark.parametrize("given", [False, True], ids=["own_pre", "given_pre"])
@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_post_and_pre(tokens: int, width: int, dtype: torch.dtype, given: bool) -> None:
    x, mixer = made(tokens, width, dtype)
    y = torch.randn(tokens, width).to(dtype).to(DEVICE)
    post = torch.rand(tokens, STREAMS, device=DEVICE)
    comb = torch.rand(tokens, STREAMS, STREAMS, device=DEVICE) / STREAMS
    norm = torch.randn(width).bfloat16().to(DEVICE)
    pre = torch.rand(tokens, STREAMS, device=DEVICE) if given else None
    out, found, weights = launch.pre(x, mixer, norm, pre, (y, (post, post, comb)))
    assert out.dtype == found.dtype == dtype and near(out, expanded(x, y, post, comb))
    exact = mixing_weights(out, mixer)
    for one, other in zip(weights, exact, strict=True):
        assert near(one, other)
    share = exact[0] if pre is None else pre
    bound = normed_collapse(out, share, norm, mixer.norm_eps)
    assert (found.double() - bound).norm() <= 1.7 * ERROR[dtype] * bound.norm()
    again, same, _ = launch.pre(out, mixer, norm, pre)
    assert again is out
    if tokens <= launch.FEW_TOKENS:
        assert torch.equal(same, found)
    else:
        assert (same.double() - bound).norm() <= 1.7 * ERROR[dtype] * bound.norm()


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_head(tokens: int, dtype: torch.dtype) -> None:
    x, mixer = made(tokens, 72, dtype)
    fn, base = mixer.fn_MX[:STREAMS].contiguous(), mixer.base_M[:STREAMS].contiguous()
    head = launch.Mixer(fn, base, mixer.scale[:1], **OPTIONS)
    _, collapsed, weights = launch.pre(x, head, None)
    exact = head_weights(x, head)
    assert near(weights[0], exact)
    assert near(collapsed, (exact[..., None] * x.double()).sum(1))


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(("tokens", "width"), [(0, 8), (1, 1030), (5, 65)])
def test_collapse_and_expand(tokens: int, width: int, dtype: torch.dtype) -> None:
    x, _ = made(tokens, width, dtype)
    y = torch.randn(tokens, width).to(dtype).to(DEVICE)
    post = torch.rand(tokens, STREAMS, device=DEVICE)
    comb = torch.rand(tokens, STREAMS, STREAMS, device=DEVICE)
    for out_dtype in ERROR:
        found = launch.collapse(x, post, out_dtype)
        assert near(found, (post.double()[..., None] * x.double()).sum(1))
        assert near(launch.expand(x, y, post, comb, out_dtype), expanded(x, y, post, comb))


def test_large_logits_stay_finite() -> None:
    x, mixer = made(3, 40, torch.bfloat16)
    mixer = launch.Mixer(
        mixer.fn_MX * 1e3, mixer.base_M * 100, mixer.scale, iterations=20, **OPTIONS
    )
    for value in launch.mix(x, mixer)[1]:
        assert value.isfinite().all()


def test_a_token_has_the_same_bits_beside_others() -> None:
    x, mixer = made(17, 40, torch.bfloat16)
    whole, alone = launch.mix(x, mixer)[1], launch.mix(x[16:17], mixer)[1]
    for many, one in zip(whole, alone, strict=True):
        assert torch.equal(many[16:17], one)


@pytest.mark.parametrize("given", [False, True], ids=["own_pre", "given_pre"])
def test_the_fused_functions_on_a_cpu(given: bool) -> None:
    x, mixer = made(7, 40, torch.bfloat16)
    x, mixer_cpu = x.cpu(), [t.cpu() for t in (mixer.fn_MX, mixer.base_M, mixer.scale)]
    y, norm = torch.randn(7, 40).bfloat16(), torch.randn(40).bfloat16()
    post, comb = torch.rand(7, STREAMS), torch.rand(7, STREAMS, STREAMS)
    pre = torch.rand(7, STREAMS) if given else None
    options = {"iterations": 20, "pre_Tn": pre, **OPTIONS}
    out, found, *weights = mhc.mhc_post_pre(x, y, post, comb, *mixer_cpu, norm, **options)
    assert near(out, expanded(x, y, post, comb))
    cpu = launch.Mixer(*mixer_cpu, iterations=20, post_scale=2.0, **OPTIONS)
    exact = mixing_weights(out, cpu)
    share = exact[0] if pre is None else pre
    bound = normed_collapse(out, share, norm, 1e-6)
    assert (found.double() - bound).norm() <= 5e-3 * bound.norm()
    for one, other in zip(weights, exact, strict=True):
        assert near(one, other)


def test_the_benchmark_measures_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SETS", 1)
    monkeypatch.setattr(bench, "ITERATIONS", 2)
    for make in (bench._fused, bench._pre):
        work = make(2, 32, DEVICE)
        assert work.error() < work.bound
    inputs = bench.Inputs(2, 32, DEVICE)
    out, y, weights = inputs.pre()
    assert bench.error(inputs, lambda: (out, y * 1.1, weights), expands=False) > bench.MAX_ERROR


@pytest.mark.gpu
def test_a_replayed_graph() -> None:
    x, mixer = made(16, 4096, torch.bfloat16)
    norm = torch.randn(4096, device="cuda").bfloat16()
    launch.pre(x, mixer, norm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, found, weights = launch.pre(x, mixer, norm)
    x.copy_(torch.randn_like(x))
    graph.replay()
    exact = mixing_weights(x, mixer)
    for one, other in zip(weights, exact, strict=True):
        assert near(one, other)
    bound = normed_collapse(x, exact[0], norm, mixer.norm_eps)
    assert (found.double() - bound).norm() <= 5e-3 * bound.norm()
