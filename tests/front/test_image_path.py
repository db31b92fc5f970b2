"""Images from a GenerateRequest to tokens: validation, regions, digests, the core's loop."""

from __future__ import annotations

import contextlib
import gc
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from warhorse.v1 import engine_pb2 as pb
from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.stage_pb2 import CoreCommand, CoreEvent, CoreRefusal, CoreStop, CoreSubmit
from warhorse.v1.tensor_pb2 import Dtype
from warhorse.v1.tokenizer_pb2 import ImageInput

from services.common.broker import RegionBroker
from services.common.images import image_digest
from services.common.ring import Ring
from services.common.shm import Region, region_counts
from services.engine.config import CoreConfig
from services.engine.core import EngineCore
from services.engine.core_loop import CoreLoop
from services.engine.image_opening import ImageOpener
from services.engine.images import Pixels
from services.engine.models.registry import load_model
from services.engine.requests import RequestLimits, validate
from tests.front.helpers import failure_of, make_request, read_all, tokens_of
from tests.front.process import running_engine
from tests.models.tiny import TinyCheckpoint, prompt, save_tiny
from tests.models.vision.towers import picture

IMAGE = 500  # image_token_id of the tiny checkpoint
BEFORE, BEHIND = 9, 14  # text tokens around the image
HEIGHT, WIDTH = 64, 96
TOKENS = 6
OUTPUT = 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return save_tiny(tmp_path_factory.mktemp("tiny"), "qwen3_5", "fp32")


@dataclass
class Loop:
    """The core's loop with its rings; commands are answered in one run."""

    core: EngineCore
    run_dir: Path

    def answers(self, *requests: pb.GenerateRequest) -> list[CoreEvent]:
        """Submit, stop when the last request has been answered, and collect what was said."""
        commands, events = Ring.create(), Ring.create()
        inbox = Ring.attach(commands.fds(), role="consumer")
        outbox = Ring.attach(events.fds(), role="producer")
        for handle, request in enumerate(requests, start=1):
            submit = CoreSubmit(handle=handle, request_id=f"r#{handle}", request=request)
            commands.send(CoreCommand(submit=submit).SerializeToString())
        commands.send(CoreCommand(stop=CoreStop()).SerializeToString())
        opener = ImageOpener(self.run_dir)
        loop = CoreLoop(self.core, inbox, outbox, pb.DescribeEngineResponse, opener.open)
        loop.run()
        while self.core.has_work:
            loop._publish(loop._step())
        said = []
        while (data := events.receive(timeout=0)) is not None:
            said.append(CoreEvent.FromString(bytes(data)))
        for ring in (inbox, outbox, commands, events):
            ring.close()
        return said


@pytest.fixture
def loop(tiny: TinyCheckpoint) -> Iterator[Loop]:
    model = load_model(tiny.folder, device=torch.device("cpu"), compute_dtype=torch.float32)
    config = CoreConfig(max_model_len=256, max_num_seqs=2, max_num_batched_tokens=32)
    run_dir = Path(tempfile.mkdtemp(prefix="wh-"))
    before = region_counts()
    yield Loop(EngineCore(model, config), run_dir)
    gc.collect()
    assert region_counts() == before, "a region stays mapped"
    shutil.rmtree(run_dir)


@pytest.fixture
def broker(loop: Loop) -> Iterator[RegionBroker]:
    made = RegionBroker(loop.run_dir / "tokenizer" / "tokenizer-0.fd", "tokenizer-0")
    yield made
    made.close()


def pixels_of(seed: int = 1) -> Pixels:
    return picture(HEIGHT, WIDTH, seed).numpy()


def described(pixels: Pixels, length: int = TOKENS) -> ImageInput:
    image = ImageInput(offset=BEFORE, length=length, digest=image_digest(pixels))
    image.pixels.dtype = Dtype.DTYPE_U8
    image.pixels.shape.extend(pixels.shape)
    return image


def inline(pixels: Pixels, length: int = TOKENS) -> ImageInput:
    image = described(pixels, length)
    image.pixels.inline = pixels.tobytes()
    return image


def shared(pixels: Pixels, broker: RegionBroker) -> tuple[ImageInput, Region]:
    region = Region.create(pixels.nbytes, owner="tokenizer-0", read_only_after=True, tag="image")
    region.view[:] = pixels.reshape(-1).data
    region.seal_read_only()
    image = described(pixels)
    image.region.CopyFrom(broker.publish(region))
    image.pixels.shm.region_id, image.pixels.shm.generation = region.region_id, region.generation
    image.pixels.shm.nbytes = pixels.nbytes
    return image, region


def ids_of() -> list[int]:
    return [*prompt(BEFORE, seed=1), *[IMAGE] * TOKENS, *prompt(BEHIND, seed=2)]


def request(image: ImageInput) -> pb.GenerateRequest:
    """As the front passes it on."""
    asked = make_request(
        ids_of(), images=[image], sampling__temperature=0.0, stopping__max_tokens=OUTPUT
    )
    validate(asked, RequestLimits((asked.model,), 512, 256, takes_images=True))
    return asked


def tokens(events: Sequence[CoreEvent], handle: int) -> list[int]:
    return [
        token
        for event in events
        for update in event.step.updates
        if update.handle == handle
        for part in update.events
        for token in part.chunk.token_ids
    ]


def refusal(events: Sequence[CoreEvent]) -> CoreRefusal:
    found = [u for e in events for u in e.step.updates if u.HasField("refusal")]
    assert len(found) == 1 and not tokens(events, found[0].handle)
    return found[0].refusal


def oracle_tokens(tiny: TinyCheckpoint, pixels: Pixels) -> list[int]:
    """Greedy tokens of `transformers`, which computes everything again for each."""
    normal = (torch.from_numpy(pixels) / 255 - 0.5) / 0.5
    cells = normal.view(2, 2, 16, 3, 2, 16, 3).permute(0, 3, 1, 4, 6, 2, 5)
    patches = cells.reshape(-1, 3, 1, 16, 16).expand(-1, -1, 2, -1, -1).flatten(1)
    ids = ids_of()
    for _ in range(OUTPUT):
        tensor = torch.tensor([ids])
        with torch.inference_mode():
            output = tiny.oracle(
                input_ids=tensor,
                mm_token_type_ids=(tensor == IMAGE).int(),
                pixel_values=patches,
                image_grid_thw=torch.tensor([[1, 4, 6]]),
            )
        ids.append(int(output.logits[0, -1].argmax()))
    return ids[-OUTPUT:]


def test_inline_and_shared_pixels_give_the_oracles_tokens(
    loop: Loop, broker: RegionBroker, tiny: TinyCheckpoint
) -> None:
    pixels = pixels_of()
    image, region = shared(pixels, broker)
    said = loop.answers(request(inline(pixels)), request(image))
    region.close()
    expected = oracle_tokens(tiny, pixels)
    assert [tokens(said, 1), tokens(said, 2)] == [expected, expected]
    other = loop.answers(request(inline(pixels_of(seed=2))))
    assert tokens(other, 1) == oracle_tokens(tiny, pixels_of(seed=2))


def test_a_region_that_is_gone_is_refused_with_a_time_to_come_again(
    loop: Loop, broker: RegionBroker
) -> None:
    image, region = shared(pixels_of(), broker)
    broker.retire(region)
    region.close()
    retired = refusal(loop.answers(request(image)))
    broker.close()
    for answer in (retired, refusal(loop.answers(request(image)))):
        assert answer.reason == ErrorReason.ERROR_REASON_STALE_GENERATION
        assert answer.field == "images[0].region" and answer.retry_after_seconds > 0
        assert "render" in answer.message and image.region.region_id not in answer.message


def test_pixels_that_do_not_have_the_digest_are_refused(loop: Loop, broker: RegionBroker) -> None:
    pixels = pixels_of()
    image, region = shared(pixels, broker)
    image.digest = image_digest(pixels_of(seed=2))
    turned = inline(np.ascontiguousarray(pixels.reshape(WIDTH, HEIGHT, 3)))
    turned.digest = image_digest(pixels)
    for wrong in (image, turned):
        answer = refusal(loop.answers(request(wrong)))
        assert answer.reason == ErrorReason.ERROR_REASON_INVALID_FIELD
        assert answer.field == "images[0].digest"
    region.close()


def test_a_span_of_another_length_than_the_image_needs_is_refused(loop: Loop) -> None:
    answer = refusal(loop.answers(request(inline(pixels_of(), length=TOKENS - 1))))
    assert answer.reason == ErrorReason.ERROR_REASON_INVALID_FIELD
    assert answer.field == "images[0]"
    assert "covers 5 tokens and must cover 6, for 64 x 96 pixels" in answer.message


async def test_a_running_engine_computes_pixels_of_another_process(tiny: TinyCheckpoint) -> None:
    pixels = pixels_of()
    async with running_engine(tiny.folder) as engine:
        broker = RegionBroker(engine.log.parent / "tokenizer" / "tokenizer-0.fd", "tokenizer-0")
        image, region = shared(pixels, broker)
        with contextlib.closing(broker), contextlib.closing(region):
            assert (await engine.describe()).model.takes_images
            events = await read_all(engine.stub.Generate(request(image), timeout=30))
            assert tokens_of(events) == oracle_tokens(tiny, pixels)
            broker.retire(region)
            error = await failure_of(engine.stub.Generate(request(image), timeout=30))
            assert error.reason == ErrorReason.ERROR_REASON_STALE_GENERATION
            assert error.field == "images[0].region" and error.retry_after is not None
