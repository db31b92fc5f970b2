"""Folders of released sizes without their bytes: sparse files behind real headers."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from services.engine.checkpoints.nano.drawn import Drawing

Entry = tuple[str, str, tuple[int, ...]]  # name, dtype of safetensors, shape
BYTES = {"BF16": 2, "F32": 4, "I64": 8, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}


def entries(
    drawings: Iterable[Drawing], block: int, scale: str = "scale", scale_dtype: str = "F8_E8M0"
) -> Iterator[Entry]:
    """As published: FP8 with a scale per `block` x `block`, MXFP4 with one per 32 inputs."""
    for drawing in drawings:
        name, shape = drawing.name, drawing.shape
        scale_name = f"{name.removesuffix('.weight')}.{scale}"
        match drawing.form:
            case "fp8":
                blocks = tuple(math.ceil(size / block) for size in shape)
                yield from ((name, "F8_E4M3", shape), (scale_name, scale_dtype, blocks))
            case "mxfp4":
                rows, columns = shape
                yield name, "I8", (rows, columns // 2)
                yield scale_name, "F8_E8M0", (rows, columns // 32)
            case "rows":
                rows, columns = shape
                yield name, "F8_E4M3", shape
                yield scale_name, "F8_E8M0", (rows, columns // 32)
            case "experts":
                yield name, "I64", shape
            case "f32":
                yield name, "F32", shape
            case "bf16":
                yield name, "BF16", shape


def write_sparse(folder: Path, config: Mapping[str, Any], found: Iterable[Entry]) -> int:
    """config.json and one file whose data is a hole; returns the bytes of all tensors."""
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in found:
        begin, end = end, end + math.prod(shape) * BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config))
    return end
