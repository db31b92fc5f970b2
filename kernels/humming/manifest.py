"""What a build left: its kernels, one entry for each weight shape and range of rows."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

VERSION = 1
FILE = "manifest.json"

Gemm = Literal["dense", "stack"]


class ManifestError(Exception):
    """Prebuilt kernels that cannot be used, and why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel for weights [n, k] of a form, one matrix or a stack.

    Taken for up to `rows_up_to` rows (None: any number): of x, or of an expert on average. `tile`
    is humming's TuningConfig. `file` is the cubin's name in the folder of the manifest, `kernel`
    its entry point.
    """

    gemm: Gemm
    form: str
    n: int
    k: int
    rows_up_to: float | None
    tile: dict[str, Any]
    file: str
    sha256: str
    kernel: str

    @property
    def shape(self) -> tuple[str, str, int, int]:
        return (self.gemm, self.form, self.n, self.k)


@dataclass(frozen=True, slots=True)
class Manifest:
    """`target` 80, 86 or 89 chose the code, `assembler` ("80", "90a") is the card it runs on.

    `package` is the version of humming-kernels, `card` what the tiles were chosen for, `compiler`
    what compiled.
    """

    package: str
    target: int
    assembler: str
    card: str
    compiler: str
    entries: tuple[Entry, ...]

    @property
    def shapes(self) -> frozenset[tuple[str, str, int, int]]:
        return frozenset(entry.shape for entry in self.entries)

    def of_shape(self, gemm: Gemm, form: str, n: int, k: int) -> list[Entry]:
        """The entries of a shape, by rows; the one for any number of rows last."""
        found = [entry for entry in self.entries if entry.shape == (gemm, form, n, k)]
        return sorted(found, key=lambda entry: entry.rows_up_to or float("inf"))

    def write(self, folder: Path) -> None:
        body = {"format": VERSION, **asdict(self)}
        (folder / FILE).write_text(json.dumps(body, indent=1) + "\n")


def load(folder: Path) -> Manifest:
    """The manifest of `folder`, its files checked. ManifestError says what is wrong with it."""
    path = folder / FILE
    try:
        body = json.loads(path.read_text())
    except FileNotFoundError:
        raise ManifestError(f"{path} does not exist") from None
    except ValueError as error:
        raise ManifestError(f"{path} is not JSON: {error}") from error
    manifest = _parsed(path, body)
    _check_entries(path, manifest)
    for file, digest in sorted({(entry.file, entry.sha256) for entry in manifest.entries}):
        _check_file(folder / file, digest)
    return manifest


def _parsed(path: Path, body: Any) -> Manifest:
    if not isinstance(body, dict) or body.pop("format", None) != VERSION:
        raise ManifestError(f"{path} is not of format {VERSION}")
    try:
        entries = tuple(Entry(**entry) for entry in body.pop("entries"))
        return Manifest(entries=entries, **body)
    except (KeyError, TypeError) as error:
        raise ManifestError(f"{path}: {error}") from error


def _check_entries(path: Path, manifest: Manifest) -> None:
    if not manifest.entries:
        raise ManifestError(f"{path} has no kernels")
    for entry in manifest.entries:
        if Path(entry.file).name != entry.file:
            raise ManifestError(f"{path}: {entry.file} is not in this folder")
    for gemm, form, n, k in sorted(manifest.shapes):
        limits = [e.rows_up_to for e in manifest.entries if e.shape == (gemm, form, n, k)]
        if len(set(limits)) != len(limits) or None not in limits:
            raise ManifestError(
                f"{path}: {gemm} {form} {n} x {k} has kernels up to {limits} rows: "
                "each limit once, and one without"
            )


def _check_file(path: Path, digest: str) -> None:
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        raise ManifestError(f"{path} does not exist") from None
    if found != digest:
        raise ManifestError(f"{path} has SHA-256 {found}, not {digest}")
