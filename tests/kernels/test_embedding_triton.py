"""The embedding kernel: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.embedding import launch

DEVICE = "cpu" if backend.interpreted() else "cuda"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 63, 1000, 2056])
@pytest.mark.parametrize("first", [0, 40])
def test_rows_of_a_slice_and_zeros_elsewhere(dtype: torch.dtype, width: int, first: int) -> None:
    table = torch.randn(20, width).to(dtype)
    ids = torch.tensor([0, 19, 20, 40, 59, 60, -1, 1 << 40])
    out = torch.full((len(ids), width), torch.nan, device=DEVICE)
    launch.embedding(ids.to(DEVICE), table.to(DEVICE), first, out)
    rows = [table[i - first] if 0 <= i - first < 20 else table[0] * 0 for i in ids.tolist()]
    assert torch.equal(out.cpu(), torch.stack(rows).float())


def test_no_ids() -> None:
    out = torch.empty(0, 8, device=DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert launch.embedding(none, torch.empty(4, 8, device=DEVICE), 0, out).shape == (0, 8)


@pytest.mark.gpu
def test_a_replayed_graph_follows_new_ids() -> None:
    table = torch.randn(1000, 4096, device=DEVICE).bfloat16()
    ids = torch.zeros(33, dtype=torch.int64, device=DEVICE)
    out = torch.empty(33, 4096, dtype=torch.bfloat16, device=DEVICE)
    launch.embedding(ids, table, 500, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.embedding(ids, table, 500, out)
    for _ in range(2):
        fresh = torch.randint(-10, 2000, ids.shape)
        ids.copy_(fresh)
        out.fill_(torch.nan)
        graph.replay()
        held = (fresh >= 500) & (fresh < 1500)
        wanted = torch.where(held[:, None], table.cpu()[(fresh - 500).clamp(0, 999)], 0.0)
        assert torch.equal(out.cpu(), wanted)
