"""Compiles planned kernels into a folder that a server loads: cubins and a manifest."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path

from kernels.backend import SHARED_KIB
from kernels.humming.cards import Card
from kernels.humming.manifest import Entry, Manifest
from kernels.humming.plan import Planned, plan
from kernels.humming.runtime import PACKAGE, PACKAGE_VERSION
from kernels.humming.shapes import Shape

DIGEST_NAME = 16


@dataclass(frozen=True)
class Built:
    """A cubin in humming's cache, or why there is none; shared memory in bytes, as estimated."""

    path: Path | None
    shared_bytes: int = 0
    problem: str = ""


def compile_all(kernels: Iterable[Planned], card: Card, workers: int) -> dict[str, Built]:
    """The cubin of each planned kernel, by its key, compiled side by side."""
    unique = {kernel.key: kernel for kernel in kernels}
    with ThreadPoolExecutor(workers) as pool:
        built = pool.map(lambda kernel: _compile(kernel, card), unique.values())
        return dict(zip(unique, built, strict=True))


def _compile(kernel: Planned, card: Card) -> Built:
    made = import_module("humming.kernel.humming").HummingKernel
    try:
        done = made(**kernel.config)
    except Exception as error:  # whatever the package raises is this kernel's result
        return Built(None, problem=f"{type(error).__name__}: {str(error)[:300]}")
    shared = int(done.estimated_smem_size)
    limit = SHARED_KIB[card.target] << 10
    if shared > limit:
        return Built(None, shared, f"shared memory {shared} of {limit}")
    return Built(Path(done.kernel_filename), shared)


def build(shapes: Sequence[Shape], card: Card, out: Path, workers: int) -> Manifest:
    """The planned kernels of the shapes, see `build_kernels`."""
    kernels = [kernel for shape in shapes for kernel in plan(shape, card)]
    return build_kernels(kernels, card, out, workers)


def build_kernels(kernels: Sequence[Planned], card: Card, out: Path, workers: int) -> Manifest:
    """Fill `out`/sm<target>. RuntimeError where a kernel does not compile or another version of
    the package is installed."""
    version = metadata.version(PACKAGE)
    if version != PACKAGE_VERSION:
        raise RuntimeError(f"{PACKAGE} is {version}, not {PACKAGE_VERSION}")
    built = compile_all(kernels, card, workers)
    failed = [f"{k.shape}: {built[k.key].problem}" for k in kernels if built[k.key].problem]
    if failed:
        raise RuntimeError("\n".join(failed))
    folder = out / f"sm{card.target}"
    folder.mkdir(parents=True, exist_ok=True)
    entries = tuple(_entry(kernel, built[kernel.key], folder) for kernel in kernels)
    compiler = import_module("humming.jit.runtime").KernelRuntime._get_compiler().signature()
    manifest = Manifest(version, card.target, card.assembler, card.name, compiler, entries)
    manifest.write(folder)
    return manifest


def _entry(kernel: Planned, built: Built, folder: Path) -> Entry:
    assert built.path is not None
    digest = hashlib.sha256(built.path.read_bytes()).hexdigest()
    name = f"{digest[:DIGEST_NAME]}.cubin"
    shutil.copyfile(built.path, folder / name)
    (entry_point,) = [
        found
        for found in import_module("humming.utils.cubin").get_cubin_kernel_names(built.path)
        if "humming" in found
    ]
    shape = kernel.shape
    return Entry(
        shape.gemm, shape.form, shape.n, shape.k, kernel.rows_up_to, kernel.tile, name, digest,
        entry_point,
    )  # fmt: skip
