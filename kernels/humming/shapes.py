"""The weights of the served models that humming's kernels read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from kernels.humming.manifest import Gemm

Split = Literal["", "n", "k"]
# Narrower matrices are not built for: their time is that of a launch in Triton too.
FEWEST_FEATURES = 1024


@dataclass(frozen=True, slots=True)
class Dense:
    """A matrix [n, k], and the side that tensor-parallel ranks divide."""

    form: str
    n: int
    k: int
    split: Split = ""


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of a layer; ranks hold whole ones."""

    form: str
    count: int
    hidden: int
    inner: int


@dataclass(frozen=True, slots=True)
class Shape:
    """One weight as a rank holds it; `experts` is 0 for a single matrix."""

    gemm: Gemm
    form: str
    n: int
    k: int
    experts: int = 0

    @property
    def key(self) -> tuple[str, str, int, int]:
        return (self.gemm, self.form, self.n, self.k)


def _dense(form: str, *sizes: tuple[int, int, Split]) -> tuple[Dense, ...]:
    return tuple(Dense(form, *size) for size in sizes)


def _qwen_27b(form: str) -> tuple[Dense, ...]:
    return _dense(
        form, (17408, 5120, "n"), (5120, 17408, "k"), (12288, 5120, "n"), (1024, 5120, "n"),
        (10240, 5120, "n"), (6144, 5120, "n"), (5120, 6144, "k"),
    )  # fmt: skip


# Shapes: the checkpoints' tensors, as the engine's layers read them. wo_a of DeepSeek is read in
# groups, of 1024 rows each.
MODELS: dict[str, tuple[Dense | Experts, ...]] = {
    "deepseek-v4": (
        Experts("mxfp4", 256, 4096, 2048),
        *_dense(
            "fp8-b128", (1024, 4096, ""), (32768, 1024, "n"), (4096, 8192, "k"), (8192, 1024, ""),
            (2048, 4096, "n"), (4096, 2048, "k"), (4096, 12288, ""), (4096, 4096, ""),
        ),
    ),
    "deepseek-v4.1": (
        Experts("mxfp4", 384, 5120, 2304),
        *_dense(
            "fp8-g32", (1280, 5120, ""), (32768, 1280, "n"), (5120, 8192, "k"), (4096, 1280, ""),
            (2304, 5120, "n"), (5120, 2304, "k"), (25600, 6144, ""), (5120, 15360, ""),
        ),
    ),
    "qwen3.8-27b-g128": _qwen_27b("int4-g128"),
    "qwen3.8-27b-g32": _qwen_27b("int4-g32"),
    "qwen3.8-27b-g32-zero": _qwen_27b("int4-g32-zero"),
    "qwen3.8-next-fp8": (Experts("fp8-b128", 512, 2560, 640),),
    "qwen3.8-next-int4": (Experts("int4-g128", 512, 2560, 640),),
    "glm-5.3-fp8": (
        Experts("fp8-b128", 288, 4096, 2048),
        *_dense(
            "fp8-b128", (1536, 4096, ""), (16384, 1536, "n"), (4096, 16384, "k"),
            (12288, 4096, "n"), (4096, 12288, "k"), (2048, 4096, "n"), (4096, 2048, "k"),
        ),
    ),
    "glm-5.3-int4": (Experts("int4-g128", 288, 4096, 2048),),
    # What the benchmark has.
    "bench": (
        Experts("mxfp4", 256, 4096, 2048),
        Experts("mxfp4", 256, 4096, 256),
        Experts("int4-g128", 512, 2560, 640),
        Experts("fp8-b128", 288, 4096, 2048),
        *_dense("fp8-b128", (4096, 4096, ""), (16384, 4096, "")),
        *_dense("int4-g128", (17408, 5120, ""), (5120, 17408, "")),
        *_dense("mxfp4", (4096, 4096, ""), (16384, 4096, "")),
    ),
    "tests": (
        *(
            Dense(form, 1024, 1024)
            for form in (
                "mxfp4", "int4-g128", "int4-g32", "int4-g128-zero", "int4-g32-zero", "fp8-b128",
                "fp8-g32",
            )
        ),
        *(Experts(form, 8, 512, 256) for form in ("mxfp4", "int4-g128", "fp8-b128")),
    ),
}  # fmt: skip
# Built where nothing else is asked for.
SERVED = (
    "deepseek-v4", "deepseek-v4.1", "qwen3.8-27b-g128", "qwen3.8-next-fp8", "qwen3.8-next-int4",
    "glm-5.3-fp8", "glm-5.3-int4",
)  # fmt: skip


def shapes_of(models: Iterable[str], ranks: int) -> list[Shape]:
    """The weights of models as one of `ranks` tensor-parallel ranks holds them, without repeats.

    A division that does not come out is left out, as the engine refuses it.
    """
    return list({shape.key: shape for name in models for shape in _of_model(name, ranks)}.values())


def _of_model(name: str, ranks: int) -> Iterator[Shape]:
    for weight in MODELS[name]:
        if isinstance(weight, Experts):
            if weight.count % ranks == 0:
                yield from _of_experts(weight, weight.count // ranks)
            continue
        n = weight.n // ranks if weight.split == "n" else weight.n
        k = weight.k // ranks if weight.split == "k" else weight.k
        whole = n % 128 == 0 and k % 128 == 0
        if whole and min(n, k) >= FEWEST_FEATURES:
            yield Shape("dense", weight.form, n, k)


def _of_experts(weight: Experts, count: int) -> Iterator[Shape]:
    yield Shape("stack", weight.form, 2 * weight.inner, weight.hidden, count)
    yield Shape("stack", weight.form, weight.hidden, weight.inner, count)
