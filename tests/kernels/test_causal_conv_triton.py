"""The convolution over packed sequences against plain arithmetic: in the interpreter, on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from kernels import backend
from kernels.causal_conv import Packed, launch, reference

DEVICE = "cpu" if backend.interpreted() else "cuda"
ERROR = 3e-3  # of bf16 outputs
CHANNELS = 72
FAR = 1 << 40
shapes = pytest.mark.parametrize(("taps", "dilation"), [(4, 1), (4, 3), (2, 5)])
modules = pytest.mark.parametrize("module", [launch, reference], ids=["kernel", "reference"])


@dataclass(frozen=True)
class Step:
    """`lengths` of the sequences' parts, slots that are read, writes (packed token, slot)."""

    lengths: list[int]
    read: list[int]
    writes: list[tuple[int, int]]

    @property
    def owners(self) -> list[int]:
        """The sequence of every token."""
        return [b for b, length in enumerate(self.lengths) for _ in range(length)]

    @property
    def packed(self) -> Packed:
        places = [place for length in self.lengths for place in range(length)]
        owners, tokens, slots = (
            self.owners,
            [t for t, _ in self.writes],
            [s for _, s in self.writes],
        )
        of_writes = [owners[t] if 0 <= t < len(owners) else 0 for t in tokens]
        given = (owners, places, self.read, tokens, of_writes, slots)
        return Packed(*(torch.tensor(x, dtype=torch.int64, device=DEVICE) for x in given))


STEPS = {
    "a token each": Step([1, 1, 1], [2, 0, -1], [(0, 2), (1, 5), (2, 3)]),
    "drafts": Step([4, 2], [0, 1], [(0, 0), (1, 3), (2, 4), (3, 5), (4, 6), (5, 1)]),
    "chunks": Step([33, 1, 41, 2], [0, FAR, 7, 1], [(8, 8), (32, 0), (33, 2), (74, 7), (76, 1)]),
    "stale writes": Step([2, 3], [0, 1], [(-1, 4), (9, 5), (1, -1), (4, FAR), (3, 1)]),
    "one long": Step([70], [3], [(64, 0), (1, 1), (69, 3)]),
    "nothing written": Step([3], [0], []),
    "no tokens": Step([], [], []),
}
SLOTS = 9


def exact(
    x: torch.Tensor, pool: torch.Tensor, weight: torch.Tensor, step: Step, dilation: int
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """fp64 outputs, and by slot the windows that are written."""
    window = pool.shape[1]
    texts = []
    for slot, part in zip(step.read, x.double().split(step.lengths), strict=True):
        known = 0 <= slot < len(pool)
        before = pool[slot].double() if known else torch.zeros(pool.shape[1:]).double()
        texts.append(torch.cat([before, part]))
    out, windows = torch.zeros(x.shape, dtype=torch.float64), {}
    starts = [sum(step.lengths[:b]) for b in range(len(texts))]
    for t, b in enumerate(step.owners):
        last = t - starts[b] + window
        rows = texts[b][last - window : last + 1 : dilation]
        y = (rows * weight.double().t()).sum(0)
        out[t] = y / (1 + torch.exp(-y))
    for t, slot in step.writes:
        if 0 <= t < len(x) and 0 <= slot < len(pool):
            last = t - starts[step.owners[t]] + window
            windows[slot] = texts[step.owners[t]][last - window + 1 : last + 1]
    return out, windows


def drawn(tokens: int, taps: int, dilation: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, CHANNELS).bfloat16()
    pool = torch.randn(SLOTS, (taps - 1) * dilation, CHANNELS).bfloat16()
    return x, pool, torch.randn(CHANNELS, taps).bfloat16()


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    found = found.cpu().double()
    return bool((found - wanted).norm() <= ERROR * wanted.norm()) and found.shape == wanted.shape


@shapes
@pytest.mark.parametrize("name", STEPS)
@modules
def test_packed_convolution_and_new_windows(
    taps: int, dilation: int, name: str, module: ModuleType
) -> None:
    if module is reference and DEVICE != "cpu":
        pytest.skip("the reference is for the CPU")
    step = STEPS[name]
    x, pool, weight = drawn(len(step.owners), taps, dilation)
    out, windows = exact(x, pool, weight, step, dilation)
    wanted = pool.clone()
    for slot, window in windows.items():
        wanted[slot] = window.bfloat16()
    x, pool, weight = x.to(DEVICE), pool.to(DEVICE), weight.to(DEVICE)
    found = module.conv_packed(x, pool, weight, step.packed, dilation)
    assert close(found, out)
    assert torch.equal(pool.cpu(), wanted)


@shapes
@pytest.mark.parametrize("tokens", [0, 1, 65])
def test_gathered_rows(taps: int, dilation: int, tokens: int) -> None:
    """The two steps that the packed convolution replaces."""
    history = torch.randn(90, CHANNELS).bfloat16().to(DEVICE)
    weight = torch.randn(CHANNELS, taps).bfloat16().to(DEVICE)
    rows = torch.randint(0, 90, (tokens, taps))
    rows[:1] = torch.tensor([-1, 90, FAR, -FAR])[:taps]
    found = launch.causal_conv(history, rows.to(DEVICE), weight)
    known = (rows >= 0) & (rows < 90)
    values = history.cpu().double()[rows.clamp(0, 89)] * known[..., None]
    y = (values * weight.cpu().double().t()).sum(1)
    assert close(found, y * torch.sigmoid(y))


def test_rows_of_a_history() -> None:
    packed = STEPS["chunks"].packed
    token = torch.arange(len(packed.sequence_T), device=DEVICE)
    given = (token, packed.sequence_T, packed.offset_T, 4, 9)
    for delays in ((9, 6, 3, 0), tuple(range(9, -1, -1)), (2,)):
        found = launch.history_rows(*given, delays)
        for t, (row, b, offset) in enumerate(
            zip(found.tolist(), *(x.tolist() for x in given[1:3]), strict=True)
        ):
            inside = [36 + t - d if d <= offset else (b + 1) * 9 + offset - d for d in delays]
            assert row == inside


@pytest.mark.gpu
def test_replayed_graph_follows_slots() -> None:
    step, other = STEPS["drafts"], Step([2, 4], [7, 3], [(t, s) for t, s in enumerate(range(6))])
    x, pool, weight = (v.to(DEVICE) for v in drawn(6, 4, 3))
    packed = step.packed
    launch.conv_packed(x, pool, weight, packed, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = launch.conv_packed(x, pool, weight, packed, 3)
    for now in (step, other):
        for name in Packed.__slots__:
            getattr(packed, name).copy_(getattr(now.packed, name))
        x.normal_()
        found.fill_(torch.nan)
        out, windows = exact(x.cpu(), pool.cpu(), weight.cpu(), now, 3)
        graph.replay()
        assert close(found, out)
        for slot, window in windows.items():
            assert torch.equal(pool[slot].cpu().double(), window)


@pytest.mark.gpu
def test_a_token_does_not_depend_on_the_batch() -> None:
    """To the bit, whatever the tile."""
    x, pool, weight = (v.to(DEVICE) for v in drawn(70, 4, 1))
    together = launch.conv_packed(x, pool, weight, Step([5, 65], [1, 2], []).packed, 1)
    alone = launch.conv_packed(x[:5], pool, weight, Step([5], [1], []).packed, 1)
    assert torch.equal(alone, together[:5])
