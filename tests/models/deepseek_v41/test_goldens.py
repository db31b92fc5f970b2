"""Logits of the release's own code for the golden model: one-shot, stepwise, batched, quantised."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.engine.models.stage import Stage
from services.engine.runtime.tables_api import TableSource
from tests.models.deepseek_v41.conftest import (
    Cases,
    ImageRunner,
    assert_rows_near,
    golden,
    image_values,
)
from tests.models.runner import Live, Part, Runner

TOLERANCE = 1e-4  # absolute, fp32 logits of std 3; 2e-5 was seen
TEXT_CASES = (
    "one",
    "short5",
    "win16",
    "win17",
    "len33",
    "long75",
    "long150",
    "ngram64",
    "text40",
    "tiny_embed",
)
KV_CASES = ("one", "short5", "len33", "ngram64", "text40", "tiny_embed")


@pytest.fixture(scope="module")
def logits() -> dict[str, torch.Tensor]:
    return golden("logits_exact")


def image_runner(model: Stage[Any], tables: TableSource, cases: Cases) -> ImageRunner:
    """The case's image, from its patches through the model's own tower."""
    values = image_values(model, golden("activations_exact")["image.patches"], cases)
    return ImageRunner([model], tables, cases.image_start, values)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", TEXT_CASES)
def test_one_shot_logits(
    runner: Runner, cases: Cases, logits: dict[str, torch.Tensor], case: str
) -> None:
    ids = cases.prompts[case]
    assert_near(runner.run(ids, len(ids)), logits[f"{case}.prefill_logits"])


@pytest.mark.parametrize("case", ["short5", "long75"])
def test_token_by_token_logits(
    runner: Runner, cases: Cases, logits: dict[str, torch.Tensor], case: str
) -> None:
    """Where the release scores against another layer's keys, the numbers are the corrected ones."""
    ids, start = cases.prompts[case], cases.decode[case]
    live = Live()
    runner.step([Part(live, ids[:start])])
    rows = [runner.step([Part(live, [token])])[0][0] for token in ids[start:]]
    assert_near(torch.cat(rows), logits[f"{case}.decode_from{start}_logits"])


def test_cases_in_one_batch_equal_their_own_runs(
    runner: Runner, cases: Cases, logits: dict[str, torch.Tensor]
) -> None:
    parts = [Part(Live(), cases.prompts[name]) for name in cases.together]
    for name, found in zip(cases.together, runner.step(parts)[0], strict=True):
        assert_near(found, logits[f"{name}.prefill_logits"])


@pytest.mark.parametrize("chunk", [39, 7])
def test_image_logits(
    exact: Any, tables: TableSource, cases: Cases, logits: dict[str, torch.Tensor], chunk: int
) -> None:
    """Images choose experts with their own bias, pass Engram by and cut its n-grams."""
    ids = cases.prompts["image"]
    found = image_runner(exact, tables, cases).run(ids, chunk)
    assert_near(found, logits["image.prefill_logits"])


def test_token_by_token_logits_after_an_image(
    exact: Any, tables: TableSource, cases: Cases, logits: dict[str, torch.Tensor]
) -> None:
    ids, start = cases.prompts["image"], cases.decode["image"]
    runner, live = image_runner(exact, tables, cases), Live()
    runner.step([Part(live, ids[:start])])
    rows = [runner.step([Part(live, [token])])[0][0] for token in ids[start:]]
    assert_near(torch.cat(rows), logits[f"image.decode_from{start}_logits"])


@pytest.mark.parametrize("case", KV_CASES)
def test_quantised_cache_logits(
    quantised: Any, tables: TableSource, cases: Cases, case: str
) -> None:
    ids = cases.prompts[case]
    found = Runner([quantised], tables).run(ids, len(ids))
    expected = golden("logits_kv")[f"{case}.prefill_logits"]
    assert_rows_near(found, expected, 1e-3)
    assert torch.equal(found.argmax(1), expected.argmax(1))


def test_quantised_cache_logits_with_an_image(
    quantised: Any, tables: TableSource, cases: Cases
) -> None:
    found = image_runner(quantised, tables, cases).run(cases.prompts["image"], 13)
    expected = golden("logits_kv")["image.prefill_logits"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
