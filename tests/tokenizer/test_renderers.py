"""Which renderer a checkpoint gets, and what is found wrong at the start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from warhorse.v1 import tokenizer_pb2

from services.common.errors import ServiceError, StartupError
from services.tokenizer.folder import TokenizerFolder
from services.tokenizer.parsers import SessionFactory, parsers_of, start_state
from services.tokenizer.renderers import Pools, Renderers
from services.tokenizer.rendering.conversation import Conversation, Message
from services.tokenizer.rendering.pool import RenderLimits, RenderPool
from services.tokenizer.vocabulary import Segment
from tests.tokenizer.conftest import write_folder
from tests.tokenizer.support import byte_level_definition, deepseek_definition, glm_definition

HI = Conversation((Message("user", ("Hi",)),))
TYPES = {
    "deepseek_v4": (deepseek_definition, "deepseek_v4", "deepseek_v4"),
    "deepseek_v41": (deepseek_definition, "deepseek_v41", "deepseek_v41"),
    "glm5_next": (glm_definition, "glm45", "glm47"),
    "qwen3_5": (byte_level_definition, "qwen3", "qwen3_xml"),
}


@pytest.fixture
async def pools() -> AsyncIterator[Pools]:
    limits = RenderLimits(seconds=5)
    pools = Pools(RenderPool(limits, 1), RenderPool(limits, 1))
    yield pools
    await pools.close()


def folder_of(path: Path, model_type: str, **files: Any) -> TokenizerFolder:
    definition = TYPES[model_type][0]()
    config = {"model_type": model_type}
    files = {"generation_config.json": {}, "tokenizer_config.json": {}, **files}
    return TokenizerFolder.open(
        write_folder(path, **{"config.json": config, "tokenizer.json": definition, **files})
    )


@pytest.mark.parametrize("model_type", TYPES)
async def test_format_and_parsers_follow_the_model_type(
    tmp_path: Path, pools: Pools, model_type: str
) -> None:
    folder = folder_of(tmp_path, model_type)
    names = parsers_of(folder, "", "")
    assert (names.reasoning, names.tools) == TYPES[model_type][1:]
    renderers = Renderers(folder, pools, {})
    await renderers.start()
    prompt = await renderers.of_request("").render(HI)
    pieces = [piece for piece in prompt.segments if isinstance(piece, Segment)]
    ids = folder.vocabulary.encode_segments(pieces)
    assert start_state(ids, folder, names) == tokenizer_pb2.PARSE_STATE_REASONING


async def test_chat_template_of_a_flag_replaces_the_deepseek_format(
    tmp_path: Path, pools: Pools
) -> None:
    folder_of(tmp_path, "deepseek_v4")
    own = tmp_path / "own.jinja"
    own.write_text("own {{ messages[0].content }}")
    renderers = Renderers(TokenizerFolder.open(tmp_path, own), pools, {})
    await renderers.start()
    assert (await renderers.of_request("").render(HI)).text == "own Hi"


@pytest.mark.parametrize(
    ("source", "reason"),
    [("{% if %}", "line 1"), ("{{ x | nofilter }}", "nofilter"), ("{% for x in y %}", "line 1")],
)
async def test_broken_template_is_found_at_the_start(
    tmp_path: Path, pools: Pools, source: str, reason: str
) -> None:
    folder = folder_of(tmp_path, "qwen3_5", **{"chat_template.jinja": source})
    with pytest.raises(StartupError) as caught:
        await Renderers(folder, pools, {}).start()
    assert "chat_template.jinja" in str(caught.value) and reason in str(caught.value)


async def test_broken_template_in_the_settings_names_them(tmp_path: Path, pools: Pools) -> None:
    settings = {"chat_template": "{{ oops"}
    folder = folder_of(tmp_path, "glm5_next", **{"tokenizer_config.json": settings})
    with pytest.raises(StartupError, match=r"chat_template of .*tokenizer_config.json: line 1"):
        await Renderers(folder, pools, {}).start()


async def test_deepseek_checkpoint_without_its_tokens_is_refused(
    tmp_path: Path, pools: Pools
) -> None:
    files = {"tokenizer.json": byte_level_definition()}
    folder = folder_of(tmp_path, "deepseek_v41", **files)
    with pytest.raises(StartupError, match=r"tokenizer.json lacks the tokens .*<｜User｜>"):
        await Renderers(folder, pools, {}).start()


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"task": "title"}, "task"), ({"messages": (Message("latest_reminder", ("x",)),)},
     "messages[0].role")],
)  # fmt: skip
async def test_what_only_deepseek_has_is_refused_by_templates(
    tmp_path: Path, pools: Pools, fields: dict[str, Any], field: str
) -> None:
    renderers = Renderers(folder_of(tmp_path, "qwen3_5"), pools, {})
    await renderers.start()
    with pytest.raises(ServiceError) as caught:
        await renderers.of_request("").render(Conversation(**{"messages": HI.messages, **fields}))
    assert caught.value.field == field


def test_grounding_tokens_stay_in_answers_and_others_do_not(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "deepseek_v41")
    session = SessionFactory(folder, parsers_of(folder, "", "")).open(
        tokenizer_pb2.ParseOpen(start_state=tokenizer_pb2.PARSE_STATE_CONTENT)
    )
    text = "<｜ref｜>a<｜/ref｜><｜latest_reminder｜>b<｜end▁of▁sentence｜>"
    ids = folder.vocabulary.encode_segments(folder.vocabulary.split(text))
    update = session.push(ids)
    assert [delta.text for delta in update.deltas if hasattr(delta, "text")] == [
        "<｜ref｜>a<｜/ref｜>b"
    ]
