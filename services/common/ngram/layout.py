"""What is known of an n-gram table before a byte of it is read: rows, shards, hash, identity."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from services.common.checkpoint import Checkpoint, CheckpointError, TensorInfo

LAYOUT_VERSION = 2
DTYPE_BYTES = {"F8_E4M3": 1, "BF16": 2}


@dataclass(frozen=True, slots=True)
class HashParameters:
    """How the row ids of a token follow from its id and the ids before it (Qwen4-Exp)."""

    multipliers: tuple[int, ...]  # one per position of the n-gram, newest first
    head_sizes: tuple[int, ...]  # prime number of rows of each head
    head_offsets: tuple[int, ...]  # first row of each head
    ngram_size: int
    eos_token_id: int  # stands for missing predecessors


@dataclass(frozen=True, slots=True)
class EngramParameters:
    """The same for Engram (DeepSeek-V4.1), whose ids are compressed by a token map first."""

    multipliers: tuple[int, ...]
    head_sizes: tuple[int, ...]
    head_offsets: tuple[int, ...]
    ngram_size: int
    pad_token_id: int  # its compressed id stands for missing and hidden tokens
    image_token_id: int | None  # hides itself and all before it; None in a model without images
    compressed_ids: int  # distinct compressed ids that the tokenizer must give


AnyParameters = HashParameters | EngramParameters


@dataclass(frozen=True, slots=True)
class TableLayout:
    """One table. `shards` in row order; `scale_shards` beside them where each row has scales.

    A served row holds the `row_values` values of `dtype`, then `row_scale_bytes` ue8m0 bytes, one
    per equal group of values (none: 0).
    """

    name: str
    layer: int
    dtype: str  # safetensors name: F8_E4M3 or BF16
    rows: int
    row_values: int
    row_scale_bytes: int
    scale: float  # value = stored * scale (* the ue8m0 factor of its group)
    hash: AnyParameters
    shards: tuple[TensorInfo, ...]
    scale_shards: tuple[TensorInfo, ...]
    fingerprint: str

    @property
    def code_bytes(self) -> int:
        """Bytes of the values of one row."""
        return self.row_values * DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one served row."""
        return self.code_bytes + self.row_scale_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole served table."""
        return self.rows * self.row_bytes

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """Every stored tensor whose bytes are served."""
        return self.shards + self.scale_shards


def layout_of(
    checkpoint: Checkpoint,
    *,
    name: str,
    layer: int,
    row_values: int,
    scale: float,
    parameters: AnyParameters,
    shards: tuple[TensorInfo, ...],
    scale_shards: tuple[TensorInfo, ...] = (),
) -> TableLayout:
    """The layout of checked shards, its fingerprint over the checkpoint's identity and itself."""
    rows = sum(s.shape[0] for s in shards)
    row_scale_bytes = scale_shards[0].shape[1] if scale_shards else 0
    dtype = shards[0].dtype
    identity = [name, dtype, rows, row_values, row_scale_bytes, scale, asdict(parameters)]
    text = json.dumps([LAYOUT_VERSION, checkpoint.fingerprint(), *identity], sort_keys=True)
    return TableLayout(
        name,
        layer,
        dtype,
        rows,
        row_values,
        row_scale_bytes,
        scale,
        parameters,
        shards,
        scale_shards,
        hashlib.sha256(text.encode()).hexdigest(),
    )


def integer(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 0) -> int:
    """`config[key]`, an integer of at least `least`; CheckpointError otherwise."""
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointError(f"config: {key} is {value!r}, not an integer of at least {least}")
    return value


def integers(config: Mapping[str, Any], key: str, least: int = 0) -> tuple[int, ...]:
    """`config[key]`, a list of integers of at least `least`, empty where it is absent."""
    values = config.get(key) or ()
    if not isinstance(values, list | tuple):
        raise CheckpointError(f"config: {key} is {values!r}, not a list")
    return tuple(
        integer({f"{key}[{i}]": v}, f"{key}[{i}]", None, least) for i, v in enumerate(values)
    )


def primes_from(start: int) -> Iterator[int]:
    """The primes >= `start`, in order."""
    while True:
        if is_prime(start):
            yield start
        start += 1


def is_prime(value: int) -> bool:
    """By trial division: for values up to some 10^8."""
    if value < 4:
        return value >= 2
    return value % 2 != 0 and all(value % d for d in range(3, math.isqrt(value) + 1, 2))
