"""The sampling kernels against double precision: in the interpreter on a CPU, and on a GPU."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from kernels import backend
from kernels.sampling import launch, philox_uniform
from kernels.sampling.launch import Scratch
from kernels.sampling.settings import IN_PROMPT, OCCURRENCE, RowSettings

DEVICE = "cpu" if backend.interpreted() else "cuda"
DRAWS = 40 if backend.interpreted() else 5_000
SETTINGS = [  # temperature, top_k, top_p, min_p
    (0.0, 5, 0.5, 0.1),
    (1.0, 0, 1.0, 0.0),
    (2.5, 0, 1.0, 0.0),
    (0.3, 7, 1.0, 0.0),
    (1.0, 10_000_000, 0.9, 0.0),
    (0.7, 40, 0.95, 0.02),
    (1.0, 0, 1e-9, 0.0),
    (1.0, 0, 0.8, 0.2),
    (1.5, 300, 1.0, 0.01),
    (1.0, 3, 1.0, 1.0),
]


@pytest.fixture(autouse=True)
def short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter sorts slowly; so longer lists, which are searched, come up as well. Few
    programs share the blocks of all rows.
    """
    if backend.interpreted():
        monkeypatch.setattr(launch, "PROGRAMS", 16)
        monkeypatch.setattr(launch, "FEW", 8)
        monkeypatch.setattr(launch, "MOST_SORTED", 16)
        monkeypatch.setattr(launch, "CAPACITY", 2200)


def settings(values: list[tuple[float, int, float, float]], **others: torch.Tensor) -> RowSettings:
    columns = list(zip(*values, strict=True))
    temperature, top_p, min_p = (
        torch.tensor(columns[i], dtype=torch.float32, device=DEVICE) for i in (0, 2, 3)
    )
    number = torch.arange(len(values), device=DEVICE)
    return RowSettings(
        temperature,
        torch.tensor(columns[1], dtype=torch.int32, device=DEVICE),
        top_p,
        min_p,
        seed_R=(number - 2) * 0x123456789ABCDEF,  # some of them with the highest bit
        position_R=number + (number << 33),
        **others,
    )


def poisoned(rows: int, vocab: int) -> Scratch:
    scratch = Scratch.allocate(rows, vocab, torch.device(DEVICE))
    for field in fields(scratch):
        buffer = getattr(scratch, field.name)
        buffer.fill_(torch.nan if buffer.is_floating_point() else -(1 << 30))
    return scratch


def choose(logits: torch.Tensor, s: RowSettings) -> torch.Tensor:
    out = torch.full((len(logits),), -1, device=DEVICE)
    launch.choose(logits.to(DEVICE), s, out_R=out, scratch=poisoned(*logits.shape))
    return out.cpu()


def sorted_draw(row: torch.Tensor, setting: tuple[float, int, float, float], uniform: float) -> int:
    """By a full sort in double precision."""
    temperature, top_k, top_p, min_p = setting
    if temperature == 0.0:
        return int(np.argmax(row.numpy()))
    scaled = (row / torch.tensor(temperature)).double().numpy()
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    weights = np.exp(scaled[order] - scaled.max())
    if top_k:
        weights[top_k:] = 0.0
    before = np.cumsum(weights) - weights
    weights[before >= float(np.float32(top_p)) * weights.sum()] = 0.0
    weights[weights < float(np.float32(min_p))] = 0.0
    return int(order[np.searchsorted(np.cumsum(weights), uniform * weights.sum(), side="right")])


def expected(logits: torch.Tensor, values: list[tuple[float, int, float, float]]) -> list[int]:
    s = settings(values)
    uniform = philox_uniform(s.seed_R.cpu(), s.position_R.cpu()).tolist()
    return [sorted_draw(*each) for each in zip(logits, values, uniform, strict=True)]


@pytest.mark.parametrize(
    ("vocab", "step"), [(1, 0.0), (63, 0.0), (65, 0.5), (1000, 0.0), (2049, 0.25), (5000, 0.0)]
)
def test_tokens_are_those_of_a_full_sort(vocab: int, step: float) -> None:
    """With a step logits are multiples of it, so that many are equal."""
    logits = torch.randn(len(SETTINGS), vocab) * 3
    if step:
        logits = (logits / step).round() * step
    assert choose(logits, settings(SETTINGS)).tolist() == expected(logits, SETTINGS)


def test_equal_logits_are_ordered_by_id() -> None:
    """Also where zero has either sign, and where the ends of prefixes lie between equals."""
    logits = torch.zeros(4, 70)
    logits[0, ::2] = -0.0
    logits[3, 5:] = -1.0
    values = [(1.0, 6, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 0, 1.0, 0.0), (2.0, 0, 1.0, 0.7)]
    s = settings(values)
    last = torch.full((4,), 1.0 - 2.0**-53, dtype=torch.float64, device=DEVICE)
    assert launch.choose(logits.to(DEVICE), s, uniform_R=last).tolist() == [5, 34, 69, 4]
    first = torch.zeros_like(last)
    assert launch.choose(logits.to(DEVICE), s, uniform_R=first).tolist() == [0, 0, 0, 0]


def test_more_equal_logits_than_a_list_holds() -> None:
    vocab = launch.CAPACITY + 1500
    values = [(1.0, 0, 1.0, 0.0), (1.0, vocab - 9, 1.0, 0.0)]
    logits = torch.full((2, vocab), -3.0)
    uniform = torch.tensor([0.75, 1.0 - 2.0**-53], dtype=torch.float64, device=DEVICE)
    found = launch.choose(logits.to(DEVICE), settings(values), uniform_R=uniform)
    assert found.tolist() == [vocab * 3 // 4, vocab - 10]


def test_draws_follow_the_distribution() -> None:
    row = torch.tensor([1.0, -0.5, 0.25, 2.0, -torch.inf, 0.0, 1.5, -1.0, 0.75])
    s = settings([(1.25, 7, 0.97, 0.0)] * DRAWS)
    s = replace(s, seed_R=torch.full_like(s.seed_R, 11), position_R=torch.arange(DRAWS).to(DEVICE))
    found = np.bincount(choose(row.expand(DRAWS, -1), s).numpy(), minlength=9)
    weights = np.exp(row.double().numpy() / 1.25)
    order = np.argsort(-weights)
    weights[order[7:]] = 0.0
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= 0.97 * weights.sum()]] = 0.0
    probability = weights / weights.sum()
    kept = probability > 0
    assert not found[~kept].any()
    wanted = probability[kept] * DRAWS
    chi2 = ((found[kept] - wanted) ** 2 / wanted).sum()
    assert chi2 < 22.5  # above the 99.9 % quantile of chi-square with 6 degrees of freedom


def adjustments(rows: int, vocab: int) -> dict[str, torch.Tensor]:
    words = -(-vocab // 32)
    history = torch.randint(0, 2, (3, vocab)) * IN_PROMPT
    history += torch.randint(-2, 4, (3, vocab)).clamp_min(0) * OCCURRENCE
    made = {
        "slot_R": torch.tensor([0, 2, -1, 99, 1][:rows], dtype=torch.int32),
        "bias_SV": torch.randn(3, vocab),
        "history_SV": history.int(),
        "repetition_R": torch.tensor([1.3, 0.7, 1.0, 2.0, 1.1][:rows]),
        "presence_R": torch.tensor([0.5, 0.0, 0.0, 1.0, -0.4][:rows]),
        "frequency_R": torch.tensor([0.2, -0.1, 0.0, 1.0, 0.0][:rows]),
        "drafts_RD": torch.randint(-1, vocab, (rows, 2), dtype=torch.int32),
        "banned_RN": torch.randint(-1, vocab, (rows, 3), dtype=torch.int32),
        "masks_MW": torch.randint(-(1 << 31), (1 << 31) - 1, (2, words), dtype=torch.int32),
        "mask_R": torch.tensor([1, -1, 7, 0, -5][:rows], dtype=torch.int32),
    }
    made["drafts_RD"][1] = made["drafts_RD"][1, :1]  # twice the same
    return {name: value.to(DEVICE) for name, value in made.items()}


def adjusted(logits: torch.Tensor, s: RowSettings, row: int) -> np.ndarray[Any, Any]:
    """By its definition in double precision, over the temperature."""
    values = {f.name: getattr(s, f.name).cpu().double().numpy() for f in fields(s)}
    x = logits[row].double().numpy().copy()
    slot, mask = int(values["slot_R"][row]), int(values["mask_R"][row])
    has_slot = 0 <= slot < 3
    if has_slot:
        x += values["bias_SV"][slot]
    x[[int(i) for i in values["banned_RN"][row] if i >= 0]] = -np.inf
    if has_slot:
        history = values["history_SV"][slot].astype(int)
        for draft in values["drafts_RD"][row]:
            if draft >= 0:
                history[int(draft)] += OCCURRENCE
        factor = values["repetition_R"][row]
        x = np.where(history > 0, np.where(x > 0, x / factor, x * factor), x)
        times = history // OCCURRENCE
        x -= values["frequency_R"][row] * times + values["presence_R"][row] * (times > 0)
    if 0 <= mask < 2:
        words = values["masks_MW"][mask].astype(np.int32).view(np.uint8)
        bits = np.unpackbits(words, bitorder="little")[: len(x)]
        x[bits == 0] = -np.inf
    scaled: np.ndarray[Any, Any] = x / values["temperature_R"][row]
    return scaled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [33, 2300])
def test_logits_are_adjusted_by_every_setting(vocab: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(5, vocab) * 4).to(dtype)
    s = settings([(0.5 + i / 4, 0, 1.0, 0.0) for i in range(5)], **adjustments(5, vocab))
    scratch = poisoned(5, vocab)
    launch.choose(logits.to(DEVICE), s, scratch=scratch)
    wanted = np.stack([adjusted(logits, s, row) for row in range(5)])
    np.testing.assert_allclose(scratch.x.cpu().numpy(), wanted, rtol=2e-6, atol=2e-6)
    best = wanted.argmax(1)
    greedy = replace(s, temperature_R=torch.zeros_like(s.temperature_R))
    assert choose(logits, greedy).tolist() == best.tolist()


def test_a_mask_overrules_what_leaves_nothing() -> None:
    logits = torch.full((3, 2100), -torch.inf)
    logits[:, 3] = 1.0
    masks = torch.zeros(1, 66, dtype=torch.int32, device=DEVICE)
    masks[0, 1], masks[0, 65] = 1 << 5, 1 << 2  # tokens 37 and 2082
    s = settings(
        [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0)],
        masks_MW=masks,
        mask_R=torch.zeros(3, dtype=torch.int32, device=DEVICE),
    )
    uniform = torch.tensor([0.9, 0.49, 0.51], dtype=torch.float64, device=DEVICE)
    assert launch.choose(logits.to(DEVICE), s, uniform_R=uniform).tolist() == [37, 37, 2082]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(len(SETTINGS), 4200)
    together = choose(logits, settings(SETTINGS))
    for row in (5, 8):
        s = settings(SETTINGS)
        alone = RowSettings(
            s.temperature_R[row : row + 1].clone(), s.top_k_R[row : row + 1].clone(),
            s.top_p_R[row : row + 1].clone(), s.min_p_R[row : row + 1].clone(),
            s.seed_R[row : row + 1].clone(), s.position_R[row : row + 1].clone(),
        )  # fmt: skip
        assert choose(logits[row : row + 1], alone).tolist() == together[row : row + 1].tolist()


def test_no_rows() -> None:
    s = settings(SETTINGS)
    none = RowSettings(*(getattr(s, f.name)[:0] for f in fields(s)[:6]))
    assert launch.choose(torch.empty(0, 50, device=DEVICE), none).shape == (0,)
    assert launch.greedy(torch.empty(0, 50, device=DEVICE)).shape == (0,)


@pytest.mark.parametrize("vocab", [1, 65, 4100])
def test_greedy_takes_the_lowest_id_among_equals(vocab: int) -> None:
    logits = torch.randn(3, vocab).round()
    found = launch.greedy(logits.to(DEVICE)).cpu()
    assert found.tolist() == logits.numpy().argmax(1).tolist()


@pytest.mark.parametrize(("vocab", "top"), [(7, 20), (65, 1), (4100, 5), (4100, 0)])
def test_logprobs_equal_log_softmax_in_double_precision(vocab: int, top: int) -> None:
    logits = torch.randn(3, vocab) * 4
    logits[1] = logits[1].round()
    logits[2, ::2] = -torch.inf
    tokens = torch.tensor([0, vocab - 1, vocab // 2])
    logprob, rank, ids, values = (
        x.cpu() for x in launch.token_logprobs(logits.to(DEVICE), tokens.to(DEVICE), top)
    )
    exact = torch.log_softmax(logits.double(), 1)
    own = exact.gather(1, tokens[:, None])
    torch.testing.assert_close(logprob.double()[:, None], own, rtol=0, atol=4e-6)
    assert rank.tolist() == (1 + (exact > own).sum(1)).tolist()
    order = exact.sort(dim=1, descending=True, stable=True)
    assert torch.equal(ids, order.indices[:, :top])
    torch.testing.assert_close(values.double(), order.values[:, :top], rtol=0, atol=4e-6)


def test_top_k_of_tokens_in_few_blocks_and_in_many() -> None:
    """Blocks without any of the best, all of them in one block, one in every block, more equal
    ones than are kept, and more kept than there are blocks.
    """
    vocab, values = 3 * launch.BLOCK + 70, [(1.0, k, 1.0, 0.0) for k in (3, 3, 2, 4, 5)]
    logits = torch.zeros(5, vocab)
    logits[0, [5, 7, 2049, 6200]] = torch.tensor([2.0, 3.0, 4.0, 1.0])
    logits[1, 4100:4104] = torch.arange(1.0, 5.0)
    logits[2, [9, 2050, 4099, 6149]] = 2.0
    logits[4, [100, 4100]] = 1.0
    s = settings(values)
    last = torch.full((5,), 1.0 - 2.0**-53, dtype=torch.float64, device=DEVICE)
    found = launch.choose(logits.to(DEVICE), s, uniform_R=last).tolist()
    assert found == [5, 4101, 2050, 3, 2]
    found = launch.choose(logits.to(DEVICE), s, uniform_R=torch.zeros_like(last)).tolist()
    assert found == [2049, 4103, 9, 0, 100]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [129280, 248320])
def test_replays_of_a_graph_follow_their_inputs(vocab: int) -> None:
    rows = len(SETTINGS)
    s, scratch = settings(SETTINGS), poisoned(rows, vocab)
    logits = torch.zeros(rows, vocab, device=DEVICE)
    out = torch.full((rows,), -1, device=DEVICE)
    launch.choose(logits, s, out_R=out, scratch=scratch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.choose(logits, s, out_R=out, scratch=scratch)
    for turn in range(4):
        values = torch.randn(rows, vocab) * (1 + 2 * turn)
        logits.copy_(values)
        s.position_R.add_(1)
        graph.replay()
        uniform = philox_uniform(s.seed_R.cpu(), s.position_R.cpu()).tolist()
        wanted = [sorted_draw(*each) for each in zip(values, SETTINGS, uniform, strict=True)]
        assert out.tolist() == wanted
