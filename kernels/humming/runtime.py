"""humming's launcher and the prebuilt kernels of a card, without its Python code or a compiler."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kernels import backend
from kernels.humming.manifest import Entry, Gemm, Manifest, ManifestError, load
from kernels.humming.matrix import HummingMatrix, Kernel, KernelTable

PACKAGE, PACKAGE_VERSION = "humming-kernels", "0.1.20"
LIBRARY = "libhumming_launcher.so"
# Folders sm80, sm86 and so on, each with a manifest.
FOLDER_VARIABLE = "WARHORSE_HUMMING"
FOLDER = Path(__file__).with_name("cubins")
ANY_ROWS = 1 << 30
# A lock for each tile that programs share; the launcher asks for 1.1 tiles a program at most.
LOCKS = 2048

logger = logging.getLogger(__name__)


class Library:
    """The kernels of one card, registered with the launcher when a shape is first asked for."""

    def __init__(self, folder: Path, manifest: Manifest, device: torch.device) -> None:
        self.manifest = manifest
        self._folder = folder
        self._device = device
        self._tables: dict[tuple[str, str, int, int], KernelTable] = {}

    def has(self, gemm: Gemm, form: str, n: int, k: int) -> bool:
        """Whether there are kernels for the shape. A stack needs those of its partner too, so that
        both matrices of experts go the same way."""
        shapes = self.manifest.shapes
        if (gemm, form, n, k) not in shapes:
            return False
        partners = {("stack", form, k, n // 2), ("stack", form, 2 * k, n)}
        return gemm == "dense" or bool(partners & shapes)

    def weights(self, gemm: Gemm, form: str, n: int, k: int) -> int:
        """Of a single matrix, or of the gate-up matrix of experts, whichever stack is asked for."""
        is_down = gemm == "stack" and ("stack", form, 2 * k, n) in self.manifest.shapes
        return (2 if is_down else 1) * n * k

    def table(self, gemm: Gemm, form: str, n: int, k: int) -> KernelTable:
        """The kernels of a shape that `has` names."""
        key = (gemm, form, n, k)
        if key not in self._tables:
            self._tables[key] = self._registered(self.manifest.of_shape(*key))
        return self._tables[key]

    def _registered(self, entries: Sequence[Entry]) -> KernelTable:
        first = entries[0]
        limits = tuple(entry.rows_up_to or float("inf") for entry in entries)
        kernels = tuple(self._kernel(entry) for entry in entries)
        stack = first.gemm == "stack"
        return KernelTable(first.form, first.n, first.k, stack, limits, kernels)

    def _kernel(self, entry: Entry) -> Kernel:
        block_m = entry.tile["block_shape"][0]
        kernel, name = register(self._folder / entry.file, block_m, self._device)
        if name != entry.kernel:
            raise ManifestError(f"{entry.file} holds {name}, not {entry.kernel}")
        return kernel


@cache
def library(device: torch.device) -> Library | ManifestError:
    """What a card has, or why it has nothing; said once in the log then."""
    try:
        return _open(device)
    except ManifestError as error:
        logger.warning("%s: humming-kernels are not used, Triton instead: %s", device, error)
        return error


def folder_of(target: int) -> Path:
    """Where the kernels of a target lie."""
    return Path(os.environ.get(FOLDER_VARIABLE) or FOLDER) / f"sm{target}"


def _open(device: torch.device) -> Library:
    launcher = _launcher()
    target = backend.target(device.index or 0)
    folder = folder_of(target)
    manifest = load(folder)
    check_fits(manifest, target, torch.cuda.get_device_capability(device))
    torch.ops.load_library(str(launcher))
    return Library(folder, manifest, device)


def register(cubin: Path, block_m: int, device: torch.device) -> tuple[Kernel, str]:
    """A cubin's kernel and its entry point. After `load_launcher` or `library`."""
    number, name = torch.ops.humming.register_kernel(str(cubin))
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    return Kernel(torch.tensor([0, ANY_ROWS, number, programs], dtype=torch.int64), block_m), name


def load_launcher() -> None:
    """The launcher library alone. ManifestError where it is not installed."""
    torch.ops.load_library(str(_launcher()))


def _launcher() -> Path:
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ManifestError(f"the package {PACKAGE} is not installed") from None
    if version != PACKAGE_VERSION:
        raise ManifestError(f"{PACKAGE} is {version}, the kernels need {PACKAGE_VERSION}")
    spec = importlib.util.find_spec("humming")
    roots = (spec.submodule_search_locations or []) if spec else []
    found = [path for root in roots for path in Path(root).glob(f"_native/*/{LIBRARY}")]
    if not found:
        raise ManifestError(f"{PACKAGE} {version} has no {LIBRARY}")
    return found[0]


def check_fits(manifest: Manifest, target: int, capability: tuple[int, int]) -> None:
    """ManifestError where kernels were built by another version or for another card."""
    if manifest.package != PACKAGE_VERSION:
        raise ManifestError(f"built by {PACKAGE} {manifest.package}, not {PACKAGE_VERSION}")
    if manifest.target != target:
        raise ManifestError(f"built for sm{manifest.target}, not sm{target}")
    card = "".join(map(str, capability))
    if manifest.assembler.rstrip("a") != card:
        raise ManifestError(f"assembled for sm_{manifest.assembler}, the card is sm_{card}")


def new_locks(device: torch.device) -> torch.Tensor:
    """The locks of one matrix."""
    return torch.zeros(LOCKS, dtype=torch.int32, device=device)


def launch(
    matrix: HummingMatrix,
    kernel: Kernel,
    x: torch.Tensor,
    out: torch.Tensor,
    order: Any = (None, None, None),
    top_k: int = 1,
) -> None:
    """Fill `out` with the products of a kernel; nothing is read back.

    `order` are the rows in order, the experts of the tiles and the number of rows, for a stack.
    The launcher's own checks know the stack that a kernel was built for, while any number of
    experts will do: they are left out, see launch.py for ours.
    """
    torch.ops.humming.launch_kernel.out(
        kernel.configs, x, matrix.weight, matrix.scale, None, None, None, matrix.zero, None, out,
        *order, None, matrix.locks, top_k, 0, not matrix.table.stack,
    )  # fmt: skip
