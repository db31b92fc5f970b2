"""Images in DeepSeek prompts through the running service, whose renderer has no template."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from tokenizers import AddedToken, Tokenizer
from warhorse.v1 import tokenizer_pb2, tokenizer_pb2_grpc

from services.tokenizer.images.deepseek import Role
from services.tokenizer.rendering.deepseek import ASSISTANT, BOS, EOS, SYSTEM, USER
from services.tokenizer.wire import unpack_ids
from tests.service_process import RunDir, ServiceProcess
from tests.tokenizer.calls import Stub, message, render
from tests.tokenizer.conftest import SERVICE, write_folder
from tests.tokenizer.support import reference
from tests.tokenizer.test_images import image, picture_url, said, text

VOCAB = 700
FIRST = VOCAB - 23
IMAGE_ID = VOCAB - 16
CONFIGS = {
    "deepseek_v4": {
        "model_type": "deepseek_v4",
        "vocab_size": VOCAB,
        "vision_n_layers": 2,
        "vision_patch_size": 14,
        "vision_downsample_ratio": 3,
        "vision_max_n_token": 64,
        "vision_min_pixels": 7056,
        "vision_max_wh_ratio": 8,
    },
    "deepseek_v41": {
        "model_type": "deepseek_v41",
        "image_token_id": IMAGE_ID,
        "text_config": {"vocab_size": VOCAB},
        "vision_config": {
            "patch_size": 14,
            "downsample_ratio": 3,
            "max_image_tokens": 64,
            "min_pixels": 7056,
            "max_wh_ratio": None,
        },
    },
}


@pytest.fixture(scope="module", params=CONFIGS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def deepseek(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    tokenizer = Tokenizer.from_str(reference().to_str())
    marks = (BOS, EOS, USER, ASSISTANT, SYSTEM, "｜DSML｜")
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    files = {"config.json": CONFIGS[family], "tokenizer.json": tokenizer.to_str()}
    folder = write_folder(tmp_path_factory.mktemp(family), **files)
    run = RunDir()
    service = ServiceProcess("tokenizer", SERVICE, run.path, ["--model", str(folder)])
    service.start()
    with grpc.insecure_channel(service.address) as channel:
        yield tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    assert service.stop() == 0
    run.close()


def test_images_of_users_and_tools_fill_their_places(deepseek: Stub, family: str) -> None:
    calls = [tokenizer_pb2.ToolCall(id=i, name="get", arguments="{}") for i in ("c1", "c2")]
    history = [
        said("user", text("look"), image(picture_url(84, 126, 1)), text("and fetch")),
        tokenizer_pb2.ChatMessage(role="assistant", tool_calls=calls),
        said("tool", image(picture_url(126, 126, 3)), tool_call_id="c2"),
        said("tool", image(picture_url(84, 210, 2)), tool_call_id="c1"),
        message("user", "compare"),
    ]
    answer = render(deepseek, *history)
    ids = list(unpack_ids(answer.token_ids, "token_ids"))
    sizes = [tuple(one.pixels.shape)[:2] for one in answer.images]
    assert sizes == [(84, 126), (84, 210), (126, 126)]
    grids = [(height // 42, width // 42) for height, width in sizes]
    covered: list[int] = []
    for one, (rows, columns) in zip(answer.images, grids, strict=True):
        span = ids[one.offset : one.offset + one.length]
        covered += span
        if family == "deepseek_v41":
            assert span == [IMAGE_ID] * (rows * (columns + 1) + 2)
            continue
        roles = [token - FIRST for token in span]
        start = roles.index(Role.START)
        assert (one.offset + start) % 4 == 3 and start <= 3
        assert roles[:start] == [Role.PAD] * start and roles[-1] == Role.END
        assert roles.count(Role.IMAGE) == rows * columns and roles.count(Role.NEWLINE) == rows
        assert (one.offset + one.length) % 4 == 1
    image_ids = {*range(FIRST, FIRST + 5), IMAGE_ID}
    assert sum(token in image_ids for token in ids) == len(covered)
