"""humming's kernels on a card, which are built for it first.

On a Hopper card they are Ampere's code, assembled for it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from kernels import backend
from kernels.humming import runtime
from kernels.humming.cards import CARDS
from kernels.humming.forms import FORMS, StoredMatrix
from kernels.humming.matrix import HummingMatrix
from kernels.humming.plan import weight_schema
from kernels.humming.repack import repack
from kernels.humming.samples import random_weights
from kernels.humming.shapes import MODELS, Experts
from kernels.moe import ExpertWeights, routed_experts
from kernels.quant_linear import Fp8BlockMatrix, Int4Matrix, dequantize, linear, prepare

ROOT = Path(__file__).parents[2]
CARD = {(8, 0): "a100", (8, 6): "a6000", (8, 9): "rtx4090", (9, 0): "h200"}
# bf16 outputs (1.7e-3), scale times weight in bf16, sums of split K in bf16.
MAX_ERROR, MAX_EXPERTS_ERROR = 5e-3, 8e-3
STACKS = [weight for weight in MODELS["tests"] if isinstance(weight, Experts)]
SIZE = 1024

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not backend.has_package("humming"), reason="needs the package humming-kernels"
    ),
]


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Builds for this card, and makes a server's look-up find it."""
    card = CARDS[CARD[torch.cuda.get_device_capability()]]
    folder = tmp_path_factory.mktemp("cubins")
    command = [sys.executable, "-m", "kernels.humming", "build", "--models", "tests"]
    command += ["--target", str(card.target), "--card", card.name, "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    runtime.library.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "target", lambda _: card.target)
        patch.setenv(runtime.FOLDER_VARIABLE, str(folder))
        yield
    runtime.library.cache_clear()


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    assert not bool(found.isnan().any())
    return float((found.double() - exact).norm() / exact.norm())


def matrix(form: str) -> tuple[StoredMatrix, HummingMatrix]:
    stored = random_weights(form, SIZE, SIZE, 0, "cuda")
    ready = prepare(stored, "humming")
    assert isinstance(ready, HummingMatrix)
    return stored, ready


@pytest.mark.parametrize("form", FORMS)
def test_products_agree_with_double_precision(form: str) -> None:
    stored, ready = matrix(form)
    dense = dequantize(stored).double()
    for rows in (1, 7, 17, 33, 65, 130, 300, 2000):
        x = torch.randn(rows, SIZE, device="cuda").bfloat16()
        for dtype in (torch.bfloat16, torch.float32):
            out = torch.full((rows, SIZE), torch.nan, dtype=dtype, device="cuda")
            linear(x, ready, out=out)
            assert relative_error(out, x.double() @ dense.t()) < MAX_ERROR, rows
            assert torch.equal(linear(x, ready, dtype), out), f"{rows} rows, a second call"
    assert int(ready.locks.abs().sum()) == 0


@pytest.mark.parametrize("form", ["mxfp4", "fp8-b128"])
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_a_captured_product_takes_new_inputs(form: str, rows: int) -> None:
    stored, ready = matrix(form)
    dense = dequantize(stored).double()
    x = torch.zeros(rows, SIZE, device="cuda").bfloat16()
    out = torch.empty(rows, SIZE, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear(x, ready, out=out)
        linear(x * 2, ready, out=out)
    for _ in range(3):
        x.normal_()
        out.fill_(torch.nan)
        graph.replay()
        assert relative_error(out, 2 * x.double() @ dense.t()) < MAX_ERROR


def stacks(of: Experts) -> tuple[ExpertWeights, ExpertWeights]:
    """As stored and as prepared: the experts 4 to 12 of 16."""
    stored = [
        random_weights(of.form, n, k, of.count, "cuda")
        for n, k in ((2 * of.inner, of.hidden), (of.hidden, of.inner))
    ]
    ready = [prepare(matrix, "humming") for matrix in stored]
    assert all(isinstance(matrix, HummingMatrix) for matrix in ready)
    return tuple(  # type: ignore[return-value]
        ExpertWeights(pair[0], pair[1], of.count, 4, 2 * of.count) for pair in (stored, ready)
    )


def exact_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: ExpertWeights
) -> torch.Tensor:
    """fp64 [T, H], with the limit 1."""
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(experts.count):
        gate_up = dequantize(experts.gate_up.expert(expert)).double()
        down = dequantize(experts.down.expert(expert)).double()
        token, place = torch.nonzero(ids == experts.first_expert + expert, as_tuple=True)
        gate, up = (x[token].double() @ gate_up.t()).chunk(2, dim=1)
        gate, up = gate.clamp(max=1.0), up.clamp(-1.0, 1.0)
        product = (gate * gate.sigmoid() * up) @ down.t()
        total.index_add_(0, token, weights[token, place].double()[:, None] * product)
    return total


@pytest.mark.parametrize("of", STACKS, ids=lambda of: of.form)
def test_experts_agree_with_double_precision_also_from_a_graph(of: Experts) -> None:
    stored, ready = stacks(of)
    for tokens in (1, 5, 33, 200, 900):
        x = torch.zeros(tokens, of.hidden, device="cuda").bfloat16()
        ids = torch.zeros(tokens, 4, dtype=torch.int64, device="cuda")
        weights = torch.rand(tokens, 4, device="cuda")
        out = torch.empty(tokens, of.hidden, device="cuda")
        routed_experts(x, ids, weights, ready, limit=1.0, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            routed_experts(x, ids, weights, ready, limit=1.0, out=out)
        for _ in range(2):
            x.normal_().mul_(0.1)
            ids.copy_(torch.rand(tokens, 16, device="cuda").topk(4).indices)
            ids[-1, -1] = 4  # at least one expert of this rank
            ids[0, 0] = -(2**40)
            out.fill_(torch.nan)
            graph.replay()
            exact = exact_experts(x, ids, weights, stored)
            assert relative_error(out, exact) < MAX_EXPERTS_ERROR, tokens


def raw_tensors(stored: StoredMatrix) -> dict[str, torch.Tensor]:
    """The tensors that the package's own preparation takes."""
    scale = stored.scale
    if isinstance(stored, Fp8BlockMatrix) and stored.block_n == 32:
        scale = scale.repeat_interleave(32, -2)
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    found = {"weight": stored.codes.clone().view(torch.int32), "weight_scale": scale}
    if isinstance(stored, Int4Matrix) and stored.zero is not None:
        eights = stored.zero.to(torch.int32).unflatten(-2, (-1, 8))
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device="cuda")[:, None]
        found["zero_point"] = (eights << shifts).sum(-2, dtype=torch.int32)
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("experts", [0, 3])
def test_the_order_is_that_of_the_package(
    form: str, experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUMMING_CACHE_DIR", str(tmp_path))
    stored = random_weights(form, 256, 384, experts, "cuda")
    transform = import_module("humming.transform").prepare_and_transform_humming_tensors
    _, expected = transform(
        raw_tensors(stored), 256, 384, weight_schema(form), num_experts=experts or None,
        torch_dtype=torch.bfloat16,
    )  # fmt: skip
    names = ("weight", "weight_scale", "zero_point")
    for name, found in zip(names, repack(stored, FORMS[form]), strict=True):
        assert (found is None) == (name not in expected)
        if found is not None:
            assert found.shape == expected[name].shape and found.dtype == expected[name].dtype
            assert torch.equal(found.view(torch.uint8), expected[name].view(torch.uint8))
