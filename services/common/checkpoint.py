"""Reads a checkpoint folder (config.json and safetensors files) without torch.

Every header is checked before the first byte of a tensor is used, so that a damaged folder is
refused at start with the file, the tensor and the byte counts, not in the middle of a request.
Format of a safetensors file: u64 little-endian header length, JSON header, tensor data; each
header entry is {"dtype", "shape", "data_offsets": [begin, end)} relative to the data section.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 256 << 20

DTYPE_BITS = {
    "F4": 4,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}

_SAMPLES_PER_SHARD = 16
_SAMPLE_BYTES = 4096


class CheckpointError(Exception):
    """A checkpoint folder that cannot be served; the message names file, tensor and bytes."""

    def __init__(
        self,
        problem: str,
        *,
        file: Path | None = None,
        tensor: str | None = None,
        expected_bytes: int | None = None,
        found_bytes: int | None = None,
    ) -> None:
        self.problem = problem
        self.file = file
        self.tensor = tensor
        self.expected_bytes = expected_bytes
        self.found_bytes = found_bytes
        super().__init__(self._message())

    def _message(self) -> str:
        parts = [self.problem]
        if self.tensor is not None:
            parts.append(f"tensor {self.tensor}")
        if self.file is not None:
            parts.append(f"file {self.file}")
        if self.expected_bytes is not None:
            parts.append(f"expected {self.expected_bytes} bytes")
        if self.found_bytes is not None:
            parts.append(f"found {self.found_bytes} bytes")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `dtype` is the safetensors name, `offset` absolute in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


class Checkpoint:
    """An opened folder; owns the memory maps of its shards. Readable from any thread.

    Views returned by `raw` stay valid until `close`, which refuses while views are alive.
    """

    def __init__(
        self, folder: Path, config: dict[str, Any], tensors: dict[str, TensorInfo], sampled: str
    ) -> None:
        self.folder = folder
        self.config = config
        self.generation_config = _optional_json(folder / "generation_config.json")
        self._tensors = tensors
        self._sampled = sampled
        self._maps: dict[Path, mmap.mmap] = {}

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read and check config.json, the index and every shard header.

        Raises CheckpointError for a missing shard, a truncated file, a malformed header or
        index, a tensor that the index names and its shard lacks, and a name found twice.
        """
        config = _required_json(folder / "config.json")
        weight_map = _weight_map(folder)
        shards = _shard_files(folder, weight_map)
        tensors = _merge_shards(shards)
        _check_index(folder, weight_map, tensors)
        return cls(folder, config, tensors, _sample_digest(shards))

    def names(self) -> tuple[str, ...]:
        """All tensor names, sorted."""
        return tuple(sorted(self._tensors))

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def info(self, name: str) -> TensorInfo:
        """Where `name` lies; CheckpointError when the checkpoint has no such tensor."""
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError("no such tensor", file=self.folder, tensor=name) from None

    def raw(self, name: str) -> memoryview:
        """The bytes of `name`, read-only, straight from the mapped file."""
        info = self.info(name)
        return memoryview(self._map(info.file))[info.offset : info.offset + info.nbytes]

    def total_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(t.nbytes for t in self._tensors.values())

    def fingerprint(self) -> str:
        """Hex digest of config.json, all headers and samples of every shard's data.

        The samples tell retrained weights of equal shapes apart without reading every byte.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in self.names():
            t = self._tensors[name]
            digest.update(json.dumps([name, t.dtype, t.shape, t.file.name, t.nbytes]).encode())
        digest.update(self._sampled.encode())
        return digest.hexdigest()

    def release_pages(self) -> None:
        """Give mapped pages back to the page cache; views stay valid and read again on use."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap all shards. BufferError while a view from `raw` is alive."""
        while self._maps:
            path, mapped = next(iter(self._maps.items()))
            mapped.close()
            del self._maps[path]

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.close()
        else:  # frames of the error may hold views; the maps go with the last of them
            self._maps.clear()

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as f:
                self._maps.setdefault(path, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
        return self._maps[path]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of one safetensors file, with every offset checked against the file's size.

    Raises CheckpointError when the header is malformed, tensors overlap or leave holes, a
    tensor's bytes do not match its shape, or the file is shorter or longer than its tensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            head = f.read(8)
            length = _header_length(path, head, size)
            text = f.read(length)
    except FileNotFoundError:
        raise CheckpointError("missing shard", file=path) from None
    entries = _parse_header(path, text)
    start = 8 + length
    infos = [_tensor_info(path, name, entry, start) for name, entry in entries.items()]
    _check_layout(path, infos, start, size)
    return {info.name: info for info in infos}


def _header_length(path: Path, head: bytes, size: int) -> int:
    if len(head) < 8:
        raise CheckpointError(
            "truncated before the header length", file=path, expected_bytes=8, found_bytes=size
        )
    length = int(struct.unpack("<Q", head)[0])
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"malformed header: its length field says {length} bytes, more than the limit "
            f"{MAX_HEADER_BYTES}",
            file=path,
            found_bytes=size,
        )
    if 8 + length > size:
        raise CheckpointError(
            "truncated inside the header", file=path, expected_bytes=8 + length, found_bytes=size
        )
    return length


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    def no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for name, value in pairs:
            if name in seen:
                raise CheckpointError("malformed header: name found twice", file=path, tensor=name)
            seen[name] = value
        return seen

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=no_twins)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"malformed header: {error}", file=path) from error
    if not isinstance(header, dict):
        raise CheckpointError("malformed header: not a JSON object", file=path)
    header.pop("__metadata__", None)
    return header


def _tensor_info(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    def bad(problem: str) -> CheckpointError:
        return CheckpointError(f"malformed header: {problem}", file=path, tensor=name)

    if not isinstance(entry, dict):
        raise bad("entry is not an object")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise bad(f"unknown dtype {dtype!r}")
    shape = _sizes(entry.get("shape"))
    if shape is None:
        raise bad(f"shape {entry.get('shape')!r} is not a list of integers >= 0")
    offsets = _sizes(entry.get("data_offsets"))
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise bad(f"data_offsets {entry.get('data_offsets')!r} is not [begin, end]")
    expected, odd_bits = divmod(math.prod(shape) * DTYPE_BITS[dtype], 8)
    found = offsets[1] - offsets[0]
    if odd_bits or expected != found:
        raise CheckpointError(
            f"malformed header: data_offsets disagree with {dtype} {list(shape)}",
            file=path,
            tensor=name,
            expected_bytes=expected,
            found_bytes=found,
        )
    return TensorInfo(name, dtype, shape, path, start + offsets[0], found)


def _sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(v) is int and v >= 0 for v in value):
        return tuple(value)
    return None


def _check_layout(path: Path, infos: list[TensorInfo], start: int, size: int) -> None:
    end = start
    for info in sorted(infos, key=lambda t: (t.offset, t.nbytes)):
        if info.offset != end:
            kind = "overlaps the one before it" if info.offset < end else "leaves a hole before it"
            raise CheckpointError(
                f"malformed header: data {kind} (starts at {info.offset}, not {end})",
                file=path,
                tensor=info.name,
            )
        end = info.offset + info.nbytes
        if end > size:
            raise CheckpointError(
                "truncated file",
                file=path,
                tensor=info.name,
                expected_bytes=max(t.offset + t.nbytes for t in infos),
                found_bytes=size,
            )
    if end != size:
        raise CheckpointError(
            "file is longer than its tensors", file=path, expected_bytes=end, found_bytes=size
        )


def _required_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError("missing file", file=path) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"malformed JSON: {error}", file=path) from error
    if not isinstance(value, dict):
        raise CheckpointError("malformed JSON: not an object", file=path)
    return value


def _optional_json(path: Path) -> dict[str, Any]:
    return _required_json(path) if path.exists() else {}


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name to file name from the index; None where the folder has a single file."""
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    weight_map = _required_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("malformed index: no weight_map", file=path)
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"malformed index: {file!r} is not a file name", file=path, tensor=name
            )
    return weight_map


def _shard_files(folder: Path, weight_map: dict[str, str] | None) -> list[Path]:
    if weight_map is None:
        path = folder / SINGLE_NAME
        if not path.exists():
            raise CheckpointError(f"neither {INDEX_NAME} nor {SINGLE_NAME}", file=folder)
        return [path]
    first_tensor: dict[str, str] = {}
    for name, file in weight_map.items():
        first_tensor.setdefault(file, name)
    for file, name in first_tensor.items():
        if not (folder / file).exists():
            raise CheckpointError("missing shard", file=folder / file, tensor=name)
    return [folder / file for file in sorted(first_tensor)]


def _merge_shards(shards: Iterable[Path]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for path in shards:
        for name, info in read_header(path).items():
            if name in tensors:
                raise CheckpointError(
                    f"name found twice, also in {tensors[name].file}", file=path, tensor=name
                )
            tensors[name] = info
    return tensors


def _check_index(
    folder: Path, weight_map: dict[str, str] | None, tensors: dict[str, TensorInfo]
) -> None:
    for name, file in (weight_map or {}).items():
        info = tensors.get(name)
        if info is None or info.file.name != file:
            raise CheckpointError(
                "the index names a tensor that its shard lacks", file=folder / file, tensor=name
            )


def _sample_digest(shards: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in shards:
        for block in _sample_blocks(path):
            digest.update(block)
    return digest.hexdigest()


def _sample_blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as f:
        size = os.fstat(f.fileno()).st_size
        for i in range(_SAMPLES_PER_SHARD):
            position = (size - _SAMPLE_BYTES) * i // (_SAMPLES_PER_SHARD - 1)
            yield os.pread(f.fileno(), _SAMPLE_BYTES, max(0, position))
