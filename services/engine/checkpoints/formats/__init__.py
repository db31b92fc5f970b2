"""How weight matrices are stored in checkpoints, and how a rank reads its part of one.

What a matrix is stored as is decided per tensor, by its type and its siblings, never by a list in
the config: a `<name>.weight_scale_inv` beside `<name>.weight` means FP8 blocks, a
`<name>.weight_packed` four-bit integers, nothing beside it plain. The config gives block and group
sizes. A further form is one more class with the methods of `MatrixFormat`.
"""

from __future__ import annotations

from services.engine.checkpoints.formats.base import MatrixFormat
from services.engine.checkpoints.formats.config import quantization_of
from services.engine.checkpoints.formats.fp8 import Fp8BlockFormat
from services.engine.checkpoints.formats.int4 import AutoAwqFormat, CompressedTensorsFormat
from services.engine.checkpoints.formats.mxfp4 import Mxfp4Format
from services.engine.checkpoints.formats.plain import PlainFormat

__all__ = [
    "AutoAwqFormat",
    "CompressedTensorsFormat",
    "Fp8BlockFormat",
    "MatrixFormat",
    "Mxfp4Format",
    "PlainFormat",
    "formats_of",
]


def formats_of(config: dict[str, object]) -> tuple[MatrixFormat, ...]:
    """The formats that a checkpoint may use, the most particular first.

    CheckpointError names a field of `quantization_config` that is out of range.
    """
    sizes = quantization_of(config)
    return (
        Mxfp4Format(),
        Fp8BlockFormat(*sizes.block),
        CompressedTensorsFormat(sizes.groups, sizes.zero_points is True),
        AutoAwqFormat(sizes.groups, sizes.zero_points is not False),
        PlainFormat(),
    )
