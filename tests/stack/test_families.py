"""A checkpoint of each further family behind the whole stack: text, images, reuse, deaths."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.types.chat import ChatCompletion
from PIL import Image

from services.engine.checkpoints.nano import deepseek_v4, deepseek_v41, glm
from tests.stack.conftest import Stack, running, wait_until
from tests.tokenizer.pictures import file_of, noise, url_of

pytestmark = pytest.mark.slow

FAMILIES = ("deepseek_v4", "deepseek_v41", "glm5_next")
BEFORE = " ".join(f"Anna has {n} apples." for n in range(20, 36))
BEHIND = " ".join(f"Ben has {n} pears." for n in range(40, 62))
PICTURE = noise(100, 120)
Content = str | list[dict[str, Any]]


def build(family: str, folder: Path) -> Path:
    match family:
        case "deepseek_v4":
            deepseek_v4.build_nano(folder, "vision")
            deepseek_v4.add_tokenizer(folder)
        case "deepseek_v41":
            deepseek_v41.build_nano(folder)
        case _:
            glm.build_nano(folder, "fp8")
            glm.add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    home = tmp_path_factory.mktemp("family")
    with running(Stack(home, model=build(request.param, home / request.param))) as found:
        wait_until(lambda: found.counters()["sessions"] == 1, 15, "the store is connected")
        yield found


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def image(picture: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(file_of(picture))}}


def fields(stack: Stack, content: Content, count: int) -> dict[str, Any]:
    return {
        "model": stack.model.name,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": count,
        "logprobs": True,
        "extra_body": {"ignore_eos": True},
    }


def ask(stack: Stack, content: Content, count: int = 6) -> ChatCompletion:
    answer: ChatCompletion = stack.client().chat.completions.create(**fields(stack, content, count))
    return answer


def essence(answer: ChatCompletion) -> list[tuple[str, float]]:
    """Tokens and log-probabilities: equal to the last bit or another computation."""
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    return [(entry.token, entry.logprob) for entry in logprobs.content]


def tokens(answer: ChatCompletion) -> tuple[int, int]:
    """Tokens of the prompt, and how many of them were cached."""
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0


def read(stream: Any) -> Iterator[tuple[str, float]]:
    for chunk in stream:
        for choice in chunk.choices:
            entries = choice.logprobs.content if choice.logprobs else None
            yield from ((entry.token, entry.logprob) for entry in entries or ())


def test_a_stream_holds_what_the_whole_answer_does(family: Stack) -> None:
    whole = essence(ask(family, "Hello", 12))
    stream = family.client().chat.completions.create(stream=True, **fields(family, "Hello", 12))
    assert list(read(stream)) == whole and len(whole) == 12


def test_a_long_prompt_sent_twice_is_mostly_cached_and_answered_alike(family: Stack) -> None:
    prompt = f"{BEHIND} {BEFORE}"
    cold, warm = ask(family, prompt), ask(family, prompt)
    assert tokens(warm)[0] >= 300 and tokens(warm)[1] >= 256
    assert tokens(cold)[1] < tokens(warm)[1]
    assert essence(cold) == essence(warm)


def test_pictures_that_differ_in_one_pixel_share_the_text_before_them_alone(family: Stack) -> None:
    other = np.array(PICTURE)
    other[50, 60] ^= 255
    contents = [[text(BEFORE), image(p), text(BEHIND)] for p in (PICTURE, other)]
    before, _ = tokens(ask(family, BEFORE))
    first, second = (ask(family, contents[0]) for _ in range(2))
    changed, again = (ask(family, contents[1]) for _ in range(2))
    assert 0 < tokens(changed)[1] < before < tokens(second)[1] == tokens(again)[1]
    assert essence(first) == essence(second) != essence(changed) == essence(again)


def animation() -> bytes:
    buffer, frames = io.BytesIO(), [Image.fromarray(noise(20, 20, seed)) for seed in range(2)]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


BAD_IMAGES = {
    "cut off": (file_of(PICTURE)[:200], "corrupt"),
    "no image": (b"GIF of a cat", ""),
    "of no bytes": (b"", "no bytes"),
    "huge": (file_of(Image.new("1", (20_000, 20_000))), "20000 x 20000 pixels"),
    "animated": (animation(), "animated"),
}


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_a_bad_image_is_refused_by_the_part_of_its_message(family: Stack, kind: str) -> None:
    data, complaint = BAD_IMAGES[kind]
    parts = [text("What is this?"), {"type": "image_url", "image_url": {"url": url_of(data)}}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    response = httpx.post(f"{family.url}/v1/chat/completions", json=body, timeout=30)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages.0.content.1.image_url")
    assert complaint in error["message"]


@pytest.mark.parametrize("family", ["deepseek_v41"], indirect=True)
def test_a_killed_engine_ends_the_stream_and_answers_alike_when_it_is_back(family: Stack) -> None:
    content: Content = [text("Hello"), image(PICTURE)]
    right, restarts = essence(ask(family, content, 60)), family.report()["engine"]["restarts"]
    stream = family.client().chat.completions.create(stream=True, **fields(family, content, 60))
    received = read(stream)
    begun = [next(received) for _ in range(2)]
    family.kill("engine")
    with pytest.raises(openai.APIError):
        begun.extend(received)
    assert begun == right[: len(begun)]
    family.wait_restarted("engine", restarts + 1)
    assert essence(ask(family, content, 60)) == right


@pytest.mark.parametrize("family", ["deepseek_v41"], indirect=True)
def test_a_stream_outlives_the_table_service_which_adopts_its_tables(family: Stack) -> None:
    log = family.paths.logs / "offload.log"
    restarts, length = family.report()["offload"]["restarts"], log.stat().st_size
    right = essence(ask(family, "Hello", 60))
    stream = family.client().chat.completions.create(stream=True, **fields(family, "Hello", 60))
    received = read(stream)
    begun = [next(received) for _ in range(2)]
    family.kill("offload")
    assert [*begun, *received] == right
    family.wait_restarted("offload", restarts + 1)
    lines = log.read_text()[length:].splitlines()
    tables = [line for line in lines if "engram" in line]
    assert tables and not any("loading" in line for line in tables)
