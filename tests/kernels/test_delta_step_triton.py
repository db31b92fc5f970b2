"""Steps of the delta rule against plain arithmetic: the kernel in the interpreter or on a GPU, and
the reference that the CPU uses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

import pytest
import torch

from kernels import backend
from kernels.delta_step import Pools, Slots, Weights, launch, new_workspace, reference
from tests.kernels import interpreter

DEVICE = "cpu" if backend.interpreted() else "cuda"
# The output and the rows between the operations are bf16.
OUT_ERROR, STATE_ERROR = 4e-3, 1e-5
BOUND = -5.0
EPS = 1e-6


@dataclass(frozen=True)
class Layer:
    """`key_heads` equal to `heads` and `kda`: a decay of each key channel."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    kda: bool = False
    bound: float | None = None
    gate: str = "silu"
    dtype: torch.dtype = torch.bfloat16

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


GDN = Layer(2, 6, 16, 16)
LAYERS = {
    "gdn": GDN,
    "gdn-odd": Layer(1, 2, 12, 20, gate="sigmoid"),
    "gdn-alone": Layer(2, 2, 16, 8),
    "gdn-narrow": Layer(1, 3, 4, 3),
    "gdn-half": Layer(2, 4, 16, 12, dtype=torch.float16),
    "kda": Layer(3, 3, 16, 16, kda=True, bound=BOUND, gate="sigmoid"),
    "kda-softplus": Layer(2, 2, 20, 12, kda=True, gate="sigmoid"),
}


@dataclass(frozen=True)
class Inputs:
    layer: Layer
    qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    z: torch.Tensor
    weights: Weights
    pools: Pools
    slots: Slots

    def run(self, module: ModuleType, workspace: torch.Tensor | None = None) -> torch.Tensor:
        """Through the kernel or the reference; changes the pools."""
        rows = [self.qkv, self.a, self.b, self.z, self.weights, self.pools, self.slots]
        step = module.kda_step if self.layer.kda else module.gated_delta_step
        bound = [self.layer.bound] if self.layer.kda else []
        out: torch.Tensor = step(*rows, *bound, *([] if workspace is None else [workspace]))
        return out


def drawn(layer: Layer, slots: Slots, count: int) -> Inputs:
    """Random projections and states; rows and slots that must not be read hold NaN."""
    sequences, tokens = slots.write_BN.shape
    rows, heads, c = sequences * tokens, layer.heads, layer.channels
    decays = heads * layer.key_dim if layer.kda else heads
    qkv, a, b, z = (
        torch.randn(rows, width)
        for width in (c, decays, heads, heads * layer.value_dim)
    )  # fmt: skip
    pad = torch.arange(tokens) >= slots.length_B.cpu()[:, None]
    for x in (qkv, a, b, z):
        x[pad.flatten()] = torch.nan
    weights = Weights(
        torch.randn(c, 4).to(layer.dtype).to(DEVICE),
        torch.randn(heads).to(DEVICE),
        torch.randn(decays).bfloat16().to(DEVICE),
        torch.randn(layer.value_dim).bfloat16().to(DEVICE),
        EPS,
        layer.gate,
    )
    window = torch.full((count, 3, c), torch.nan)
    delta = torch.full((count, heads, layer.key_dim, layer.value_dim), torch.nan)
    read = slots.read_B.cpu()
    read = read[(read >= 0) & (read < count)]
    window[read], delta[read] = torch.randn(len(read), 3, c), torch.randn(delta[read].shape)
    pools = Pools(window.to(layer.dtype).to(DEVICE), delta.to(DEVICE))
    qkv, z = qkv.to(layer.dtype).to(DEVICE), z.to(layer.dtype).to(DEVICE)
    return Inputs(layer, qkv, a.to(DEVICE), b.to(DEVICE), z, weights, pools, slots)


def slots_of(read: list[int], write: list[list[int]], length: list[int]) -> Slots:
    return Slots(*(torch.tensor(x, device=DEVICE) for x in (read, write, length)))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


Wanted = tuple[torch.Tensor, dict[int, torch.Tensor], dict[int, torch.Tensor]]


def exact(inputs: Inputs) -> Wanted:
    """fp64 output, and by slot the states and windows that are written; a token at a time."""
    layer, w, slots = inputs.layer, inputs.weights, inputs.slots
    heads, k_dim, keys = layer.heads, layer.key_dim, layer.key_heads * layer.key_dim
    rows, count = inputs.qkv.cpu().double(), len(inputs.pools.delta_SHKV)
    out = torch.zeros(len(rows), heads, layer.value_dim, dtype=torch.float64)
    states, windows = {}, {}
    tokens = slots.write_BN.shape[1]
    rate = w.a_log_H.cpu().double().exp()
    given = zip(slots.read_B.tolist(), slots.length_B.tolist(), strict=True)
    for s, (slot, length) in enumerate(given):
        delta = torch.zeros(heads, k_dim, layer.value_dim, dtype=torch.float64)
        past = torch.zeros(3, layer.channels, dtype=torch.float64)
        if 0 <= slot < count:
            delta = inputs.pools.delta_SHKV[slot].cpu().double()
            past = inputs.pools.window_SRC[slot].cpu().double()
        for n in range(min(length, tokens)):
            t = s * tokens + n
            past = torch.cat([past, rows[t : t + 1]])[-4:]
            y = silu((past * w.conv_CJ.cpu().double().t()).sum(0)).to(layer.dtype).double()
            q, k = (x.view(-1, k_dim) for x in (y[:keys], y[keys : 2 * keys]))
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            q, k = (x.repeat_interleave(heads // layer.key_heads, 0) for x in (q, k))
            v = y[2 * keys :].view(heads, -1)
            pace = inputs.a[t].cpu().double() + w.dt_bias.cpu().double()
            pace = pace.view(heads, -1)
            if layer.bound is None:
                decay = -rate[:, None] * torch.log1p(pace.exp())
            else:
                decay = layer.bound * torch.sigmoid(rate[:, None] * pace)
            beta = torch.sigmoid(inputs.b[t].cpu().double())[:, None]
            delta = delta * decay.exp()[:, :, None]
            u = beta * (v - torch.einsum("hkv,hk->hv", delta, k))
            delta = delta + k[:, :, None] * u[:, None]
            o = torch.einsum("hkv,hk->hv", delta, q) * k_dim**-0.5
            o = o / (o.square().mean(-1, keepdim=True) + EPS).sqrt() * w.norm_V.cpu().double()
            z = inputs.z[t].cpu().double().view(heads, -1)
            out[t] = o * (silu(z) if layer.gate == "silu" else torch.sigmoid(z))
            target = int(slots.write_BN[s, n])
            if 0 <= target < count:
                states[target], windows[target] = delta, past[-3:]
    return out, states, windows


def check(inputs: Inputs, out: torch.Tensor, wanted: Wanted) -> None:
    """`wanted` by `exact` before the run; rows that are no tokens are zeros."""
    expected, states, windows = wanted
    assert not out.isnan().any()
    found = out.cpu().double()
    assert float((found - expected).norm() / expected.norm()) < OUT_ERROR
    nothing = expected.flatten(1).abs().sum(1) == 0
    assert torch.equal(found[nothing], expected[nothing])
    for slot, state in states.items():
        error = (inputs.pools.delta_SHKV[slot].cpu().double() - state).norm() / state.norm()
        assert float(error) < STATE_ERROR
        assert torch.equal(inputs.pools.window_SRC[slot].cpu().double(), windows[slot])


FAR = 1 << 40
CASES = {
    "decode in place": ([2, 0], [[2], [0]], [1, 1]),
    "decode to other slots": ([2, 0, 1], [[3], [4], [5]], [1, 0, 1]),
    "fresh, and slots that are none": ([-1, 7, FAR, 1], [[0], [-1], [2], [FAR]], [1, 1, 1, 1]),
    "verify": ([0, 1, 2], [[3, 4, 5, 6], [7, -1, 8, -3], [9, 9, 9, 9]], [4, 3, 0]),
    "verify in place": ([0, 1], [[0, 4, 5], [6, 7, 1]], [3, 5]),
    "all in place but the last": ([0], [[-1, 0, 1]], [3]),
}
COUNT = 10


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("module", [launch, reference], ids=["kernel", "reference"])
def test_steps_agree_with_double_precision(layer: str, case: str, module: ModuleType) -> None:
    if module is reference and DEVICE != "cpu":
        pytest.skip("the reference is for the CPU")
    inputs = drawn(LAYERS[layer], slots_of(*CASES[case]), COUNT)
    wanted, pools = exact(inputs), (inputs.pools.delta_SHKV, inputs.pools.window_SRC)
    untouched = [s for s in range(COUNT) if s not in wanted[1]]
    kept = [pool[untouched].clone() for pool in pools]
    check(inputs, inputs.run(module), wanted)
    for pool, values in zip(pools, kept, strict=True):
        assert torch.equal(pool[untouched].nan_to_num(9.0), values.nan_to_num(9.0))


def test_no_sequences() -> None:
    slots = Slots(*(torch.zeros(s, dtype=torch.int64, device=DEVICE) for s in (0, (0, 4), 0)))
    assert drawn(GDN, slots, 2).run(launch).shape == (0, 6, 16)


@pytest.mark.skipif(not backend.interpreted(), reason="a card picks the order")
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("verify")])
def test_programs_may_run_in_the_other_order(layer: str, case: str) -> None:
    inputs = drawn(LAYERS[layer], slots_of(*CASES[case]), COUNT)
    wanted = exact(inputs)
    with interpreter.programs_backwards():
        check(inputs, inputs.run(launch), wanted)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_head_without_output(zero: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and sums of squares of 0 are exchanged too."""
    inputs = drawn(GDN, slots_of([-1, -1], [[0], [1]], [1, 1]), 2)
    inputs.qkv.fill_(zero)
    workspace = new_workspace(2, inputs.pools)
    full = partial(torch.full, fill_value=torch.nan)
    monkeypatch.setattr(torch, "empty", lambda *size, **options: full(size, **options))
    assert not inputs.run(launch, workspace).any()
    assert not inputs.pools.delta_SHKV.any() and not workspace.any()


MIXED = ([0, 1, 11, 3], [[0, 6], [2, 7], [4, 8], [5, 9]], [2, 0, 1, 1 - (1 << 32)])


@pytest.mark.parametrize("name", ["gdn", "kda"])
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_workspace_is_zero_again_and_can_be_shared(name: str, tokens: int) -> None:
    read, write, length = MIXED
    slots = slots_of(read, [row[:tokens] for row in write], length)
    inputs = drawn(LAYERS[name], slots, COUNT)
    workspace = new_workspace(5, inputs.pools)
    for _ in range(2):
        wanted = exact(inputs)
        check(inputs, inputs.run(launch, workspace), wanted)
        assert not workspace.any()


def test_rows_may_lie_apart() -> None:
    inputs = drawn(LAYERS["kda"], slots_of([0, 1], [[2, 3], [4, 5]], [2, 2]), 6)
    wanted = exact(inputs)

    def apart(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(x[:, :3], torch.nan), x], 1)[:, 3:]

    spread = replace(
        inputs,
        qkv=apart(inputs.qkv),
        a=apart(inputs.a),
        b=apart(inputs.b),
        z=apart(inputs.z),
    )
    check(inputs, spread.run(launch), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [Layer(2, 6, 128, 128), replace(LAYERS["kda"], key_dim=128)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_replayed_graph_follows_slots_and_lengths(layer: Layer, tokens: int) -> None:
    write = [[1 + s * tokens + n for n in range(tokens)] for s in range(3)]
    inputs = drawn(layer, slots_of([15, 13, 14], write, [tokens] * 3), 16)
    inputs.run(launch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = inputs.run(launch)
    turned = [row[::-1] for row in write]
    for lengths, read in (([1, 0, tokens], [13, 14, -1]), ([tokens, tokens, 1], [1, 14, 12])):
        fresh = drawn(layer, slots_of(read, turned, lengths), 16)
        for name in ("qkv", "a", "b", "z"):
            getattr(inputs, name).copy_(getattr(fresh, name))
        for pair in ((inputs.pools, fresh.pools), (inputs.slots, fresh.slots)):
            for name in pair[0].__slots__:
                getattr(pair[0], name).copy_(getattr(pair[1], name))
        wanted = exact(inputs)
        out.fill_(torch.nan)
        graph.replay()
        check(inputs, out, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gdn", "kda"])
@pytest.mark.parametrize("most", [1, 4])
def test_a_sequence_does_not_depend_on_the_others(name: str, most: int) -> None:
    """All in place, with many sequences at once: as each alone, to the bit."""
    layer, count = replace(LAYERS[name], key_dim=128, value_dim=128), 40
    lengths = [1 + s % most for s in range(count)]
    write = [
        [s if n + 1 == lengths[s] else count * (n + 1) + s for n in range(most)]
        for s in range(count)
    ]
    inputs = drawn(layer, slots_of(list(range(count)), write, lengths), 5 * count)
    pools = Pools(inputs.pools.window_SRC.clone(), inputs.pools.delta_SHKV.clone())
    together = inputs.run(launch)
    for s in (0, 3, 38):
        rows = slice(most * s, most * s + most)
        alone = replace(
            inputs,
            qkv=inputs.qkv[rows],
            a=inputs.a[rows],
            b=inputs.b[rows],
            z=inputs.z[rows],
            pools=pools,
            slots=slots_of([s], [write[s]], [lengths[s]]),
        )
        assert torch.equal(alone.run(launch), together[rows])
        for slot in write[s][: lengths[s]]:
            assert torch.equal(pools.delta_SHKV[slot], inputs.pools.delta_SHKV[slot])
            assert torch.equal(pools.window_SRC[slot], inputs.pools.window_SRC[slot])
