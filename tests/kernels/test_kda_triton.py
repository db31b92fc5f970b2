"""The chunks of KDA against a recurrence in fp64."""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.kda import launch, reference
from kernels.kda.launch import kda
from tests.kernels.delta_rule import (
    LENGTHS,
    Call,
    Inputs,
    check_cut,
    check_pool,
    check_writes_out_of_range,
)

DEVICE = "cpu" if backend.interpreted() else "cuda"


def inputs(lengths: list[int], decay: float = 1.0) -> Inputs:
    return Inputs(lengths, True, 2, decay=decay, device=DEVICE)


@pytest.mark.parametrize(
    ("lengths", "writes", "decay"),
    [
        *((*case, 1.0) for case in LENGTHS),
        ([70], [69, 33], 0.01),
        ([70], [69, 33], 5.0),
    ],
)
def test_outputs_and_states_agree(lengths: list[int], writes: list[int], decay: float) -> None:
    Call(kda, inputs(lengths, decay), writes).run().check()


@pytest.mark.parametrize("cut", [1, 64, 100])
def test_one_call_equals_two(cut: int) -> None:
    check_cut(kda, inputs([101]), cut)


def test_writes_out_of_range_are_left_out() -> None:
    check_writes_out_of_range(kda, inputs([5, 4]))


def test_a_pool_is_read_and_written_by_slot() -> None:
    check_pool(kda, inputs([3, 66]))


def test_no_tokens_write_nothing() -> None:
    assert Call(kda, inputs([0]), [0]).run().states.isnan().all()


@pytest.mark.parametrize("bound", [-5.0, None])
def test_the_decay_agrees(bound: float | None) -> None:
    f, a, dt = torch.randn(37, 3, 20), torch.randn(3), torch.randn(3, 20)
    found = launch.log_decay(f.to(DEVICE), a.to(DEVICE), dt.to(DEVICE), bound)
    torch.testing.assert_close(found.cpu(), reference.log_decay(f, a, dt, bound))


@pytest.mark.gpu
def test_a_replayed_graph_follows_other_lengths() -> None:
    call = Call(kda, inputs([200, 1, 99]), [199, 70]).run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    for lengths, writes in (([10, 250, 40], [9, 259]), ([0, 0, 300], [299, 100])):
        call.change(lengths, writes)
        graph.replay()
        call.check()
