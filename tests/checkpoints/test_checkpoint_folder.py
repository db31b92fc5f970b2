"""A checkpoint folder is opened without torch, and a damaged one is refused by name."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.common.checkpoint import Checkpoint, CheckpointError

A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.arange(7, dtype=np.int64)
C = np.arange(10, dtype=np.uint8).reshape(2, 5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with an index: a and b in the first, c in the second."""
    save_file({"a": A, "b": B}, tmp_path / "one.safetensors")
    save_file({"c": C}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    return tmp_path


def write_index(folder: Path, weight_map: Any) -> None:
    text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def write_raw(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def refused(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return caught.value


def test_tensors_of_all_shards_are_read_as_stored(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.names() == ("a", "b", "c")
        assert checkpoint.config == {"model_type": "x"}
        assert checkpoint.generation_config == {}
        assert "c" in checkpoint and "d" not in checkpoint
        for name, value, dtype in (("a", A, "F32"), ("b", B, "I64"), ("c", C, "U8")):
            info = checkpoint.info(name)
            assert (info.shape, info.dtype, info.nbytes) == (value.shape, dtype, value.nbytes)
            assert bytes(checkpoint.raw(name)) == value.tobytes()
            whole = info.file.read_bytes()
            assert whole[info.offset : info.offset + info.nbytes] == value.tobytes()
        assert checkpoint.total_bytes() == A.nbytes + B.nbytes + C.nbytes


def test_views_are_read_only_and_survive_released_pages(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        view = checkpoint.raw("a")
        with pytest.raises(TypeError):
            view[0] = 1
        checkpoint.release_pages()
        assert bytes(view) == A.tobytes()
        view.release()


def test_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.names() == ("a",)
        assert checkpoint.generation_config == {"eos_token_id": [1, 2]}


def test_module_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys, pathlib; from services.common.checkpoint import Checkpoint;"
        f"Checkpoint.open(pathlib.Path({str(folder)!r})); sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_missing_config_is_refused_by_name(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refused(folder).file == folder / "config.json"


def test_missing_shard_is_refused_with_file_and_tensor(folder: Path) -> None:
    (folder / "two.safetensors").unlink()
    error = refused(folder)
    assert (error.file, error.tensor) == (folder / "two.safetensors", "c")
    assert "two.safetensors" in str(error) and "tensor c" in str(error)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "model.safetensors" in str(refused(tmp_path))


@pytest.mark.parametrize("missing", [1, 8, 57])
def test_truncated_file_is_refused_with_both_byte_counts(folder: Path, missing: int) -> None:
    path = folder / "one.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-missing])
    error = refused(folder)
    assert error.file == path
    assert (error.expected_bytes, error.found_bytes) == (len(whole), len(whole) - missing)
    assert error.tensor in ("a", "b")
    assert str(len(whole)) in str(error) and str(len(whole) - missing) in str(error)


@pytest.mark.parametrize("kept", [0, 5, 8, 20])
def test_file_cut_inside_its_header_is_refused(folder: Path, kept: int) -> None:
    path = folder / "one.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    error = refused(folder)
    assert error.file == path and error.found_bytes == kept
    assert "truncated" in str(error)


def test_surplus_bytes_are_refused(folder: Path) -> None:
    path = folder / "two.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"xyz")
    error = refused(folder)
    assert (error.expected_bytes, error.found_bytes) == (size, size + 3)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"not json", b"", "malformed header"),
        (b"\xff\xfe", b"", "malformed header"),
        ([1], b"", "not a JSON object"),
        ({"c": 3}, b"", "not an object"),
        ({"c": F32 | {"dtype": "F33"}}, bytes(8), "unknown dtype 'F33'"),
        ({"c": F32 | {"shape": [-2]}}, bytes(8), "shape"),
        ({"c": F32 | {"shape": "2"}}, bytes(8), "shape"),
        ({"c": F32 | {"data_offsets": [8, 0]}}, bytes(8), "data_offsets"),
        ({"c": F32 | {"data_offsets": [0]}}, bytes(8), "data_offsets"),
        ({"c": F32 | {"shape": [3]}}, bytes(8), "expected 12 bytes; found 8 bytes"),
        ({"c": F32, "d": F32}, bytes(8), "overlaps"),
        ({"c": F32 | {"data_offsets": [4, 12]}}, bytes(12), "hole"),
        (b'{"c": {}, "c": {}}', b"", "found twice"),
    ],
)
def test_malformed_header_is_refused(folder: Path, header: Any, data: bytes, says: str) -> None:
    write_raw(folder / "two.safetensors", header, data)
    error = refused(folder)
    assert error.file == folder / "two.safetensors"
    assert says in str(error)


def test_header_length_of_many_gigabytes_is_refused_without_reading_it(folder: Path) -> None:
    path = folder / "two.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert "malformed header" in str(refused(folder))


def test_index_that_names_a_tensor_its_shard_lacks_is_refused(folder: Path) -> None:
    write_index(folder, {"a": "one.safetensors", "c": "one.safetensors", "b": "two.safetensors"})
    error = refused(folder)
    assert error.tensor == "c" and error.file == folder / "one.safetensors"
    write_index(folder, {"a": "one.safetensors", "q": "one.safetensors"})
    assert refused(folder).tensor == "q"


@pytest.mark.parametrize("weight_map", [{}, [1], None, {"a": "../one.safetensors"}, {"a": 3}])
def test_malformed_index_is_refused(folder: Path, weight_map: Any) -> None:
    write_index(folder, weight_map)
    assert "malformed index" in str(refused(folder))


def test_name_in_two_shards_is_refused(folder: Path) -> None:
    save_file({"c": C, "a": A}, folder / "two.safetensors")
    error = refused(folder)
    assert error.tensor == "a"
    assert "one.safetensors" in str(error) and "two.safetensors" in str(error)


def test_fingerprint_follows_config_headers_and_weights(folder: Path) -> None:
    def fingerprint() -> str:
        return Checkpoint.open(folder).fingerprint()

    first = fingerprint()
    assert first == fingerprint()
    (folder / "config.json").write_text('{"model_type": "y"}')
    other_config = fingerprint()
    save_file({"c": C + 1}, folder / "two.safetensors")
    other_weights = fingerprint()
    save_file({"c": C.reshape(5, 2)}, folder / "two.safetensors")
    assert len({first, other_config, other_weights, fingerprint()}) == 4
