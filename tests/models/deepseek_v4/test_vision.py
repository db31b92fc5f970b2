"""Images in the language model: own router biases, windows open to both sides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from services.engine.images import ImageSpan
from services.engine.layers.deepseek.moe import Router
from services.engine.layers.vision.deepseek import DeepseekVision
from services.engine.models.base import Shard
from services.engine.runtime.batch import ImageBatch, StepBatch
from tests.models.deepseek_v4.conftest import GetNano, Model, load, prompt
from tests.models.runner import Live, Part, Runner

BEFORE, SPAN, AFTER = 30, 23, 20  # the span is longer than the window of 16
PLACEHOLDER = 523


@pytest.fixture(scope="module")
def vision(get_nano: GetNano) -> Iterator[Model]:
    yield load(get_nano("vision"))


def with_image(batch: StepBatch, values_RH: torch.Tensor, first: int) -> StepBatch:
    """The batch of one sequence from position 0 on whose image starts at `first`."""
    positions = batch.positions_T
    last = first + len(values_RH) - 1
    inside = (positions >= first) & (positions <= last)
    images = ImageBatch(
        rows_R=inside.nonzero().flatten(),
        values_RH=values_RH,
        span_first_T=torch.where(inside, first, positions),
        span_last_T=torch.where(inside, last, positions),
    )
    return replace(batch, images=images)


def ids_with_image() -> list[int]:
    return prompt(BEFORE, seed=1) + [PLACEHOLDER] * SPAN + prompt(AFTER, seed=2)


def logits(model: Model, values_RH: torch.Tensor) -> torch.Tensor:
    runner = Runner([model])
    batch, _ = runner._batch([Part(Live(), ids_with_image())])
    return model.forward(with_image(batch, values_RH, BEFORE), runner.pools[0])


@pytest.fixture
def values() -> torch.Tensor:
    return torch.randn(SPAN, 128, generator=torch.Generator().manual_seed(3))


def test_the_tower_is_loaded_and_every_tensor_of_it_counted(
    vision: Model, get_nano: GetNano
) -> None:
    assert isinstance(vision.vision, DeepseekVision) and vision.vision.atomic_spans
    with_draft = load(get_nano("vision"), Shard(first_layer=3))
    assert with_draft.vision is None
    assert (
        with_draft.weight_bytes + load(get_nano("vision"), Shard(last_layer=3)).weight_bytes
        == vision.weight_bytes
    )


def test_a_span_of_a_real_image_has_the_tokens_that_are_promised(vision: Model) -> None:
    pixels = torch.randint(0, 256, (84, 126, 3), dtype=torch.uint8)
    assert vision.vision is not None
    for offset in range(4):
        tokens = vision.vision.span_tokens(84, 126, offset)
        embedded = vision.vision.embed(pixels, offset)
        assert embedded.shape == (tokens, 128) and embedded.isfinite().all()
    span = ImageSpan(3, tokens, b"")
    assert vision.vision.rope_positions([span], 0, 10) is None


def test_every_token_of_an_image_sees_all_of_it(vision: Model, values: torch.Tensor) -> None:
    """The last row changes logits from the image's first token on, and none before."""
    changed = values.clone()
    changed[-1] += 1.0
    difference = (logits(vision, values) - logits(vision, changed)).abs().amax(1)
    assert not difference[:BEFORE].any()
    assert (difference[BEFORE : BEFORE + SPAN] > 1e-3).all()


def test_text_behind_an_image_has_its_plain_window(vision: Model) -> None:
    """Ranges of keys: a window of 16 for text, the union of window and image inside of one."""
    runner = Runner([vision])
    batch, _ = runner._batch([Part(Live(), ids_with_image())])
    batch = with_image(batch, torch.zeros(SPAN, 128), BEFORE)
    ctx = vision.context(batch, runner.pools[0])
    end = BEFORE + SPAN - 1
    for t in range(BEFORE + SPAN + AFTER):
        inside = BEFORE <= t <= end
        first = max(0, t - 15)
        assert int(ctx.first_T[t]) == (min(first, BEFORE) if inside else first)
        assert int(ctx.last_T[t]) == (end if inside else t)


def test_an_image_before_a_later_step_is_still_seen(vision: Model, values: torch.Tensor) -> None:
    """Text behind the image in further steps equals the one-shot run, bit for bit."""
    runner, live, ids = Runner([vision]), Live(), ids_with_image()
    cut = BEFORE + SPAN + 3
    whole = logits(vision, values)
    batch, _ = runner._batch([Part(live, ids[:cut])])
    first = vision.forward(with_image(batch, values, BEFORE), runner.pools[0])
    live.ids = ids[:cut]
    rest = [runner.step([Part(live, ids[i : i + 4])])[0][0] for i in range(cut, len(ids), 4)]
    assert torch.equal(torch.cat([first, *rest]), whole)


def routers(model: Model) -> list[Router]:
    return [layer.ffn.router for layer in model.weights.parts.layers]  # type: ignore[attr-defined]


def test_tokens_of_images_are_routed_by_their_own_bias_on_every_layer(
    vision: Model, values: torch.Tensor
) -> None:
    runner = Runner([vision])
    batch, _ = runner._batch([Part(Live(), ids_with_image())])
    ctx = vision.context(with_image(batch, values, BEFORE), runner.pools[0])
    x = torch.randn(len(ids_with_image()), 128)
    image = torch.zeros(len(x), dtype=torch.bool)
    image[BEFORE : BEFORE + SPAN] = True
    hashed = 0
    for router in routers(vision):
        scores = torch.nn.functional.softplus(x @ router.gate.weight.data.float().T).sqrt()
        biased = torch.where(image[:, None], router.image_bias_E, router.bias_E) + scores
        wanted = biased.topk(2).indices
        if router.experts_Vk is not None:
            hashed += 1
            by_id = router.experts_Vk[torch.tensor(ids_with_image())]
            wanted = torch.where(image[:, None], wanted, by_id)
        ids, weights = router(x, ctx)
        assert torch.equal(ids.sort(1).values, wanted.sort(1).values)
        chosen = scores.gather(1, ids)
        expected = chosen / chosen.sum(1, keepdim=True) * 1.5
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert hashed == 3


def test_steps_without_images_are_those_of_the_text_model(vision: Model) -> None:
    """Chunked or not, as for the other variants; its epsilon is 1e-20."""
    ids, runner = prompt(60, seed=8), Runner([vision])
    assert torch.equal(runner.run(ids, 7), runner.run(ids, 60))
