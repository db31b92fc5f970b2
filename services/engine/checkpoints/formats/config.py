"""Sizes and flags of a checkpoint's `quantization_config`; its lists of modules are not read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.common.checkpoint import CheckpointError
from services.engine.checkpoints.formats.int4 import GROUPS

METHODS = ("fp8", "mxfp4", "compressed-tensors", "awq")
_FIELD = "quantization_config"


@dataclass(frozen=True, slots=True)
class Quantization:
    """`block` [rows, columns] of FP8, `groups` of INT4; `zero_points` None if nothing is said."""

    block: tuple[int, int] = (128, 128)
    groups: tuple[int, ...] = GROUPS
    zero_points: bool | None = None


def quantization_of(config: Mapping[str, object]) -> Quantization:
    """What config.json says; CheckpointError names a field that is out of range."""
    values = config.get(_FIELD)
    if values is None and isinstance(text := config.get("text_config"), Mapping):
        values = text.get(_FIELD)
    if values is None:
        return Quantization()
    if not isinstance(values, Mapping):
        raise _bad("", values, "an object")
    match values.get("quant_method"):
        case "compressed-tensors":
            return _compressed_tensors(values)
        case "awq":
            return _auto_awq(values)
        case "fp8" | "mxfp4" | None:
            size = values.get("weight_block_size")
            return Quantization() if size is None else Quantization(_block_size(size))
        case other:
            raise _bad("quant_method", other, f"one of {', '.join(METHODS)}")


def _block_size(value: object) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2 and all(type(v) is int and v > 0 for v in value):
        return (value[0], value[1])
    raise _bad("weight_block_size", value, "[rows, columns]")


def _compressed_tensors(values: Mapping[str, object]) -> Quantization:
    """Groups of integers of four bits; others have tensors that no format takes."""
    schemes = values.get("config_groups", {})
    if not isinstance(schemes, Mapping):
        raise _bad("config_groups", schemes, "an object")
    weights = [s.get("weights") for s in schemes.values() if isinstance(s, Mapping)]
    four_bits = [
        w
        for w in weights
        if isinstance(w, Mapping) and w.get("num_bits") == 4 and w.get("type", "int") == "int"
    ]
    if not four_bits:
        return Quantization()
    sizes = {_group_size("config_groups.*.weights", w.get("group_size")) for w in four_bits}
    symmetric = {w.get("symmetric", True) is not False for w in four_bits}
    zero_points = not symmetric.pop() if len(symmetric) == 1 else None
    return Quantization(groups=tuple(sorted(sizes)), zero_points=zero_points)


def _auto_awq(values: Mapping[str, object]) -> Quantization:
    bits, version = values.get("bits", 4), values.get("version", "gemm")
    if bits != 4:
        raise _bad("bits", bits, "4")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _bad("version", version, "gemm")
    size = _group_size("", values.get("group_size", 128))
    return Quantization(groups=(size,), zero_points=values.get("zero_point", True) is not False)


def _group_size(parent: str, value: object) -> int:
    if isinstance(value, int) and value in GROUPS:
        return value
    name = f"{parent}.group_size" if parent else "group_size"
    raise _bad(name, value, f"one of {', '.join(map(str, GROUPS))}")


def _bad(name: str, value: object, wanted: str) -> CheckpointError:
    field = f"{_FIELD}.{name}" if name else _FIELD
    return CheckpointError(f"{field} {value!r} is not {wanted}")
