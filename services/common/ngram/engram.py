"""Engram tables of DeepSeek-V4.1.

Source of the names, of the construction of the hash and of its figures: the release's tensor
inventory and its inference code.

A table is `layers.<L>.engram.embed.weight` [rows, values], e4m3, and `.embed.scale`
[rows, values / 32], ue8m0: one power of two per 32 values of a row. A served row is the values
followed by the scales, for the released model 256 + 8 bytes. Heads are ordered by n-gram order
(2 first), then by number; each has a prime number of rows, and the rows are their sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from services.common.checkpoint import Checkpoint, CheckpointError, TensorInfo
from services.common.ngram.layout import (
    EngramParameters,
    TableLayout,
    integer,
    integers,
    layout_of,
    primes_from,
)

GROUP_VALUES = 32  # values of a row that share a scale
_LAYER_SEED_STEP = 10007


def engram_tables(checkpoint: Checkpoint, config: Mapping[str, Any]) -> tuple[TableLayout, ...]:
    """The tables that `engram_layer_ids` of the flattened config asks for, by layer."""
    parameters = engram_parameters(config)
    counts = integers(config, "engram_num_embeddings")
    if counts and len(counts) != len(parameters):
        raise CheckpointError(
            f"config: engram_num_embeddings has {len(counts)} entries for {len(parameters)} layers"
        )
    stated = counts or tuple(sum(p.head_sizes) for p in parameters.values())
    return tuple(
        _table(checkpoint, config, layer, parameters[layer], rows)
        for layer, rows in zip(parameters, stated, strict=True)
    )


def engram_parameters(config: Mapping[str, Any]) -> dict[int, EngramParameters]:
    """Hash of every Engram layer of a flattened config, by layer in ascending order."""
    layers = sorted(set(integers(config, "engram_layer_ids")))
    order = integer(config, "engram_max_ngram_size", least=2)
    compressed = integer(config, "engram_compressed_vocab_size", least=1)
    image = config.get("image_token_id")
    sizes = _head_sizes(
        layers,
        orders=order - 1,
        heads=integer(config, "engram_n_heads", least=1),
        start=integer(config, "engram_vocab_size", least=2),
    )
    return {
        layer: EngramParameters(
            multipliers=_multipliers(layer, compressed, order),
            head_sizes=sizes[layer],
            head_offsets=tuple(sum(sizes[layer][:h]) for h in range(len(sizes[layer]))),
            ngram_size=order,
            pad_token_id=integer(config, "engram_pad_token_id"),
            image_token_id=None if image is None else integer(config, "image_token_id"),
            compressed_ids=compressed,
        )
        for layer in layers
    }


def _multipliers(layer: int, compressed: int, count: int) -> tuple[int, ...]:
    """Odd factors, small enough that factor * compressed id stays below 2^63."""
    half = ((1 << 63) - 1) // compressed // 2
    drawn = np.random.default_rng(_LAYER_SEED_STEP * layer).integers(
        0, half, size=count, dtype=np.int64
    )
    return tuple(2 * int(value) + 1 for value in drawn)


def _head_sizes(
    layers: Sequence[int], *, orders: int, heads: int, start: int
) -> dict[int, tuple[int, ...]]:
    """The next primes >= `start` that no other head has: by layer, order, head."""
    primes = primes_from(start)
    return {layer: tuple(islice(primes, orders * heads)) for layer in layers}


def _table(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    layer: int,
    parameters: EngramParameters,
    stated_rows: int,
) -> TableLayout:
    rows = sum(parameters.head_sizes)
    if stated_rows != rows:
        raise CheckpointError(
            f"config: engram_num_embeddings says {stated_rows} rows for layer {layer}, the hash "
            f"has {rows}"
        )
    values = integer(config, "engram_head_dim", least=1)
    if values % GROUP_VALUES:
        raise CheckpointError(
            f"config: engram_head_dim is {values}, not a multiple of {GROUP_VALUES}"
        )
    prefix = f"layers.{layer}.engram.embed."
    codes = _matrix(checkpoint, prefix + "weight", "F8_E4M3", (rows, values))
    scales = _matrix(checkpoint, prefix + "scale", "F8_E8M0", (rows, values // GROUP_VALUES))
    family = str(config.get("model_type", "")).removesuffix("_text")
    return layout_of(
        checkpoint,
        name=f"{family}.layers.{layer}.engram",
        layer=layer,
        row_values=values,
        scale=1.0,
        parameters=parameters,
        shards=(codes,),
        scale_shards=(scales,),
    )


def _matrix(checkpoint: Checkpoint, name: str, dtype: str, shape: tuple[int, int]) -> TensorInfo:
    """The tensor, one byte a value; CheckpointError unless it has this type and shape."""
    info = checkpoint.info(name)
    if info.dtype != dtype or info.shape != shape:
        raise CheckpointError(
            f"Engram tensor is {info.dtype} {list(info.shape)}, expected {dtype} {list(shape)}",
            file=info.file,
            tensor=name,
            expected_bytes=shape[0] * shape[1],
            found_bytes=info.nbytes,
        )
    return info
