"""Bytes that a model keeps per token and per request, by cache group.

`python -m services.engine.cache.accounting --model FOLDER` prints them for a checkpoint, whose
weights are not read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.checkpoint import CheckpointError
from services.common.cli.base import say
from services.engine.cache.spec import CacheGroup
from services.engine.models.registry import load_model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """What one group costs, all layers together.

    A paged group costs `per_token` bytes for every token, the others `per_request` bytes whatever
    the length: the last window of rows, or one slot. A snapshot costs `per_request` once more.
    """

    name: str
    kind: str
    layers: int  # tensors of the group
    entry_bytes: int  # of one entry, row or slot
    entry_tokens: int  # tokens that share an entry; 0 for a slot
    per_token: float
    per_request: int


def group_bytes(group: CacheGroup) -> GroupBytes:
    """The bytes of one group."""
    entry = group.page_bytes // group.entries_per_page
    per_token, per_request = 0.0, 0
    match group.kind:
        case "paged":
            per_token = entry / group.stride
        case "window":
            per_request = entry * group.window_tokens // group.stride
        case "state":
            per_request = entry
    tokens = 0 if group.kind == "state" else group.stride
    count = len(group.tensors)
    return GroupBytes(group.name, group.kind, count, entry, tokens, per_token, per_request)


def request_bytes(groups: Sequence[CacheGroup], tokens: int) -> int:
    """Pool bytes of one request of `tokens` tokens: whole pages, one window, one slot."""
    total = 0
    for g in groups:
        if g.kind == "paged":
            total += -(-tokens // g.page_tokens) * g.page_bytes
        else:
            total += group_bytes(g).per_request
    return total


def table(groups: Sequence[CacheGroup], tokens: int) -> Iterator[str]:
    """Lines for people: one per group, the sums, and a request of `tokens` tokens."""
    row = "{:<12}{:<8}{:>8}{:>14}{:>16}{:>16}{:>18}"
    yield row.format(
        "group", "kind", "tensors", "bytes/entry", "tokens/entry", "bytes/token", "bytes/request"
    )
    found = [group_bytes(g) for g in groups]
    for g in found:
        share = str(g.entry_tokens or "-")
        yield row.format(
            g.name,
            g.kind,
            g.layers,
            f"{g.entry_bytes:,}",
            share,
            f"{g.per_token:,.2f}",
            f"{g.per_request:,}",
        )
    per_token, per_request = sum(g.per_token for g in found), sum(g.per_request for g in found)
    yield row.format("all", "", "", "", "", f"{per_token:,.2f}", f"{per_request:,}")
    yield f"a request of {tokens:,} tokens: {request_bytes(groups, tokens):,} bytes"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of a checkpoint; the exit code."""
    parser = argparse.ArgumentParser(description="Print cache bytes per token and per request.")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8", "fp8_ds_mla"), default="auto")
    parser.add_argument("--tokens", type=int, default=131072, help="length of the example request")
    flags = parser.parse_args(argv)
    try:
        model = load_model(
            flags.model,
            device=torch.device("meta"),
            compute_dtype=_DTYPES[flags.dtype],
            quantised_cache=flags.kv_cache_dtype != "auto",
        )
    except CheckpointError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for line in table(model.groups, flags.tokens):
        say(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
