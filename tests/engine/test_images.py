"""Images through the core: outputs, prefix hits, whole spans, what is kept and for how long."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace

import pytest
import torch
from warhorse.v1.common_pb2 import ErrorReason

from services.engine.cache.spec import CacheGroup
from services.engine.core import EngineCore
from services.engine.images import ImageSpan, ImageStore
from services.engine.runtime.image_rows import ImageRows, Part
from services.engine.scheduler.messages import Request, RequestRefused, RequestSampling
from services.engine.scheduler.plan import SequenceId
from tests.engine.driver import Bench, Log, config, request, run
from tests.engine.test_core import prompt
from tests.engine.toy_model import ALL_GROUPS, UNIT, ToyModel, paged, window
from tests.engine.toy_vision import Page, ToyVision, ToyVisionModel, picture

GROUPS = [ALL_GROUPS, (paged(8),), (paged(4), window(4))]
NAMES = ["all", "paged", "paged and window"]


def ask(page: Page, request_id: str = "a", max_tokens: int = 8, **changes: object) -> Request:
    return replace(request(request_id, page.tokens, max_tokens), images=page.images, **changes)


def serve(core: EngineCore, page: Page, request_id: str, **changes: object) -> Log:
    core.submit(ask(page, request_id, **changes), page.pixels)
    return run(core)


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("budget", [40, 41, 64, 1000])
@pytest.mark.parametrize("groups", GROUPS, ids=NAMES)
def test_output_equals_the_reference_however_the_prompt_is_cut(
    bench: Bench, groups: tuple[CacheGroup, ...], budget: int, atomic: bool
) -> None:
    page = Page.of(prompt(13), picture(5, 8, 1), prompt(30), picture(4, 6, 2), prompt(9))
    model = ToyVisionModel(groups, atomic=atomic)
    core = bench.core(model, config(max_num_batched_tokens=budget))
    assert serve(core, page, "a").tokens("a") == page.greedy(8, groups)
    assert model.vision.encoded == [(5, 8), (4, 6)]


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("groups", GROUPS, ids=NAMES)
def test_pictures_that_differ_in_one_pixel_share_the_text_before_them_alone(
    bench: Bench, groups: tuple[CacheGroup, ...], atomic: bool
) -> None:
    first = picture(5, 8)
    other = first.copy()
    other[4, 7, 0] ^= 1
    settings = config(prefix_cache_retention_interval=UNIT)
    core = bench.core(ToyVisionModel(groups, atomic=atomic), settings)
    pages = [Page.of(prompt(50), image, prompt(40)) for image in (first, other, first)]
    logs = [serve(core, page, str(number)) for number, page in enumerate(pages)]
    for number, (page, log) in enumerate(zip(pages, logs, strict=True)):
        assert log.tokens(str(number)) == page.greedy(8, groups)
    cached = [log.prompts[str(n)].cached for n, log in enumerate(logs)]
    assert cached == [0, 48, 128]


def test_a_picture_at_another_place_is_another_prefix(bench: Bench) -> None:
    core = bench.core(ToyVisionModel((paged(8),)))
    image = picture(4, 8)
    pages = [Page.of(image, [3] * 32, prompt(20)), Page.of([3] * 32, image, prompt(20))]
    for number, page in enumerate(pages):
        log = serve(core, page, str(number))
        assert log.tokens(str(number)) == page.greedy(8, (paged(8),))
        assert log.prompts[str(number)].cached == 0


def test_hits_of_whole_images_end_at_no_place_inside_one(bench: Bench) -> None:
    """The prompt of the first request ends inside what is an image for the second's model."""
    core = bench.core(ToyVisionModel((paged(8),), atomic=True))
    image = picture(8, 8)  # tokens 40 to 104; units end at 48, 64, 80 and 96
    page = Page.of(prompt(40), image, prompt(1))
    assert serve(core, page, "a").prompts["a"].cached == 0
    again = serve(core, page, "b")
    assert again.prompts["b"].cached == 32
    longer = Page.of(prompt(40), image, prompt(1), prompt(30))
    assert serve(core, longer, "c").prompts["c"].cached == 32
    assert serve(core, longer, "d").prompts["d"].cached == 128
    assert again.tokens("b") == page.greedy(8, (paged(8),))


@pytest.mark.parametrize("atomic", [False, True])
def test_a_crowd_short_of_memory_gets_the_reference_output(bench: Bench, atomic: bool) -> None:
    """Chunks, choices, hits and preemptions, with images of all sizes among them."""
    rng = random.Random(11)
    model = ToyVisionModel(atomic=atomic)
    settings = config(
        max_model_len=200, num_kv_tokens=320, max_num_seqs=4, state_slots=10,
        max_num_batched_tokens=48,
    )  # fmt: skip
    core = bench.core(model, settings)
    shared = picture(6, 6, seed=99)
    pages = {}
    for number in range(14):
        own = picture(rng.randint(1, 6), rng.randint(1, 6), seed=number)
        text = [prompt(rng.randint(1, 40), seed=number % 3) for _ in range(3)]
        page = Page.of(text[0], shared, text[1], own, text[2])
        pages[str(number)] = page
        core.submit(ask(page, str(number), 24, priority=number % 2), page.pixels)
    log = run(core)
    assert core.load().preemptions > 0
    for request_id, page in pages.items():
        assert log.tokens(request_id) == page.greedy(24), request_id


def test_choices_of_one_request_share_its_pictures(bench: Bench) -> None:
    page = Page.of(prompt(20), picture(5, 8), prompt(3))
    model = ToyVisionModel()
    core = bench.core(model)
    hot = RequestSampling(temperature=1e-9, seed=3)
    log = serve(core, page, "a", n=3, sampling=hot)
    assert [len(log.tokens("a", choice)) for choice in range(3)] == [8, 8, 8]
    assert len(model.vision.encoded) <= 2  # by the first choice, and at most once for the others


def test_prompt_logprobs_do_not_cut_an_image(bench: Bench) -> None:
    page = Page.of(prompt(10), picture(5, 8), prompt(10))
    core = bench.core(ToyVisionModel(atomic=True), config(prompt_logprobs_chunk=16))
    log = serve(core, page, "a", prompt_logprobs=0)
    assert len(log.prompts["a"].prompt_logprobs) == len(page.tokens) - 1


def test_pixels_are_kept_as_long_as_a_request_needs_them(bench: Bench) -> None:
    core = bench.core(ToyVisionModel())
    pages = [Page.of(prompt(9), picture(3, 3, seed=7), prompt(9)) for _ in range(2)]
    held = weakref.ref(next(iter(pages[0].pixels.values())))
    for name, page, tokens in zip("ab", pages, (3, 30), strict=True):
        core.submit(ask(page, name, tokens), page.pixels)
    del pages, page
    log = Log()
    while not any(c.finished for c in log.choices.values()):
        log.add(core.step())
    gc.collect()
    assert held() is not None, "the other request still needs them"
    run(core, log=log)
    gc.collect()
    assert held() is None


REFUSED = [
    (ImageSpan(4, 12, b"d", 3, 3), r"images\[0\] covers 12 tokens and must cover 9, for 3 x 3"),
    (ImageSpan(4, 9, b"d", 9, 30), r"images\[0\] cannot be taken: 9 x 30 pixels, at most 20"),
    (ImageSpan(92, 9, b"d", 3, 3), r"images\[0\] covers tokens 92 to 101 .* of 0 to 100"),
    (ImageSpan(4, 66, b"d", 6, 11), r"images\[0\] has 66 tokens, .* at most 64 .*batched_tokens"),
]


@pytest.mark.parametrize(("span", "message"), REFUSED)
def test_an_image_that_does_not_fit_is_refused(bench: Bench, span: ImageSpan, message: str) -> None:
    core = bench.core(ToyVisionModel(atomic=True), config(max_num_batched_tokens=64))
    with pytest.raises(RequestRefused, match=message) as refused:
        core.submit(replace(request("a", prompt(100)), images=(span,)))
    assert refused.value.reason == ErrorReason.ERROR_REASON_INVALID_FIELD
    assert refused.value.field == "images[0]"
    assert not core.has_work


def test_images_on_top_of_each_other_are_refused(bench: Bench) -> None:
    core = bench.core(ToyVisionModel())
    spans = (ImageSpan(4, 9, b"d", 3, 3), ImageSpan(12, 9, b"e", 3, 3))
    with pytest.raises(RequestRefused, match=r"images\[1\] covers tokens 12 to 21 .* of 13 to"):
        core.submit(replace(request("a", prompt(100)), images=spans))


def test_a_model_without_a_tower_takes_no_images(bench: Bench) -> None:
    span = ImageSpan(4, 9, b"d", 3, 3)
    with pytest.raises(RequestRefused, match="this model takes no images") as refused:
        bench.core(ToyModel()).submit(replace(request("a", prompt(100)), images=(span,)))
    assert refused.value.reason == ErrorReason.ERROR_REASON_UNSUPPORTED


def rows_with(page: Page, *sequences: int) -> tuple[ImageRows, ToyVision]:
    vision, store = ToyVision(False), ImageStore()
    store.hold("r", page.pixels)
    rows = ImageRows(vision, store, torch.device("cpu"))
    for sequence in sequences:
        rows.begin(SequenceId(sequence), page.images)
    return rows, vision


def test_an_embedding_lives_until_every_sequence_is_past_its_image() -> None:
    page = Page.of([1] * 4, picture(2, 5), [1] * 6)  # tokens 4 to 14
    rows, vision = rows_with(page, 1, 2)
    one, two = SequenceId(1), SequenceId(2)
    assert rows.inputs([Part(one, 0, 4)]).images is None and not vision.encoded
    batch = rows.inputs([Part(one, 4, 3), Part(two, 0, 6)]).images
    assert batch is not None and batch.rows_R.tolist() == [0, 1, 2, 7, 8]
    assert batch.span_first_T.tolist() == [4, 4, 4, 0, 1, 2, 3, 4, 4]
    assert batch.span_last_T.tolist() == [13, 13, 13, 0, 1, 2, 3, 13, 13]
    rows.inputs([Part(one, 7, 13)])
    assert len(rows) == 1, "sequence 2 still needs it"
    rows.inputs([Part(two, 6, 8)])
    assert (len(rows), len(vision.encoded)) == (0, 1)
    assert rows.inputs([Part(two, 14, 2), Part(SequenceId(9), 0, 5)]).images is None


def test_an_embedding_goes_with_the_last_sequence_that_waits_for_it() -> None:
    rows, vision = rows_with(Page.of(picture(2, 5)), 1, 2)
    rows.inputs([Part(SequenceId(1), 0, 5)])
    rows.end(SequenceId(1))
    assert len(rows) == 1
    rows.begin(SequenceId(2), ())
    assert (len(rows), len(vision.encoded)) == (0, 1)
