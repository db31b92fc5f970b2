"""Launches on tensors without memory for sm86: which no variant covers, and which hit the cache.

Run in a process without a card, with TRITON_CACHE_DIR set; prints both. A launch looks in the
cache as on a card; then nothing runs.
"""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from triton import knobs
from triton.runtime.driver import driver

from kernels.aot.launches import missing, requested
from kernels.aot.stand_in import StandIn
from kernels.embedding import launch
from kernels.embedding.bench import lookups
from kernels.embedding.variants import variants

TARGET = 86


class Loading(StandIn):
    """Takes compiled code and launches, and does nothing with either."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 1 << 16},
        load_binary=lambda *code: (None, None, 0, 0, 1024),
    )

    def launcher_cls(self, source: object, metadata: object) -> Any:
        return lambda *launched: None


# Three numbers of tokens with the width of a served model, then a width of none.
SHAPES = ((1, 4096), (7, 4096), (1024, 4096), (1, 1001))


def main() -> None:
    driver.set_active(Loading(TARGET))
    known = {requested(variant) for variant in variants(TARGET)}
    uncovered = [
        line
        for tokens, width in SHAPES
        for line in missing(f"{tokens}x{width}", partial(lookups, tokens, 9, width, "cuda"), known)
    ]
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    for tokens, width in SHAPES:
        ids = torch.empty(tokens, dtype=torch.int64, device="meta")
        table, out = torch.empty(2, max(tokens, 9), width, dtype=torch.bfloat16, device="meta")
        launch.embedding(ids, table, 1, out[:tokens])
    print(json.dumps({"hits": hits, "uncovered": uncovered}))


if __name__ == "__main__":
    main()
