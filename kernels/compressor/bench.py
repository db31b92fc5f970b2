"""The benchmark of the compressor: entries of DeepSeek-V4 at both ratios, and index keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.cache_rows import INDEX_ROWS, RowFormat, latent_rows
from kernels.cache_rows.reference import decode_rows
from kernels.compressor import OVERLAP_STATE_ROWS, STATE_ROWS, Finish, launch, reference

ANGLES, PER_PAGE, SETS = 32, 64, 4
CHECKED_TOKENS = 256
POOL_ERROR, STORE_ERROR = 1e-5, 2e-2


@dataclass(frozen=True)
class Shape:
    """`sequences` of `tokens` each in one step, ending in a closed window."""

    name: str
    width: int
    ratio: int
    overlap: bool
    sequences: int
    tokens: int
    form: RowFormat | None = None
    rotated: bool = False

    @property
    def total(self) -> int:
        return self.sequences * self.tokens

    @property
    def first(self) -> int:
        """Position of a sequence's first token of the step."""
        return -self.tokens % self.ratio


ENTRIES = latent_rows(512, 64)
POOLED = (
    Shape("pool r=4", 512, 4, True, 1, 1),
    Shape("pool r=4", 512, 4, True, 16, 1),
    Shape("pool r=4", 512, 4, True, 1, 4096),
    Shape("pool r=128", 512, 128, False, 1, 4096),
)
STORED = (
    Shape("store r=4", 512, 4, True, 1, 1, ENTRIES),
    Shape("store r=4", 512, 4, True, 1, 4096, ENTRIES),
    Shape("store keys r=4", 128, 4, True, 1, 4096, INDEX_ROWS, True),
)


def cases() -> Iterator[Case]:
    for shape in POOLED:
        yield Case("compressor", f"{shape.name} T={shape.total}", partial(_pool, shape))
    for shape in STORED:
        yield Case("compressor", f"{shape.name} T={shape.total}", partial(_store, shape))


def positions(shape: Shape, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each token its position and sequence, and where the sequences start."""
    one = torch.arange(shape.first, shape.first + shape.tokens, device=device)
    starts = torch.arange(shape.sequences + 1, device=device) * shape.tokens
    sequence = torch.arange(shape.sequences, device=device).repeat_interleave(shape.tokens)
    return one.repeat(shape.sequences), sequence, starts


def pool_inputs(shape: Shape, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """The tensors of `pool_rows`, with the state of every sequence written at its end."""
    channels = shape.width * (2 if shape.overlap else 1)
    rows, scores = (torch.randn(shape.total, channels, device=device) for _ in range(2))
    kept = OVERLAP_STATE_ROWS if shape.overlap else STATE_ROWS
    state = torch.rand(shape.sequences, kept, shape.width, device=device) + 0.5
    at, _, starts = positions(shape, device)
    return rows, scores, state, starts, at, starts[1:] - 1


def pool_error(shape: Shape, given: tuple[torch.Tensor, ...], found_TD: torch.Tensor) -> float:
    """Of the entries of the first tokens against fp64; the reference adds in the same order."""
    few = min(shape.total, CHECKED_TOKENS)
    rows, scores, state, starts, at, _ = (x.cpu() for x in given)
    sequences = max(1, few // shape.tokens)
    cut = starts[: sequences + 1].clamp_max(few)
    exact, _ = reference.pool_rows(
        rows[:few].double(), scores[:few].double(), state[:sequences].double(), cut, at[:few],
        torch.empty(0, dtype=torch.int64), shape.ratio, shape.overlap,
    )  # fmt: skip
    return float((found_TD[:few].cpu().double() - exact).norm() / exact.norm())


def _pool(shape: Shape) -> Work:
    sets = [pool_inputs(shape) for _ in range(SETS)]

    def call(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        rows, scores, state, starts, at, writes = given
        return launch.pool_rows(rows, scores, state, starts, at, writes, shape.ratio, shape.overlap)

    calls = [partial(call, given) for given in sets]
    rows, state = sets[0][0], sets[0][2]
    nbytes = 2 * rows.nbytes + 2 * state.nbytes + 4 * shape.total * shape.width
    return Work(calls, lambda: pool_error(shape, sets[0], calls[0]()[0]), POOL_ERROR, nbytes, 0.0)


def store_inputs(
    shape: Shape, device: str = "cuda"
) -> tuple[torch.Tensor, Finish, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Entries, what is done with them, an empty pool, and its table, sequences and positions."""
    assert shape.form is not None
    at, sequence, _ = positions(shape, device)
    angles = torch.rand(shape.total, ANGLES, device=device) * 7
    weight = torch.rand(shape.width, device=device).bfloat16() + 0.5
    finish = Finish(
        weight, 1e-6, angles.cos(), angles.sin(), torch.bfloat16, shape.form, shape.rotated
    )
    slots = -(-(shape.first + shape.tokens) // (shape.ratio * PER_PAGE))
    pages = shape.sequences * slots
    size = shape.form.row_bytes(shape.width)
    pool = torch.zeros(pages, PER_PAGE, size, dtype=torch.uint8, device=device)
    table = torch.randperm(pages, device=device).view(shape.sequences, slots)
    entries = torch.randn(shape.total, shape.width, device=device)
    return entries, finish, pool, (table, sequence, at)


def store_error(
    shape: Shape,
    entries: torch.Tensor,
    finish: Finish,
    pool: torch.Tensor,
    at: tuple[torch.Tensor, ...],
) -> float:
    """Of the stored values against the steps one by one on the CPU."""
    assert shape.form is not None
    moved = Finish(
        finish.weight_D.cpu(), finish.eps, finish.cos_TF.cpu(), finish.sin_TF.cpu(), finish.dtype,
        finish.form, finish.rotated,
    )  # fmt: skip
    wanted = torch.zeros_like(pool, device="cpu")
    rows = reference.finished(entries.cpu(), moved)
    table, sequence, positions_T = (x.cpu() for x in at)
    reference.write_entries(rows, wanted, table, sequence, positions_T, shape.ratio)
    exact = decode_rows(wanted, shape.form).double()
    return float((decode_rows(pool.cpu(), shape.form).double() - exact).norm() / exact.norm())


def _store(shape: Shape) -> Work:
    assert shape.form is not None
    entries, finish, pool, at = store_inputs(shape)
    table, sequence, positions_T = at

    def call() -> None:
        launch.store_entries(entries, finish, pool, table, sequence, positions_T, shape.ratio)

    def error() -> float:
        pool.zero_()
        call()
        return store_error(shape, entries, finish, pool, at)

    closed = -(-shape.total // shape.ratio)
    row = 4 * shape.width + 8 * ANGLES + shape.form.row_bytes(shape.width)
    return Work([call], error, STORE_ERROR, closed * row + 8 * shape.total, 0.0)
