"""The chunks of the gated delta rule against a recurrence in fp64."""

from __future__ import annotations

import pytest
import torch

from kernels import backend
from kernels.gated_delta.launch import gated_delta
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
    return Inputs(lengths, False, decay=decay, device=DEVICE)


@pytest.mark.parametrize(
    ("lengths", "writes", "decay"),
    [
        *((*case, 1.0) for case in LENGTHS),
        ([70], [69, 33], 0.01),
        ([70], [69, 33], 60.0),
    ],
)
def test_outputs_and_states_agree(lengths: list[int], writes: list[int], decay: float) -> None:
    Call(gated_delta, inputs(lengths, decay), writes).run().check()


@pytest.mark.parametrize("cut", [1, 64, 100])
def test_one_call_equals_two(cut: int) -> None:
    check_cut(gated_delta, inputs([101]), cut)


def test_writes_out_of_range_are_left_out() -> None:
    check_writes_out_of_range(gated_delta, inputs([5, 4]))


def test_a_pool_is_read_and_written_by_slot() -> None:
    check_pool(gated_delta, inputs([3, 66]))


def test_no_tokens_write_nothing() -> None:
    assert Call(gated_delta, inputs([0]), [0]).run().states.isnan().all()


@pytest.mark.gpu
def test_a_replayed_graph_follows_other_lengths() -> None:
    call = Call(gated_delta, inputs([200, 1, 99]), [199, 70]).run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    for lengths, writes in (([10, 250, 40], [9, 259]), ([0, 0, 300], [299, 100])):
        call.change(lengths, writes)
        graph.replay()
        call.check()
