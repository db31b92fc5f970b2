"""GLM's latent attention as a GPU runs it, against expanded keys and values in fp64."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels import backend
from kernels.mla import launch
from kernels.quant_linear import Fp8BlockMatrix, Matrix, PlainMatrix, dequantize
from kernels.split_keys import Partials

DEVICE = "cpu" if backend.interpreted() else "cuda"
ERROR = 8e-3  # queries, weights, mixed latents and outputs in bf16
HEADS, KEY, VALUE, LATENT = 3, 48, 32, 64
SEQUENCES, PAGES, PAGE = 2, 9, 16
SCALE = KEY**-0.5


def kv_b(form: str) -> Matrix:
    rows = HEADS * (KEY + VALUE)
    if form == "bf16":
        return PlainMatrix((torch.randn(rows, LATENT) * LATENT**-0.5).bfloat16().to(DEVICE))
    codes = torch.randint(0, 0x7E, (rows, LATENT), dtype=torch.uint8).to(DEVICE)
    return Fp8BlockMatrix(codes, (torch.rand(-(-rows // 128), 1) * 1e-3).to(DEVICE))


class Step:
    """Inputs of T tokens over shuffled pages; no table names the poison page."""

    def __init__(self, tokens: int, slots: int) -> None:
        self.q_THK = torch.randn(tokens, HEADS, KEY).bfloat16().to(DEVICE)
        pool = torch.randn(SEQUENCES * PAGES + 1, PAGE, LATENT).bfloat16()
        pool[-1] = torch.nan
        self.pool = pool.to(DEVICE)
        self.table = torch.randperm(SEQUENCES * PAGES).view(SEQUENCES, PAGES).to(DEVICE)
        self.sequence = torch.randint(0, SEQUENCES, (tokens,)).to(DEVICE)
        self.selected = torch.full((tokens, slots), -1, device=DEVICE)
        self.select()

    def select(self) -> None:
        """At least one token each, ascending, -1 behind the last."""
        slots = self.selected.shape[1]
        for t in range(len(self.selected)):
            count = int(torch.randint(1, slots + 1, ()))
            chosen = torch.randperm(PAGES * PAGE)[:count].sort().values
            self.selected[t, :count] = chosen.to(DEVICE)
            self.selected[t, count:] = -1

    def run(self, matrix: Matrix, partials: Partials | None = None) -> torch.Tensor:
        mixed = launch.mla_attention(
            launch.absorb_queries(self.q_THK, matrix),
            self.pool,
            self.table,
            self.sequence,
            SCALE,
            self.selected,
            partials,
        )
        return launch.expand_values(mixed, matrix, VALUE)

    def expected(self, matrix: Matrix) -> torch.Tensor:
        """fp64: every head's own keys and values."""
        weights = dequantize(matrix).double().view(HEADS, KEY + VALUE, LATENT)
        out = []
        for t, b in enumerate(self.sequence.tolist()):
            chosen = self.selected[t][self.selected[t] >= 0]
            latents = self.pool[self.table[b, chosen // PAGE], chosen % PAGE].double()
            expanded = torch.einsum("lc,hrc->hlr", latents, weights)
            logits = torch.einsum("hk,hlk->hl", self.q_THK[t].double(), expanded[..., :KEY])
            out.append(torch.einsum("hl,hlv->hv", (logits * SCALE).softmax(1), expanded[..., KEY:]))
        return torch.stack(out)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("form", ["bf16", "fp8"])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (2, 63), (5, 65)])
def test_absorbed_attention_agrees_with_expanded_attention(
    form: str, tokens: int, slots: int
) -> None:
    matrix, step = kv_b(form), Step(tokens, slots)
    assert error(step.run(matrix), step.expected(matrix)) < ERROR


@pytest.mark.parametrize("tokens", [0, 1, 19])
def test_products_agree_with_double_precision(tokens: int) -> None:
    matrix = kv_b("bf16")
    weights = dequantize(matrix).double().view(HEADS, KEY + VALUE, LATENT)
    q = torch.randn(tokens, HEADS, KEY).bfloat16().to(DEVICE)
    o = torch.randn(tokens, HEADS, LATENT).bfloat16().to(DEVICE)
    for found, exact in (
        (
            launch.absorb_queries(q, matrix),
            torch.einsum("thk,hkc->thc", q.double(), weights[:, :KEY]),
        ),
        (
            launch.expand_values(o, matrix, VALUE),
            torch.einsum("thc,hvc->thv", o.double(), weights[:, KEY:]),
        ),
    ):
        assert found.is_contiguous() and found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), exact, rtol=8e-3, atol=1e-2)


def test_what_is_out_of_range_is_left_out() -> None:
    matrix, step = kv_b("bf16"), Step(3, 40)
    expected = step.expected(matrix)
    stale = torch.tensor([PAGES * PAGE, 1 << 40, -2], device=DEVICE).repeat(3, 1)
    step.selected = torch.cat([stale, step.selected, stale], dim=1)
    assert error(step.run(matrix), expected) < ERROR
    step.sequence[0] = SEQUENCES
    step.table[:] = SEQUENCES * PAGES + 1
    assert not step.run(matrix).any()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 100])
def test_a_graph_replays_with_other_inputs(tokens: int) -> None:
    matrix, step = kv_b("bf16"), Step(tokens, 70)
    call = partial(step.run, matrix)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for _ in range(2):
        step.q_THK.normal_()
        step.select()
        out.fill_(torch.nan)
        graph.replay()
        assert error(out, step.expected(matrix)) < ERROR
