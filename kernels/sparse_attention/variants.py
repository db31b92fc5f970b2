"""The variants of the latent attention kernel that servers launch."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.aot.variant import Variant
from kernels.cards import CARDS
from kernels.sparse_attention import configs
from kernels.sparse_attention.configs import Config
from kernels.sparse_attention.launch import Keys, Layout
from kernels.sparse_attention.triton import E2M1, E4M3, PLAIN, sparse_attention
from kernels.split_keys.variant import merge_variant

WIDTH = 512
MANY_TOKENS = 8192
V4_ROWS = Layout(E4M3, 584, 64, True, 64)
WINDOW_ROWS = Layout(E4M3, 528, 32)
COMPRESSED_ROWS = Layout(E2M1, 288, 16, False)
PLAIN_ROWS = Layout(PLAIN, WIDTH)
# What the layers of the served models attend to.
KEYS = {
    "V4 window": Keys(V4_ROWS, None, selected=False, sink=True),
    "V4 window, entries": Keys(V4_ROWS, V4_ROWS, selected=False, sink=True),
    "V4 window, selected": Keys(V4_ROWS, V4_ROWS, selected=True, sink=True),
    "V4.1 window": Keys(WINDOW_ROWS, None, selected=False, sink=True),
    "V4.1 window, selected": Keys(WINDOW_ROWS, COMPRESSED_ROWS, selected=True, sink=True),
}
UNALIGNED = ("sequence_of", "first_of", "last_of", "visible_of", "selected")
INTEGERS = (*UNALIGNED, "window_table", "entry_table")
SIZES = (
    "heads", "splits", "sequences", "slots", "w_width", "w_pages", "w_shift", "e_width", "e_pages",
    "e_shift",
)  # fmt: skip


def variants(target: int) -> Iterator[Variant]:
    """Two for each kind of keys: splits are an argument. Merges of every number of them."""
    for label, keys in KEYS.items():
        yield from of_keys(target, label, keys)
    yield from merges(sink=True)


def of_keys(target: int, label: str, keys: Keys) -> Iterator[Variant]:
    """The kernel for few tokens or heads, and that for many."""
    for tokens in (1, MANY_TOKENS):
        config = configs.select(CARDS[target], tokens, configs.WIDE_HEADS, coded=keys.coded)
        yield variant(label, keys, config)


def merges(*, sink: bool) -> Iterator[Variant]:
    """The merge of every number of splits."""
    splits = 2
    while splits <= configs.MAX_SPLITS:
        yield merge_variant(WIDTH, splits, sink=sink)
        splits *= 2


def variant(label: str, keys: Keys, config: Config) -> Variant:
    """The kernel over `keys` as a launch with bf16 queries has it."""
    window, entries = (
        "*bf16" if layout is None or layout.form == PLAIN else "*u8"
        for layout in (keys.window or keys.entries, keys.entries or keys.window)
    )
    pointers = {
        "q": "*bf16", "out": "*bf16", "values": "*fp32", "stats": "*fp32",
        "sinks": "*fp32" if keys.sink else "*bf16", **dict.fromkeys(INTEGERS, "*i64"),
        "window": window, "window_tails": _tails(window, keys.window or keys.entries),
        "entries": entries, "entry_tails": _tails(entries, keys.entries or keys.window),
    }  # fmt: skip
    kinds = pointers | dict.fromkeys(SIZES, "i32") | {"scale": "fp32"}
    constants = keys.constants(WIDTH, config)
    arguments = {n: kinds[n] for n in sparse_attention.arg_names if n not in constants}
    tile = f"{config.block_heads}x{config.block_keys} w{config.warps} s{config.stages}"
    return Variant(
        f"sparse_attention {label} {tile}", sparse_attention, arguments, constants,
        frozenset(pointers) - set(UNALIGNED), config.warps, config.stages,
        config.registers,
    )  # fmt: skip


def _tails(pool: str, layout: Layout | None) -> str:
    return "*bf16" if layout is not None and layout.tail else pool
