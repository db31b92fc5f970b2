"""What names an image in prefix keys, for the process that sizes it and the one that computes."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 32
_SIZE = struct.Struct("<II")


def image_digest(pixels_HW3: npt.NDArray[np.uint8]) -> bytes:  # noqa: N803
    """32 bytes: blake2b-256 over height and width (little-endian uint32 each), then the pixels.

    pixels_HW3: uint8 [height, width, 3], C-contiguous; ValueError otherwise.
    """
    if pixels_HW3.dtype != np.uint8 or pixels_HW3.ndim != 3 or pixels_HW3.shape[2] != 3:
        raise ValueError(f"pixels are uint8 [h, w, 3], not {pixels_HW3.dtype} {pixels_HW3.shape}")
    height, width, _ = pixels_HW3.shape
    digest = hashlib.blake2b(_SIZE.pack(height, width), digest_size=DIGEST_BYTES)
    digest.update(np.ascontiguousarray(pixels_HW3).data)
    return digest.digest()
