"""The benchmark of sampling: the largest served vocabulary, one row and a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.bench.case import Case, Work
from kernels.sampling import chosen, launch, reference
from kernels.sampling.launch import Scratch
from kernels.sampling.settings import IN_PROMPT, OCCURRENCE, RowSettings

VOCAB = 248320
SETS = 4
TOP = 20
LOGPROB_ERROR = 4e-6
NO_ROW = 0.5  # fewer than one row may differ
SPREAD = 3.0  # standard deviation of the logits


def cases() -> Iterator[Case]:
    for rows in (1, 16):
        name = f"{rows} x {VOCAB}"
        made = partial(choosing, rows, VOCAB, "cuda")
        yield Case("sampling", f"top-k 50 top-p 0.95 penalties {name}", partial(made, 50, 0.95))
        yield Case("sampling", f"top-p 0.9 {name}", partial(made, 0, 0.9, penalties=False))
        peers: dict[str, Callable[[], Work | None]] = {
            "library": partial(best, rows, VOCAB, "cuda", library=True)
        }
        yield Case("sampling", f"greedy {name}", partial(best, rows, VOCAB, "cuda"), peers)
    yield Case("sampling", f"logprobs top {TOP} 16 x {VOCAB}", partial(scored, 16, VOCAB, "cuda"))


def choosing(
    rows: int, vocab: int, device: str, top_k: int, top_p: float, *, penalties: bool = True
) -> Work:
    """Three launches; wrong where a row's token is not that of a full sort."""
    inputs = random_logits(rows, vocab, device)
    settings = row_settings(rows, vocab, device, top_k, top_p, penalties=penalties)
    scratch = Scratch.allocate(rows, vocab, inputs[0].device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    calls = [partial(launch.choose, x, settings, out_R=out, scratch=scratch) for x in inputs]

    def error() -> float:
        out.fill_(-1)
        calls[0]()
        return float((out != chosen.choose(inputs[0], settings)).sum())

    return Work(calls, error, NO_ROW, 4.0 * rows * vocab * (2 if penalties else 1), 0.0)


def random_logits(rows: int, vocab: int, device: str) -> list[torch.Tensor]:
    return [SPREAD * torch.randn(rows, vocab, device=device) for _ in range(SETS)]


def row_settings(
    rows: int, vocab: int, device: str, top_k: int, top_p: float, *, penalties: bool
) -> RowSettings:
    def full(value: float) -> torch.Tensor:
        return torch.full((rows,), value, device=device)

    numbers = torch.arange(rows, device=device)
    plain = RowSettings(
        full(0.8), full(top_k).int(), full(top_p), full(0.0), numbers, 1000 + numbers
    )
    if not penalties:
        return plain
    seen = torch.rand(rows, vocab, device=device)
    history = (seen < 0.01) * IN_PROMPT + (seen < 0.002) * OCCURRENCE
    return RowSettings(
        plain.temperature_R, plain.top_k_R, plain.top_p_R, plain.min_p_R, plain.seed_R,
        plain.position_R, slot_R=numbers.int(), history_SV=history.int(), repetition_R=full(1.1),
        presence_R=full(0.3), frequency_R=full(0.2),
    )  # fmt: skip


def best(rows: int, vocab: int, device: str, *, library: bool = False) -> Work:
    inputs = random_logits(rows, vocab, device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    one = partial(torch.argmax, dim=1, out=out) if library else partial(launch.greedy, out_R=out)
    calls = [partial(one, x) for x in inputs]

    def error() -> float:
        out.fill_(-1)
        calls[0]()
        return float((out != inputs[0].double().argmax(1)).sum())

    return Work(calls, error, NO_ROW, 4.0 * rows * vocab, 0.0)


def scored(rows: int, vocab: int, device: str) -> Work:
    """Of random tokens; the largest difference of a log-probability."""
    inputs = random_logits(rows, vocab, device)
    tokens = torch.randint(0, vocab, (rows,), device=device)
    calls = [partial(launch.token_logprobs, x, tokens, TOP) for x in inputs]

    def error() -> float:
        found = calls[0]()
        wanted = reference.token_logprobs(inputs[0], tokens, TOP)
        if not all(torch.equal(found[i], wanted[i]) for i in (1, 2)):
            return float("inf")
        differences = (found[i].double() - wanted[i].double() for i in (0, 3))
        return float(max(d.abs().amax() for d in differences))

    return Work(calls, error, LOGPROB_ERROR, 4.0 * rows * vocab, 0.0)
