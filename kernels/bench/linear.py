"""Rows of the benchmark for the quantised linear layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kernels.bench import humming_peer
from kernels.bench.ceilings import Ceilings
from kernels.bench.linear_cases import (
    Case,
    checked,
    dense_of,
    prepared,
    relative_error,
    rotation,
)
from kernels.bench.timing import Time, time_calls
from kernels.quant_linear.launch import QuantMatrix, Workspace, configuration, quant_linear


def measure(cases: list[Case], ceilings: Ceilings, *, peers: bool) -> list[dict[str, Any]]:
    """One row a case; the cases of a shape share their weights."""
    rows = []
    for shape in dict.fromkeys((case.weights, case.n, case.k) for case in cases):
        matrices = rotation(*shape)
        ready = prepared(matrices)
        dense = dense_of(matrices[0])
        library = [dense.bfloat16()] + [
            torch.randn_like(dense, dtype=torch.bfloat16) for _ in range(2)
        ]
        peer = humming_peer.Layer(shape, matrices) if peers else None
        for case in cases:
            if (case.weights, case.n, case.k) == shape:
                rows.append(_row(case, ready, dense, library, peer, ceilings))
                print(rows[-1], flush=True)
        torch.cuda.empty_cache()
    return rows


def _row(
    case: Case,
    ready: list[QuantMatrix],
    dense: torch.Tensor,
    library: list[torch.Tensor],
    peer: humming_peer.Layer | None,
    ceilings: Ceilings,
) -> dict[str, Any]:
    x = torch.randn(case.m, case.k, device="cuda").bfloat16()
    error = checked(case, x, ready[0], dense, None)
    ours = time_ours(case, x, ready)
    out = torch.empty(case.m, case.n, dtype=torch.bfloat16, device="cuda")
    plain = time_calls([partial(torch.mm, x, w.t(), out=out) for w in library])
    floor = ceilings.floor_us(ready[0].nbytes, case.flops)
    config = configuration(ready[0], case.m, x.device)
    row = {
        "operation": "quant_linear", "case": case.name, "rows": case.m, "us": ours.microseconds,
        "spread": ours.spread, "error": error, "floor_us": floor,
        "fraction": floor / ours.microseconds,
        "gbs": ready[0].nbytes / ours.microseconds / 1e3,
        "tflops": case.flops / ours.microseconds / 1e6,
        "library_bf16_us": plain.microseconds, "config": repr(config),
    }  # fmt: skip
    return row | (_peer_columns(peer, x, dense, floor) if peer else {})


def time_ours(case: Case, x: torch.Tensor, ready: list[QuantMatrix], **options: Any) -> Time:
    out = torch.empty(case.m, case.n, dtype=torch.bfloat16, device="cuda")
    workspace = Workspace.allocate(ready[:1], [case.m], x.device)
    return time_calls([partial(quant_linear, x, w, out, workspace) for w in ready], **options)


def _peer_columns(
    peer: humming_peer.Layer, x: torch.Tensor, dense: torch.Tensor, floor: float
) -> dict[str, Any]:
    out = torch.full((len(x), len(dense)), torch.nan, dtype=torch.bfloat16, device="cuda")
    calls = peer.calls(x, out)
    calls[0]()
    error = relative_error(out, x, dense)
    if not error < 1e-2:
        return {"peer": "humming", "peer_refused": f"relative error {error}"}
    time = time_calls(calls)
    return {
        "peer": "humming", "peer_us": time.microseconds, "peer_error": error,
        "peer_fraction": floor / time.microseconds,
    }  # fmt: skip
