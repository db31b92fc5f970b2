"""humming's back end without a card: order of weights, manifests, selection, the kernels around."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.humming import launch, runtime, select
from kernels.humming.forms import FORMS, StoredMatrix, form_of
from kernels.humming.manifest import FILE, VERSION, Entry, Gemm, Manifest, ManifestError, load
from kernels.humming.matrix import HummingMatrix, Kernel, KernelTable
from kernels.humming.repack import codes_in_tiles, in_eights, repack
from kernels.humming.samples import random_weights
from kernels.humming.shapes import FEWEST_FEATURES, MODELS, SERVED, Experts, shapes_of
from kernels.quant_linear import (
    Fp8BlockMatrix,
    Int4Matrix,
    dequantize,
    prepare,
    scale_values,
)
from kernels.quant_linear.reference import decode_e2m1, decode_e4m3

INFINITE = float("inf")


# ---- The order of weights.

# SHA-256 of what the package's weight_repack_nk (0.1.20, run lane by lane) makes of the same bytes.
PACKAGE_DIGESTS = {
    (4, 2, 128, 128): "0ccb1fdfb350249ceff390d73a3eb3900cd77fa5f4882c0dccbfb65c6e1a64ca",
    (8, 2, 128, 64): "0fa2bd6dbb8edc2543dc00ef1da506aa42f842a5a8770fda598da702f30ce1bc",
}


@pytest.mark.parametrize("size", PACKAGE_DIGESTS)
def test_codes_are_in_the_order_that_the_package_itself_makes(
    size: tuple[int, int, int, int],
) -> None:
    bits, e, n, k = size
    count = e * n * k * bits // 8
    codes = ((torch.arange(count) * 2654435761 >> 7) % 251).to(torch.uint8)
    found = codes_in_tiles(codes.view(e, n, -1), bits)
    assert hashlib.sha256(found.numpy().tobytes()).hexdigest() == PACKAGE_DIGESTS[size]


def places(bits: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The n and the k of every code in the order of memory, by the layout of README.md."""
    per_word = 32 // bits
    at = np.arange(n * k)
    code, word = at % per_word, at // per_word % bits
    lane, tile = at // (per_word * bits) % 32, at // (per_word * bits * 32)
    tile_n, tile_k = tile % (n // 64), tile // (n // 64)
    row, pair = lane // 4, lane % 4
    if bits == 4:
        upper, next_k, far = code // 2 % 2, code // 4, code % 2
        inside_n = 16 * word + 8 * upper + row
    else:
        next_k, far = code // 2, code % 2
        inside_n = 8 * word + row
    return 64 * tile_n + inside_n, 16 * tile_k + 2 * pair + next_k + 8 * far


def decoded(form_name: str, parts: tuple[torch.Tensor, ...], n: int, k: int) -> torch.Tensor:
    """fp32 [N, K] of one matrix in humming's order."""
    form = FORMS[form_name]
    weight, scale = parts[0].numpy().view(np.uint8).reshape(-1), parts[1]
    codes = weight if form.bits == 8 else np.stack((weight & 15, weight >> 4), -1).reshape(-1)
    in_place = np.zeros((n, k), np.uint8)
    in_place[places(form.bits, n, k)] = codes
    values = torch.from_numpy(in_place)
    of_eights = torch.tensor([64 * (i // 64) + 8 * (i % 8) + i % 64 // 8 for i in range(n)])
    if form.block_n > 1:
        factors = scale.t().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return decode_e4m3(values) * factors
    stored = scale.view(torch.uint8) if scale.element_size() == 1 else scale
    factors = scale_values(stored)[:, of_eights].t().repeat_interleave(form.group, 1)
    if form.name.startswith("fp8"):
        return decode_e4m3(values) * factors
    if form.name == "mxfp4":
        return decode_e2m1(values) * factors
    zeros = torch.full((1, 1), 8.0)
    if form.zero:
        packed = parts[2].numpy().view(np.uint8).reshape(k // form.group, -1)
        points = torch.from_numpy(np.stack((packed & 15, packed >> 4), -1).reshape(-1, n))
        zeros = points[:, of_eights].t().repeat_interleave(form.group, 1).float()
    return (values.float() - zeros) * factors


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("n", "k"), [(128, 256), (384, 128)])
def test_weights_in_order_decode_to_the_stored_values(form: str, n: int, k: int) -> None:
    stored = random_weights(form, n, k, 0, "cpu")
    parts = tuple(part for part in repack(stored, FORMS[form]) if part is not None)
    assert torch.equal(decoded(form, parts, n, k), dequantize(stored))


@pytest.mark.parametrize("form", FORMS)
def test_a_stack_is_its_matrices_in_order(form: str) -> None:
    stored = random_weights(form, 128, 128, 3, "cpu")
    stack = repack(stored, FORMS[form])
    for index in range(3):
        for whole, single in zip(stack, repack(stored.expert(index), FORMS[form]), strict=True):
            assert (whole is None) == (single is None)
            if whole is not None and single is not None:
                same = whole[index].contiguous().view(torch.uint8), single.view(torch.uint8)
                assert torch.equal(*same)


def test_scales_of_64_outputs_are_transposed_as_eights() -> None:
    scale = torch.arange(128.0).view(128, 1)
    expected = [64 * half + 8 * a + b for half in (0, 1) for b in range(8) for a in range(8)]
    assert in_eights(scale).flatten().tolist() == expected


@pytest.mark.parametrize("form", ["fp8-b128", "fp8-g32"])
def test_codes_and_scales_that_are_not_numbers_are_refused(form: str) -> None:
    stored = random_weights(form, 128, 128, 0, "cpu")
    stored.codes[3, 5] = 0xFF
    with pytest.raises(ValueError, match="e4m3 code is NaN"):
        repack(stored, FORMS[form])
    mx = random_weights("mxfp4", 64, 64, 0, "cpu")
    mx.scale[1, 1] = 255
    with pytest.raises(ValueError, match="e8m0 scale is NaN"):
        repack(mx, FORMS["mxfp4"])


# ---- Manifests.


def entry(folder: Path, **changes: Any) -> dict[str, Any]:
    cubin = folder / "a.cubin"
    cubin.write_bytes(b"code")
    digest = hashlib.sha256(b"code").hexdigest()
    body: dict[str, Any] = {
        "gemm": "dense", "form": "mxfp4", "n": 1024, "k": 2048, "rows_up_to": None,
        "tile": {"block_shape": [8, 64, 64]}, "file": cubin.name, "sha256": digest,
        "kernel": "humming",
    }  # fmt: skip
    return body | changes


def manifest(entries: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "format": VERSION, "package": runtime.PACKAGE_VERSION, "target": 80, "assembler": "80",
        "card": "a100", "compiler": "nvcc+13.0", "entries": entries,
    }  # fmt: skip
    return body | changes


def written(folder: Path, body: object) -> Path:
    (folder / FILE).write_text(body if isinstance(body, str) else json.dumps(body))
    return folder


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    entries = tuple(Entry(**entry(tmp_path, rows_up_to=limit)) for limit in (64, None, 8))
    made = Manifest(runtime.PACKAGE_VERSION, 86, "86", "a6000", "nvrtc+13.0", entries)
    made.write(tmp_path)
    found = load(tmp_path)
    assert found == made
    limits = [e.rows_up_to for e in found.of_shape("dense", "mxfp4", 1024, 2048)]
    assert limits == [8, 64, None]


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "not json": (lambda _: "{", "not JSON"),
    "a list": (lambda _: [], "format"),
    "another format": (lambda f: manifest([entry(f)], format=0), "format"),
    "no kernels": (lambda _: manifest([]), "no kernels"),
    "an unknown key": (lambda f: manifest([entry(f)], colour="red"), "colour"),
    "a missing key": (lambda f: manifest([{"gemm": "dense"}]), "missing"),
    "a file elsewhere": (lambda f: manifest([entry(f, file="../a.cubin")]), "not in this folder"),
    "a missing file": (lambda f: manifest([entry(f, file="b.cubin")]), "does not exist"),
    "a changed file": (lambda f: manifest([entry(f, sha256="0" * 64)]), "SHA-256"),
    "no kernel for many rows": (lambda f: manifest([entry(f, rows_up_to=8)]), "one without"),
    "two for the same rows": (lambda f: manifest([entry(f), entry(f)]), "each limit once"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_manifest_that_cannot_be_used_says_why(name: str, tmp_path: Path) -> None:
    make, message = BROKEN[name]
    with pytest.raises(ManifestError, match=message):
        load(written(tmp_path, make(tmp_path)))


def test_a_missing_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=FILE):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "target", "capability", "message"),
    [
        ({"package": "0.1.19"}, 80, (8, 0), "0.1.19"),
        ({}, 86, (8, 6), "built for sm80, not sm86"),
        ({}, 80, (8, 6), "assembled for sm_80"),
        ({"assembler": "90a"}, 80, (8, 0), "assembled for sm_90a"),
    ],
)
def test_kernels_of_another_version_or_card_are_refused(
    changes: dict[str, Any], target: int, capability: tuple[int, int], message: str, tmp_path: Path
) -> None:
    found = load(written(tmp_path, manifest([entry(tmp_path)], **changes)))
    with pytest.raises(ManifestError, match=message):
        runtime.check_fits(found, target, capability)


@pytest.mark.parametrize(("assembler", "capability"), [("80", (8, 0)), ("90a", (9, 0))])
def test_kernels_of_this_card_are_taken(
    assembler: str, capability: tuple[int, int], tmp_path: Path
) -> None:
    body = manifest([entry(tmp_path)], assembler=assembler)
    runtime.check_fits(load(written(tmp_path, body)), 80, capability)


# ---- Selection.


@pytest.fixture
def no_library() -> Iterator[None]:
    runtime.library.cache_clear()
    yield
    runtime.library.cache_clear()


@pytest.mark.parametrize("installed", [None, "0.1.3"])
def test_a_missing_package_is_said_once(
    installed: str | None,
    no_library: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    with caplog.at_level(logging.WARNING):
        found = [runtime.library(torch.device("cuda", 0)) for _ in range(2)]
    assert all(isinstance(error, ManifestError) for error in found)
    assert len(caplog.records) == 1 and "Triton instead" in caplog.text
    assert (installed or "not installed") in caplog.text


@pytest.mark.parametrize(("value", "expected"), [("", "auto"), ("triton", "triton")])
def test_the_environment_names_a_back_end(
    value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(select.VARIABLE, value)
    assert select.back_end() == expected


def test_an_unknown_back_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(select.VARIABLE, "marlin")
    with pytest.raises(ValueError, match="marlin"):
        prepare(random_weights("mxfp4", 64, 64, 0, "cpu"))


@pytest.mark.parametrize(
    ("stored", "form"),
    [
        (lambda: random_weights("mxfp4", 64, 64, 0, "cpu"), "mxfp4"),
        (lambda: random_weights("int4-g32-zero", 64, 64, 0, "cpu"), "int4-g32-zero"),
        (lambda: random_weights("fp8-g32", 128, 128, 0, "cpu"), "fp8-g32"),
        (lambda: prepare(random_weights("mxfp4", 64, 64, 0, "cpu"), "triton"), None),
        (lambda: Int4Matrix(torch.zeros(64, 32).byte(), torch.ones(64, 1).half(), None, 64), None),
        (lambda: Int4Matrix(torch.zeros(8, 64).byte(), torch.ones(8, 1).half()), None),
        (lambda: Fp8BlockMatrix(torch.zeros(192, 128).byte(), torch.ones(2, 1)), None),
        (lambda: Fp8BlockMatrix(torch.zeros(32, 32).byte(), torch.ones(1, 1), 32, 32), None),
    ],
)
def test_forms_that_the_kernels_read(stored: Callable[[], StoredMatrix], form: str | None) -> None:
    found = form_of(stored())
    assert (found.name if found else None) == form


@pytest.mark.parametrize(
    ("gemm", "weights", "back_end"),
    [
        ("dense", 4096 * 4096, "triton"),
        ("dense", 4096 * 4096 + 1, "humming"),
        ("stack", 1024 * 4096, "triton"),
        ("stack", 1024 * 4096 + 1, "humming"),
    ],
)
def test_small_matrices_go_to_triton(gemm: Gemm, weights: int, back_end: str) -> None:
    assert select.chosen(gemm, weights) == back_end


def test_the_chosen_back_end_was_faster_in_the_mean() -> None:
    for row in select.table():
        times = torch.tensor(list(row["us"].values()), dtype=torch.float64)
        triton, humming = times.log().mean(0).tolist()
        assert row["back_end"] == ("triton" if triton < humming else "humming")


def test_both_stacks_of_experts_go_the_same_way() -> None:
    models = [weights for name in SERVED for weights in MODELS[name]]
    shapes = [shape.key for shape in shapes_of(SERVED, 1)]
    found = library_of(*shapes)  # type: ignore[arg-type]
    for experts in (weights for weights in models if isinstance(weights, Experts)):
        form, hidden, inner = experts.form, experts.hidden, experts.inner
        gate_up = found.weights("stack", form, 2 * inner, hidden)
        assert gate_up == 2 * inner * hidden == found.weights("stack", form, hidden, inner)
    assert library_of().weights("dense", "mxfp4", 1024, 2048) == 1024 * 2048


def table(n: int, k: int, *, stack: bool, form: str = "mxfp4") -> KernelTable:
    kernels = tuple(Kernel(torch.tensor([0, 1, block, 1]), block) for block in (16, 48))
    return KernelTable(form, n, k, stack, (2.0, INFINITE), kernels)


@pytest.mark.parametrize(("rows", "block_m"), [(0.02, 16), (2, 16), (2.5, 48), (10**6, 48)])
def test_the_number_of_rows_picks_the_kernel(rows: float, block_m: int) -> None:
    assert table(64, 64, stack=False).pick(rows).block_m == block_m


def library_of(*shapes: tuple[Gemm, str, int, int]) -> runtime.Library:
    entries = tuple(Entry(*shape, None, {}, "a", "b", "c") for shape in shapes)
    found = runtime.Library.__new__(runtime.Library)
    found.manifest = Manifest("", 80, "80", "", "", entries)
    return found


def test_a_stack_needs_the_kernels_of_its_partner() -> None:
    gate_up: tuple[Gemm, str, int, int] = ("stack", "mxfp4", 512, 256)
    down: tuple[Gemm, str, int, int] = ("stack", "mxfp4", 256, 256)
    both, alone = library_of(gate_up, down), library_of(gate_up)
    assert both.has(*gate_up) and both.has(*down)
    assert not alone.has(*gate_up)
    assert library_of(("dense", "mxfp4", 512, 256)).has("dense", "mxfp4", 512, 256)
    assert not both.has("dense", "mxfp4", 512, 256)


def test_a_matrix_goes_to_humming_where_it_is_large_and_has_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = library_of(("dense", "mxfp4", 1024, 1024))
    monkeypatch.setattr(
        found, "table", lambda *shape: table(*shape[2:], stack=False), raising=False
    )
    monkeypatch.setattr(launch, "warm_up", lambda _: None)
    stored = random_weights("mxfp4", 1024, 1024, 0, "cpu")
    ready = select._in_order(stored, found, "humming")
    assert (
        ready is not None and ready.weight.shape == (64, 2048) and ready.scale.shape == (32, 1024)
    )
    assert prepare(ready) is ready
    with pytest.raises(TypeError):
        dequantize(ready)
    with caplog.at_level(logging.INFO):
        assert select._in_order(stored, found, "auto") is None and not caplog.text
        monkeypatch.setattr(select, "chosen", lambda *_: "humming")
        assert select._in_order(stored, found, "auto") is not None and not caplog.text
        other = random_weights("mxfp4", 1024, 2048, 0, "cpu")
        assert select._in_order(other, found, "auto") is None
    assert "1024 x 2048" in caplog.text


def test_weights_on_a_processor_are_prepared_for_triton() -> None:
    stored = random_weights("int4-g128", 1024, 1024, 0, "cpu")
    for wanted in (None, "humming"):
        ready = prepare(stored, wanted)
        assert isinstance(ready, Int4Matrix) and ready.order == "fragments"


def test_rows_in_parts_are_the_matrices_of_those_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = random_weights("int4-g32-zero", 256, 128, 0, "cpu")
    form = FORMS[stored_form := "int4-g32-zero"]
    found = library_of(("dense", stored_form, 128, 128))
    tables = {n: table(n, 128, stack=False, form=stored_form) for n in (128, 256)}
    monkeypatch.setattr(found, "table", lambda *shape: tables[shape[2]], raising=False)
    monkeypatch.setattr(select, "library", lambda _: found)
    whole = HummingMatrix(
        *repack(stored, form), runtime.new_locks(torch.device("cpu")), tables[256]
    )
    for index, part in enumerate(select.row_parts(whole, 2)):
        rows = slice(128 * index, 128 * (index + 1))
        assert isinstance(stored, Int4Matrix) and stored.zero is not None
        alone = Int4Matrix(stored.codes[rows], stored.scale[rows], stored.zero[rows], 32)
        for tensor, expected in zip(
            (part.weight, part.scale, part.zero), repack(alone, form), strict=True
        ):
            assert tensor is not None and expected is not None and torch.equal(tensor, expected)
        assert part.out_features == 128
    with pytest.raises(LookupError, match="64 x 128"):
        select.row_parts(whole, 4)


def test_served_stacks_come_in_pairs_on_every_number_of_ranks() -> None:
    for ranks in (1, 2, 4, 8):
        shapes = {shape.key for shape in shapes_of(SERVED, ranks)}
        for gemm, form, n, k in shapes:
            wide = n % 64 == 0 and k % 128 == 0
            assert wide and (gemm == "stack" or min(n, k) >= FEWEST_FEATURES)
            partners = {("stack", form, k, n // 2), ("stack", form, 2 * k, n)}
            assert gemm == "dense" or partners & shapes
    assert set(SERVED) <= set(MODELS)
