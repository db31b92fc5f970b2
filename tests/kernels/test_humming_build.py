"""Kernels built without a card: what the manifest says is what the assembler made."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import backend
from kernels.backend import SHARED_KIB
from kernels.humming.manifest import load
from kernels.humming.runtime import check_fits

ROOT = Path(__file__).parents[2]
NOBITS, SYMBOLS, SECTION_BYTES = 8, 2, 64

pytestmark = [
    pytest.mark.skipif(
        not backend.has_package("humming"), reason="needs the package humming-kernels"
    ),
    pytest.mark.skipif(
        not (shutil.which("nvcc") or backend.has_package("cuda.bindings.nvrtc")),
        reason="needs nvcc or NVRTC",
    ),
]


def constants(cubin: bytes) -> dict[str, int]:
    """The 32-bit constants of an ELF64 file by name, in capitals."""
    (table,), (count,) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<H", cubin, 60)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * SECTION_BYTES) for i in range(count)
    ]
    found = {}
    for section in (s for s in sections if s[1] == SYMBOLS):
        names = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], section[9]):
            name_at, _, _, index, value, _ = struct.unpack_from("<IBBHQQ", cubin, at)
            name = cubin[names + name_at : cubin.index(b"\0", names + name_at)].decode()
            if name.isupper() and index < count:
                home = sections[index]
                zero = home[1] == NOBITS
                found[name] = 0 if zero else struct.unpack_from("<I", cubin, home[4] + value)[0]
    return found


@pytest.mark.parametrize("target", [80, 86])
def test_a_kernel_is_built_for_a_card_that_is_not_there(target: int, tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, "-m", "tests.kernels.humming_probe", str(target), str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    folder = tmp_path / f"sm{target}"
    made = load(folder)
    check_fits(made, target, divmod(target, 10))
    (entry,) = made.entries
    facts = constants((folder / entry.file).read_bytes())
    blocks = [facts[f"BLOCK_SHAPE_{side}"] for side in "MNK"]
    assert (facts["PROBLEM_SHAPE_N"], facts["PROBLEM_SHAPE_K"]) == (entry.n, entry.k)
    assert blocks == entry.tile["block_shape"] and facts["NUM_STAGES"] == entry.tile["num_stages"]
    assert facts["WEIGHT_SCALE_GROUP_SIZE"] == 128 and facts["SM_VERSION"] == target
    assert 0 < facts["SMEM_SIZE"] <= SHARED_KIB[target] << 10
