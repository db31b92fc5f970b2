"""The chunks of KDA against a recurrence in fp64."""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.gated_delta import Slots
from kernels.gated_delta.launch import States
from kernels.kda import launch, reference
from kernels.kda.launch import kda
from tests.kernels.delta_rule import Inputs, error

DEVICE = "cpu" if backend.interpreted() else "cuda"
BOUND = 5e-3


def run(x: Inputs, writes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full(x.v.shape, torch.nan, device=DEVICE)
    states = x.state.new_full((len(writes), *x.state.shape[1:]), torch.nan)
    token = torch.tensor(writes, dtype=torch.int64, device=DEVICE)
    kda(*x.tensors, States(x.state, states), x.starts, token, out)
    return out, states


@pytest.mark.parametrize(
    ("lengths", "writes", "decay"),
    [
        ([1], [0], 1.0),
        ([63], [62, 5], 1.0),
        ([64], [63], 1.0),
        ([65], [64, 63, 0], 1.0),
        ([130], [129, 5, 63, 64, 100, 5], 1.0),
        ([1, 0, 70, 3], [0, 40, 70, 72], 1.0),
        ([70], [69, 33], 0.01),
        ([70], [69, 33], 5.0),
    ],
)
def test_outputs_and_states_agree(lengths: list[int], writes: list[int], decay: float) -> None:
    x = Inputs(lengths, True, 2, decay=decay, device=DEVICE)
    out, states = run(x, writes)
    exact_out, exact_states = x.exact()
    assert error(out, exact_out) < BOUND
    assert error(states, exact_states[writes]) < BOUND


def test_writes_out_of_range_are_left_out() -> None:
    x = Inputs([5, 4], True, 2, device=DEVICE)
    _, states = run(x, [-1, 8, 9, 2**40])
    assert error(states[1], x.exact()[1][8]) < BOUND
    assert states[[0, 2, 3]].isnan().all()


def test_a_pool_is_read_and_written_by_slot() -> None:
    x = Inputs([3, 66], True, 2, device=DEVICE)
    pool = torch.randn(4, *x.state.shape[1:]).to(DEVICE)
    before = pool.clone()
    x.state = torch.stack([torch.zeros_like(pool[0]), pool[2]])
    slots = Slots(*(torch.tensor(s, device=DEVICE) for s in ([-1, 2], [3, 2, 99])))
    out = torch.full(x.v.shape, torch.nan, device=DEVICE)
    token = torch.tensor([2, 68, 30], device=DEVICE)
    kda(*x.tensors, States(pool, pool, slots), x.starts, token, out)
    exact_out, exact_states = x.exact()
    assert error(out, exact_out) < BOUND
    assert error(pool[[3, 2]], exact_states[[2, 68]]) < BOUND
    assert torch.equal(pool[:2], before[:2])


def test_no_tokens_write_nothing() -> None:
    x = Inputs([0], True, 2, device=DEVICE)
    assert run(x, [0])[1].isnan().all()


@pytest.mark.parametrize("bound", [-5.0, None])
def test_the_decay_agrees(bound: float | None) -> None:
    f, a, dt = torch.randn(37, 3, 20), torch.randn(3), torch.randn(3, 20)
    found = launch.log_decay(f.to(DEVICE), a.to(DEVICE), dt.to(DEVICE), bound)
    torch.testing.assert_close(found.cpu(), reference.log_decay(f, a, dt, bound))


@pytest.mark.gpu
def test_a_replayed_graph_follows_other_lengths() -> None:
    x = Inputs([200, 1, 99], True, 2, device=DEVICE)
    out = torch.empty(x.v.shape, device=DEVICE)
    states = x.state.new_empty(2, *x.state.shape[1:])
    token = torch.tensor([199, 70], device=DEVICE)

    def call() -> None:
        kda(*x.tensors, States(x.state, states), x.starts, token, out)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for lengths, writes in (([10, 250, 40], [9, 259]), ([0, 0, 300], [299, 100])):
        x.lengths = lengths
        x.starts.copy_(torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]))
        token.copy_(torch.tensor(writes))
        graph.replay()
        exact_out, exact_states = x.exact()
        assert error(out, exact_out) < BOUND
        assert error(states, exact_states[writes]) < BOUND
