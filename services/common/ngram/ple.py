"""PLE tables of Qwen4-Exp.

Source of the layout and of the hash: the release's tensor names and the n-gram embedding of
`transformers` qwen4_exp.

A table is stored as shards `<layer>.ple.ple_embedding.ngram_embedding.shard_<i>.weight`
[rows_i, values] (or one `ngram_embedding.weight`), concatenated by rows, in e4m3 with one scalar
`weight_scale` or in bf16 without. Three I64 tensors beside it state the hash.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from itertools import islice
from typing import Any

from services.common.checkpoint import Checkpoint, CheckpointError, TensorInfo
from services.common.ngram.layout import (
    DTYPE_BYTES,
    HashParameters,
    TableLayout,
    layout_of,
    primes_from,
)

_PREFIX = re.compile(r"^(?:.*\.)?layers\.(\d+)\.ple\.ple_embedding\.")
_SHARD = re.compile(r"^ngram_embedding\.shard_(\d+)\.weight$")
_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_LAYER_SEED_STEP = 10007


def ple_tables(checkpoint: Checkpoint, config: Mapping[str, Any]) -> tuple[TableLayout, ...]:
    """The tables that `ple_layer_ids` of the text config asks for, by layer."""
    layers = sorted({int(i) - 1 for i in config.get("ple_layer_ids") or ()})
    prefixes = _prefixes(checkpoint)
    for layer in layers:
        if layer not in prefixes:
            raise CheckpointError(
                "the config asks for an n-gram table that the folder lacks",
                file=checkpoint.folder,
                tensor=f"layers.{layer}.ple.ple_embedding.ngram_embedding.*",
            )
    return tuple(
        _table(checkpoint, config, prefixes[layer], layer, rank)
        for rank, layer in enumerate(layers)
    )


def hash_parameters(config: Mapping[str, Any], rank: int) -> HashParameters:
    """Hash of the `rank`-th table (by layer) of a `text_config`."""
    ngram_size = int(config.get("ngram_size", 3))
    heads = _heads(config)
    base = int(config.get("ngram_vocab_size_base", 20_000_000))
    sizes = tuple(islice(primes_from(base), rank * heads, (rank + 1) * heads))
    offsets = tuple(sum(sizes[:h]) for h in range(heads))
    eos = config.get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) else eos
    if not isinstance(eos, int):
        raise CheckpointError(f"config: eos_token_id {eos!r} is not a token id")
    seed = int(config.get("seed", 1234)) + _LAYER_SEED_STEP * rank
    multipliers = _multipliers(seed, int(config["vocab_size"]), ngram_size)
    return HashParameters(multipliers, sizes, offsets, ngram_size, eos)


def _prefixes(checkpoint: Checkpoint) -> dict[int, str]:
    """Layer -> common start of the names of its table's tensors."""
    found: dict[int, str] = {}
    for name in checkpoint.names():
        match = _PREFIX.match(name)
        if match and not name.startswith("mtp."):
            found[int(match[1])] = match[0]
    return found


def _table(
    checkpoint: Checkpoint, config: Mapping[str, Any], prefix: str, layer: int, rank: int
) -> TableLayout:
    parameters = hash_parameters(config, rank)
    _check_hash(checkpoint, prefix, parameters)
    shards = _shards(checkpoint, config, prefix)
    rows = sum(s.shape[0] for s in shards)
    divisor = int(config.get("make_ngram_vocab_size_divisible_by", 128))
    expected = -(-sum(parameters.head_sizes) // divisor) * divisor
    row_values = _row_values(config)
    item = DTYPE_BYTES[shards[0].dtype]
    if rows != expected:
        raise CheckpointError(
            f"n-gram table has {rows} rows in {len(shards)} shards, the config asks for {expected}",
            file=shards[-1].file,
            tensor=shards[-1].name,
            expected_bytes=expected * row_values * item,
            found_bytes=sum(s.nbytes for s in shards),
        )
    family = str(config.get("model_type", "")).removesuffix("_text")
    return layout_of(
        checkpoint,
        name=f"{family}.layers.{layer}.ple",
        layer=layer,
        row_values=row_values,
        scale=_scale(checkpoint, prefix, shards[0]),
        parameters=parameters,
        shards=shards,
    )


def _heads(config: Mapping[str, Any]) -> int:
    return (int(config.get("ngram_size", 3)) - 1) * int(config.get("heads_per_ngram", 8))


def _row_values(config: Mapping[str, Any]) -> int:
    width = int(config.get("ple_embed_dim") or config["hidden_size"])
    heads = _heads(config)
    if width % heads:
        raise CheckpointError(f"config: ple_embed_dim {width} is not a multiple of {heads} heads")
    return width // heads


def _shards(
    checkpoint: Checkpoint, config: Mapping[str, Any], prefix: str
) -> tuple[TensorInfo, ...]:
    """The table's shards in row order, their count, type and width checked."""
    numbered = {
        int(match[1]): name
        for name in checkpoint.names()
        if name.startswith(prefix) and (match := _SHARD.match(name[len(prefix) :]))
    }
    whole = f"{prefix}ngram_embedding.weight"
    if not numbered and whole in checkpoint:
        numbered = {0: whole}
        count = 1
    else:
        count = int(config.get("split_ngram_parts", len(numbered)))
    shards = []
    for index in range(max(count, len(numbered), 1)):
        name = numbered.get(index, f"{prefix}ngram_embedding.shard_{index}.weight")
        shards.append(checkpoint.info(name))
    row_values = _row_values(config)
    for shard in shards:
        _check_shard(shard, shards[0], row_values)
    return tuple(shards)


def _check_shard(shard: TensorInfo, first: TensorInfo, row_values: int) -> None:
    if shard.dtype not in DTYPE_BYTES:
        raise CheckpointError(
            f"n-gram table of type {shard.dtype}; F8_E4M3 and BF16 are served",
            file=shard.file,
            tensor=shard.name,
        )
    fits = len(shard.shape) == 2 and shard.shape[0] > 0 and shard.shape[1] == row_values
    if shard.dtype != first.dtype or not fits:
        raise CheckpointError(
            f"n-gram shard is {shard.dtype} {list(shard.shape)}, expected {first.dtype} "
            f"[rows, {row_values}]",
            file=shard.file,
            tensor=shard.name,
            expected_bytes=math.prod(shard.shape[:1]) * row_values * DTYPE_BYTES[first.dtype],
            found_bytes=shard.nbytes,
        )


def _check_hash(checkpoint: Checkpoint, prefix: str, parameters: HashParameters) -> None:
    expected = {
        "layer_multipliers": parameters.multipliers,
        "ngram_heads_vocab_sizes": parameters.head_sizes,
        "ngram_heads_offsets": parameters.head_offsets,
    }
    for suffix, values in expected.items():
        info = checkpoint.info(prefix + suffix)
        found = _integers(checkpoint, info, len(values))
        if found != values:
            raise CheckpointError(
                f"the table was hashed differently: stored {_short(found)}, the config gives "
                f"{_short(values)}",
                file=info.file,
                tensor=info.name,
                expected_bytes=8 * len(values),
                found_bytes=info.nbytes,
            )


def _short(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values[:3])) + (", ..." if len(values) > 3 else "")


def _integers(checkpoint: Checkpoint, info: TensorInfo, count: int) -> tuple[int, ...]:
    if info.dtype != "I64" or info.nbytes != 8 * count:
        raise CheckpointError(
            f"hash constants are {info.dtype} {list(info.shape)}, expected I64 [{count}]",
            file=info.file,
            tensor=info.name,
            expected_bytes=8 * count,
            found_bytes=info.nbytes,
        )
    return struct.unpack(f"<{count}q", checkpoint.raw(info.name))


def _scale(checkpoint: Checkpoint, prefix: str, first: TensorInfo) -> float:
    """The table's one factor; 1 for bf16. Raises when an e4m3 table has none."""
    name = f"{prefix}ngram_embedding.weight_scale"
    if name not in checkpoint and first.dtype == "BF16":
        return 1.0
    info = checkpoint.info(name)
    raw = checkpoint.raw(name)
    if info.dtype == "BF16" and info.nbytes == 2:
        return float(struct.unpack("<f", b"\0\0" + bytes(raw))[0])
    if info.dtype == "F32" and info.nbytes == 4:
        return float(struct.unpack("<f", raw)[0])
    raise CheckpointError(
        f"scale of the n-gram table is {info.dtype} {list(info.shape)}, expected one BF16 or F32",
        file=info.file,
        tensor=name,
    )


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _multipliers(seed: int, vocab_size: int, ngram_size: int) -> tuple[int, ...]:
    """Odd factors, small enough that factor * token id stays below 2^63."""
    half = max(1, ((1 << 63) - 1) // vocab_size // 2)
    return tuple(
        2 * (_splitmix64((seed + _GAMMA * (i + 1)) & _MASK64) % half) + 1 for i in range(ngram_size)
    )
