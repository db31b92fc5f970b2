"""Launches of the Triton kernel: checks, configuration, partial results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels import backend
from kernels.cards import card_of
from kernels.sparse_attention import configs
from kernels.sparse_attention.configs import Config
from kernels.sparse_attention.triton import E2M1, E4M3, PLAIN, sparse_attention
from kernels.split_keys import COPIES, LOG2_E, Partials, merge_splits

if TYPE_CHECKING:
    from kernels.sparse_attention import Entries, Rows

FORMS = {"e4m3": E4M3, "e2m1": E2M1}


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows as the kernel reads them: `row` elements of the pool each, the last `tail` plain."""

    form: int
    row: int
    group: int = 0
    e8m0: bool = True
    tail: int = 0

    @classmethod
    def of(cls, rows: Rows) -> Layout:
        """Raises ValueError where the kernel has no such rows."""
        row, form = rows.pool.shape[2], rows.form
        if form is None:
            return cls(PLAIN, row)
        # Plain values count as one more group, whose scale is read from the padding.
        if form.plain and not (
            form.plain == form.group
            and form.plain_type == torch.bfloat16
            and form.codes == "e4m3"
            and form.pad
        ):
            raise ValueError(f"no kernel reads plain values as in {form}")
        return cls(FORMS[form.codes], row, form.group, form.scale == "ue8m0", form.plain)


@dataclass(frozen=True, slots=True)
class Keys:
    """What a token attends to, by layout: None where there are none of a kind."""

    window: Layout | None
    entries: Layout | None
    selected: bool
    sink: bool

    @property
    def coded(self) -> bool:
        """Whether rows must be decoded."""
        return any(x is not None and x.form != PLAIN for x in (self.window, self.entries))

    def constants(self, width: int, config: Config) -> dict[str, int | bool]:
        """The kernel's constants."""
        window = self.window or self.entries
        entries = self.entries or self.window
        assert window is not None and entries is not None, "neither window nor entries"
        assert window.tail == entries.tail, "window and entries have other plain values"
        return {
            "D": width,
            "TAIL": window.tail,
            **_row_constants("W", window),
            **_row_constants("E", entries),
            "WINDOW": self.window is not None,
            "ENTRIES": self.entries is not None,
            "SELECTED": self.selected,
            "SINK": self.sink,
            "BH": config.block_heads,
            "BK": config.block_keys,
            "COPIES": COPIES,
            "PTX": not backend.interpreted(),
        }


def _row_constants(prefix: str, layout: Layout) -> dict[str, int | bool]:
    values = {"FORM": layout.form, "ROW": layout.row, "GROUP": layout.group, "E8M0": layout.e8m0}
    return {f"{prefix}_{name}": value for name, value in values.items()}


def configuration(tokens: int, heads: int, device: torch.device, *, coded: bool) -> Config:
    """The configuration of the card for so many tokens and heads, of coded rows or others."""
    return configs.select(card_of(device), tokens, heads, coded=coded)


@dataclass(frozen=True, slots=True)
class Question:
    """Queries [T, H, D] and who asks: the sequence of each token, and its window's range."""

    q_THD: torch.Tensor
    sequence_T: torch.Tensor
    scale: float
    sinks_H: torch.Tensor | None = None
    first_T: torch.Tensor | None = None
    last_T: torch.Tensor | None = None


def attend(
    question: Question,
    window: Rows | None,
    entries: Entries | None,
    out_THD: torch.Tensor,
    partials: Partials | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Fill `out` [T, H, D]. No host synchronisation; can be captured in a CUDA graph.

    Queries, rows and weights are rounded to bf16, sums are fp32. A token without any key gets 0.
    Sequences, positions and table entries out of range are left out. Without `partials` they are
    allocated where the configuration has more than one split.
    """
    q_THD = question.q_THD
    tokens, heads, width = q_THD.shape
    assert q_THD.is_contiguous() and out_THD.is_contiguous() and out_THD.shape == q_THD.shape
    assert width >= 16 and width & (width - 1) == 0, "a width is a power of two from 16"
    keys = Keys(
        None if window is None else Layout.of(window),
        None if entries is None else Layout.of(entries.rows),
        entries is not None and entries.selected_TS is not None,
        question.sinks_H is not None,
    )
    config = config or configuration(tokens, heads, q_THD.device, coded=keys.coded)
    if partials is None:
        partials = Partials.allocate(tokens, heads, config.splits, width, q_THD.device)
    assert partials.holds(tokens, heads, config.splits, width)
    if tokens == 0:
        return out_THD
    _launch(question, window, entries, out_THD, partials, keys.constants(width, config), config)
    if config.splits > 1:
        merge_splits(partials, out_THD, config.splits, sinks_H=question.sinks_H)
    return out_THD


def _launch(
    question: Question,
    window: Rows | None,
    entries: Entries | None,
    out_THD: torch.Tensor,
    partials: Partials,
    constants: dict[str, int | bool],
    config: Config,
) -> None:
    tokens, heads, _ = out_THD.shape
    any_T = question.sequence_T  # stands for tensors that are not read
    window_rows = window or (entries.rows if entries is not None else None)
    entry_rows = entries.rows if entries is not None else window
    assert window_rows is not None and entry_rows is not None
    assert window_rows.pages.shape[0] == entry_rows.pages.shape[0]
    selected = entries.selected_TS if entries is not None else None
    read = (any_T, question.first_T, question.last_T, question.sinks_H, selected)
    assert all(x is None or x.is_contiguous() for x in read)
    assert window is None or (question.first_T is not None and question.last_T is not None)
    grid = (tokens * -(-heads // config.block_heads), config.splits)
    sparse_attention[grid](
        question.q_THD, out_THD, partials.values, partials.stats,
        out_THD if question.sinks_H is None else question.sinks_H, any_T,
        any_T if question.first_T is None else question.first_T,
        any_T if question.last_T is None else question.last_T,
        any_T if entries is None else entries.visible_T,
        any_T if selected is None else selected,
        *_pool(window_rows), *_pool(entry_rows),
        heads, question.scale * LOG2_E.value, config.splits, window_rows.pages.shape[0],
        0 if selected is None else selected.shape[1], *_sizes(window_rows), *_sizes(entry_rows),
        **constants, num_warps=config.warps, num_stages=config.stages, maxnreg=config.registers,
    )  # fmt: skip


def _pool(rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pool, its plain values, and the page table. Row numbers of a pool are 32-bit."""
    assert rows.pool.shape[0] * rows.pool.shape[1] < 1 << 31
    assert rows.pool.is_contiguous() and rows.pages.is_contiguous()
    tails = rows.pool
    if rows.form is not None and rows.form.plain:
        tails = rows.pool.view(torch.bfloat16)
    return rows.pool, tails, rows.pages


def _sizes(rows: Rows) -> tuple[int, int, int]:
    """Columns of the table, pages of the pool, and the logarithm of a page's rows."""
    per_page = rows.pool.shape[1]
    assert per_page & (per_page - 1) == 0, "a page holds a power of two of rows"
    return rows.pages.shape[1], rows.pool.shape[0], per_page.bit_length() - 1
