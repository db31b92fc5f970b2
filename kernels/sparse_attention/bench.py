"""The benchmark of latent attention: layers of DeepSeek-V4, V4.1 and GLM-5.3 on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.cache_rows import COMPRESSED_ROWS, WINDOW_ROWS, RowFormat, decode_rows, latent_rows
from kernels.sparse_attention import Entries, Rows
from kernels.sparse_attention.launch import Question, attend, configuration
from kernels.split_keys import Partials

HEADS, WIDTH, WINDOW = 64, 512, 128
PAGE = 64
MAX_ERROR = 4e-3
CHECKED_TOKENS = 8
ROTATED = 4  # sets of inputs; the entries of all of them exceed the caches
SCALES = (120, 128)  # codes of ue8m0 scales
V4_ROWS = latent_rows(WIDTH, 64)


@dataclass(frozen=True)
class Layer:
    """T tokens, the last of as many sequences or, in a prefill, of one; all see as many entries.

    `chosen` of the `visible` entries are selected; None takes all of them.
    """

    name: str
    tokens: int
    visible: int
    chosen: int | None
    window: RowFormat | None = V4_ROWS
    entries: RowFormat | None = V4_ROWS
    sinks: bool = True
    width: int = WIDTH

    @property
    def sequences(self) -> int:
        return self.tokens if self.tokens <= 16 else 1

    @property
    def keys(self) -> int:
        """Of a token."""
        return (WINDOW if self.sinks else 0) + (
            self.visible if self.chosen is None else self.chosen
        )

    @property
    def flops(self) -> float:
        return 4.0 * self.tokens * HEADS * self.width * self.keys

    @property
    def nbytes(self) -> float:
        """Every row that is used once, numbers, queries and outputs."""
        named = self.visible if self.chosen is None else self.chosen
        rows = self.sequences * min(self.visible, named * self.tokens // self.sequences)
        window = min(self.tokens + WINDOW, WINDOW * self.tokens) if self.sinks else 0
        ends = 2 * 2.0 * self.tokens * HEADS * self.width
        numbers = 8.0 * self.tokens * (self.chosen or 0)
        return (
            rows * row_bytes(self.entries, self.width)
            + window * row_bytes(self.window, self.width)
            + ends
            + numbers
        )


LAYERS = (
    Layer("V4 CSA T=1", 1, 8192, 512),
    Layer("V4 CSA T=4", 4, 8192, 512),
    Layer("V4 CSA T=16", 16, 8192, 512),
    Layer("V4 CSA T=1024", 1024, 8192, 512),
    Layer("V4 HCA 128K T=1", 1, 1024, None),
    Layer("V4.1 T=16", 16, 8192, 512, WINDOW_ROWS, COMPRESSED_ROWS),
)


def row_bytes(form: RowFormat | None, width: int) -> int:
    return 2 * width if form is None else form.row_bytes(width)


def cases() -> Iterator[Case]:
    for layer in LAYERS:
        yield Case("sparse_attention", layer.name, partial(work, layer))


def pool(form: RowFormat | None, sequences: int, rows: int, width: int, device: str) -> Rows:
    """Rows of random values at random pages."""
    pages = -(-rows // PAGE)
    shape = (sequences * pages, PAGE)
    table = torch.randperm(sequences * pages, device=device).view(sequences, pages)
    if form is None:
        return Rows(torch.randn(*shape, width, device=device).bfloat16(), table)
    stored = torch.randint(0, 255, (*shape, form.row_bytes(width)), device=device).byte()
    stored[(stored & 0x7F) == 0x7F] = 0x35
    coded = width - form.plain
    codes = coded // (2 if form.codes == "e2m1" else 1)
    if form.plain:
        values = torch.randn(*shape, form.plain, device=device).bfloat16()
        stored[..., codes : codes + form.plain_bytes] = values.view(torch.uint8)
    scales = stored[..., codes + form.plain_bytes : stored.shape[-1] - form.pad]
    low, high = SCALES if form.scale == "ue8m0" else (0x28, 0x48)
    scales.copy_(torch.randint(low, high, scales.shape, device=device))
    stored[..., stored.shape[-1] - form.pad :] = 0
    return Rows(stored, table, form)


@dataclass(frozen=True)
class Inputs:
    """What one call reads."""

    question: Question
    window: Rows | None
    entries: Entries


def inputs(layer: Layer, device: str = "cuda") -> Inputs:
    tokens, each = layer.tokens, layer.tokens // layer.sequences
    sequence = torch.arange(layer.sequences, device=device).repeat_interleave(each)
    q = torch.randn(tokens, HEADS, layer.width, device=device).bfloat16()
    visible = torch.full((tokens,), layer.visible, device=device)
    rows = pool(layer.entries, layer.sequences, layer.visible, layer.width, device)
    entries = Entries(rows, visible, selection(layer, device))
    scale = layer.width**-0.5 / 4
    if not layer.sinks:
        return Inputs(Question(q, sequence, scale), None, entries)
    last = torch.arange(each, device=device).repeat(layer.sequences) + WINDOW - 1
    window = pool(layer.window, layer.sequences, each + WINDOW, layer.width, device)
    sinks = torch.randn(HEADS, device=device)
    return Inputs(Question(q, sequence, scale, sinks, last - WINDOW + 1, last), window, entries)


def selection(layer: Layer, device: str) -> torch.Tensor | None:
    """Ascending numbers, another choice for every token."""
    if layer.chosen is None:
        return None
    order = torch.rand(layer.tokens, layer.visible, device=device).argsort(1)
    return order[:, : layer.chosen].sort(1).values.contiguous()


def exact(given: Inputs, token: int) -> torch.Tensor:
    """fp64 [H, D] of one token."""
    asked, entries = given.question, given.entries
    sequence = int(asked.sequence_T[token])
    chosen = entries.selected_TS
    every = torch.arange(int(entries.visible_T[token]), device=asked.q_THD.device)
    keys = [_gathered(entries.rows, sequence, every if chosen is None else chosen[token])]
    if given.window is not None and asked.first_T is not None and asked.last_T is not None:
        first, last = int(asked.first_T[token]), int(asked.last_T[token])
        span = torch.arange(first, last + 1, device=asked.q_THD.device)
        keys.append(_gathered(given.window, sequence, span))
    k = torch.cat(keys)
    logits = asked.q_THD[token].double() @ k.t() * asked.scale
    if asked.sinks_H is not None:
        logits = torch.cat([logits, asked.sinks_H.double()[:, None]], 1)
    return logits.softmax(1)[:, : len(k)] @ k


def _gathered(rows: Rows, sequence: int, numbers: torch.Tensor) -> torch.Tensor:
    found = rows.pool[rows.pages[sequence, numbers // PAGE], numbers % PAGE]
    return (found if rows.form is None else decode_rows(found, rows.form)).double()


def work(layer: Layer, device: str = "cuda") -> Work:
    sets = [inputs(layer, device) for _ in range(ROTATED)]
    first = sets[0]
    out = torch.empty_like(first.question.q_THD)
    coded = layer.entries is not None
    config = configuration(layer.tokens, HEADS, out.device, coded=coded)
    partials = Partials.allocate(layer.tokens, HEADS, config.splits, layer.width, out.device)
    calls = [partial(attend, s.question, s.window, s.entries, out, partials) for s in sets]

    def error() -> float:
        out.fill_(torch.nan)
        calls[0]()
        if bool(out.isnan().any()):
            return float("inf")
        step = max(layer.tokens // CHECKED_TOKENS, 1)
        tokens = range(0, layer.tokens, step)
        expected = torch.stack([exact(first, t) for t in tokens])
        return float((out[::step].double() - expected).norm() / expected.norm())

    return Work(calls, error, MAX_ERROR, layer.nbytes, layer.flops)
