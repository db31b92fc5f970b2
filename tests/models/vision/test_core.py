"""Images of every family through the engine's core: any budget and any hit give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.common.checkpoint import Checkpoint
from services.common.images import image_digest
from services.engine.cache.sizing import least_unit
from services.engine.checkpoints.local_table import local_tables
from services.engine.checkpoints.nano.deepseek_v4 import build_nano as build_v4
from services.engine.checkpoints.nano.glm import build_nano as build_glm
from services.engine.config import CoreConfig
from services.engine.core import EngineCore
from services.engine.images import ImageSpan, Pixels
from services.engine.models.registry import load_model
from services.engine.runtime.tables_api import TableSource
from services.engine.scheduler.messages import (
    PromptDone,
    Request,
    RequestSampling,
    RequestStopping,
    TokensOut,
)
from services.engine.scheduler.plan import Logprob
from tests.models.tiny import save_tiny
from tests.models.vision.towers import picture

GOLDENS = Path(__file__).parents[2] / "goldens" / "deepseek_v41"
# Folder of the checkpoint, id of a placeholder, and the sides of a picture in pixels.
FAMILIES: dict[str, tuple[Callable[[Path], Path], int, tuple[int, int]]] = {
    "deepseek_v4": (lambda folder: build_v4(folder / "v4", "vision"), 491, (98, 112)),
    "deepseek_v41": (lambda _: GOLDENS, 500, (98, 112)),
    "glm5_next": (lambda folder: build_glm(folder / "glm", "fp8"), 500, (84, 112)),
    "qwen3_5": (lambda folder: save_tiny(folder, "qwen3_5", "fp32").folder, 500, (96, 128)),
    "qwen4_exp": (lambda folder: save_tiny(folder, "qwen4_exp", "fp32").folder, 500, (96, 128)),
}
GREEDY = RequestSampling(temperature=0.0, seed=0)


class Served:
    """One model and a prompt with two pictures."""

    def __init__(self, name: str, folder: Path) -> None:
        build, self.placeholder, (height, width) = FAMILIES[name]
        path = build(folder)
        self.model: Any = load_model(path, device=torch.device("cpu"), compute_dtype=torch.float32)
        self.tables: TableSource | None = None
        if self.model.ngrams:
            self.tables = local_tables(Checkpoint.open(path))
        self.pictures = [picture(height, width, seed).numpy() for seed in (1, 2)]
        self.unit = least_unit(self.model.groups, 64)

    def core(self, budget: int) -> EngineCore:
        config = CoreConfig(
            max_model_len=256,
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            unit_tokens=self.unit,
            debug_poison=True,
            debug_checks=True,
        )
        return EngineCore(self.model, config, self.tables)

    def request(
        self, request_id: str, pictures: list[Pixels], **changes: Any
    ) -> tuple[Request, dict[bytes, Pixels]]:
        """Text, picture, text, picture, text."""
        ids: list[int] = []
        spans = []
        for number, pixels in enumerate(pictures):
            ids += _text(9 + 8 * number, number)
            height, width, _ = pixels.shape
            length = self.model.vision.span_tokens(height, width, len(ids))
            spans.append(ImageSpan(len(ids), length, image_digest(pixels), height, width))
            ids += [self.placeholder] * length
        ids += _text(150 - len(ids), 7)
        settings = {"sampling": GREEDY, "logprobs": 5, "images": tuple(spans)} | changes
        asked = Request(request_id, tuple(ids), RequestStopping(max_tokens=4), **settings)
        return asked, {image_digest(p): p for p in pictures}


def _text(count: int, seed: int) -> list[int]:
    return torch.randint(8, 480, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp(request.param))


def run(core: EngineCore) -> dict[str, tuple[list[int], list[Logprob], list[Logprob], int]]:
    """Tokens, their log-probabilities, those of the prompt, and the cached tokens, by request."""
    tokens: dict[str, list[int]] = {}
    logprobs: dict[str, list[Logprob]] = {}
    prompts: dict[str, PromptDone] = {}
    while core.has_work:
        for event in core.step():
            if isinstance(event, TokensOut):
                tokens.setdefault(event.request_id, []).extend(event.tokens)
                logprobs.setdefault(event.request_id, []).extend(event.logprobs)
            elif isinstance(event, PromptDone):
                prompts[event.request_id] = event
    return {
        name: (tokens[name], logprobs[name], list(done.prompt_logprobs), done.cached)
        for name, done in prompts.items()
    }


def test_any_budget_and_any_neighbour_give_the_same_bits(served: Served) -> None:
    results = []
    for budget in (512, 40, 33):
        core = served.core(budget)
        for name in ("a", "b") if budget == 40 else ("a",):
            core.submit(*served.request(name, served.pictures, prompt_logprobs=3))
        found = run(core)
        results += list(found.values())
    assert len(results) == 4 and len(results[0][2]) == 149
    assert all(result[:3] == results[0][:3] for result in results)


def test_a_hit_gives_the_bits_of_the_cold_run_and_other_pixels_do_not(served: Served) -> None:
    core, cold, found = served.core(48), served.core(48), {}
    changed = served.pictures[1].copy()
    changed[-1, -1] ^= 128
    for name, second in (("first", 1), ("again", 1), ("other", 2)):
        pictures = [served.pictures[0], changed if second == 2 else served.pictures[1]]
        core.submit(*served.request(name, pictures))
        found |= run(core)
    cold.submit(*served.request("other", [served.pictures[0], changed]))
    fresh = run(cold)["other"]
    assert found["first"][3] == 0 and found["again"][3] >= 128
    assert found["again"][:2] == found["first"][:2]
    first_image_end = served.request("x", served.pictures)[0].images[1].offset
    assert found["other"][3] <= first_image_end
    assert found["other"][:2] == fresh[:2] != found["first"][:2]
