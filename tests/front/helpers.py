"""A served front inside the test's own event loop, and requests for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from warhorse.v1 import engine_pb2 as pb
from warhorse.v1.common_pb2 import ModelInfo
from warhorse.v1.engine_pb2_grpc import (
    EngineServiceStub,
    add_EngineServiceServicer_to_server,
)
from warhorse.v1.stage_pb2 import (
    CoreDescription,
    CoreProfileDone,
    CoreReady,
    CoreRefusal,
    CoreResetDone,
    CoreStep,
    CoreSubmit,
    RequestUpdate,
)

from services.common.errors import ServiceError, from_rpc_error
from services.common.grpc_client import connect, socket_target
from services.common.grpc_server import GrpcServer
from services.engine.front import Front, FrontConfig
from services.engine.link import CoreLink, CoreListener
from services.engine.server import SERVICE_NAME, EngineServicer

VOCAB = 260
MAX_MODEL_LEN = 512
MODEL = "test-model"
EOS = 257
SPECIALS = ("<|start|>", "<|im_end|>", "<|think|>", "<|tool|>")  # ids 256 to 259


def write_model_folder(folder: Path) -> Path:
    """config.json and a byte-level tokenizer with four special tokens; no weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    text = {"vocab_size": VOCAB, "max_position_embeddings": MAX_MODEL_LEN}
    config = {"model_type": "qwen4_exp", "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_script(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_request(prompt: Sequence[int] = (1, 2, 3), **changes: Any) -> pb.GenerateRequest:
    """A complete greedy request; `changes` are fields by their name, dots as double underscores."""
    request = pb.GenerateRequest(
        request_id="req-1",
        model=MODEL,
        prompt_token_ids=np.asarray(prompt, dtype="<u4").tobytes(),
        sampling=pb.SamplingParams(
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=7,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
        ),
        stopping=pb.StoppingParams(max_tokens=64),
        n=1,
    )
    for path, value in changes.items():
        set_field(request, path.replace("__", "."), value)
    return request


def set_field(message: Any, path: str, value: Any) -> None:
    """Set `path` ("sampling.top_p"); None clears it; a list replaces a repeated field."""
    *parents, name = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    message.ClearField(name)
    if isinstance(value, list):
        getattr(message, name).extend(value)
    elif value is not None:
        setattr(message, name, value)


@dataclass
class FakeCore:
    """A CoreLink whose every word the test speaks."""

    ready_at_start: bool = True
    listener: CoreListener | None = None
    submitted: list[CoreSubmit] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    stopped: bool = False

    def start(self, listener: CoreListener) -> None:
        self.listener = listener
        if self.ready_at_start:
            self.become_ready()

    def become_ready(self) -> None:
        info = ModelInfo(family="fake", vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN)
        self.the_listener.on_ready(CoreReady(model=info))

    @property
    def the_listener(self) -> CoreListener:
        assert self.listener is not None
        return self.listener

    def submit(self, submit: CoreSubmit) -> None:
        self.submitted.append(submit)

    def abort(self, handle: int) -> None:
        self.aborted.append(handle)

    async def profile(self, *, start: bool) -> CoreProfileDone:
        return CoreProfileDone(file="" if start else "trace")

    async def reset(self) -> CoreResetDone:
        return CoreResetDone(pages_dropped=3)

    async def describe(self) -> CoreDescription:
        info = ModelInfo(family="fake", vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN)
        return CoreDescription(engine=pb.DescribeEngineResponse(model=info, weight_bytes=11))

    async def stop(self) -> None:
        self.stopped = True

    # What the core says

    def say(self, handle: int, *events: pb.GenerateResponse) -> None:
        self.the_listener.on_step(CoreStep(updates=[RequestUpdate(handle=handle, events=events)]))

    def accept(self, handle: int, prompt_tokens: int = 3) -> None:
        self.say(handle, pb.GenerateResponse(accepted=pb.Accepted(prompt_tokens=prompt_tokens)))

    def prompt_done(self, handle: int) -> None:
        self.say(handle, pb.GenerateResponse(prompt_done=pb.PromptDone(cached_tokens=0)))

    def tokens(self, handle: int, *tokens: int, choice: int = 0) -> None:
        chunk = pb.TokenChunk(choice=choice, token_ids=tokens)
        self.say(handle, pb.GenerateResponse(chunk=chunk))

    def finish(self, handle: int, choice: int = 0, **fields: Any) -> None:
        self.say(handle, pb.GenerateResponse(finished=pb.Finished(choice=choice, **fields)))

    def refuse(self, handle: int, refusal: CoreRefusal) -> None:
        update = RequestUpdate(handle=handle, refusal=refusal)
        self.the_listener.on_step(CoreStep(updates=[update]))


@dataclass
class Served:
    """A front that serves on a Unix socket, and a client of it."""

    front: Front
    server: GrpcServer
    stub: Any
    channel: grpc.aio.Channel
    run_dir: Path


@contextlib.asynccontextmanager
async def serve_front(link: CoreLink, grammars: Any = None, **config: Any) -> AsyncIterator[Served]:
    """Serve `link`. At the end the front must have forgotten every request."""
    run_dir = Path(tempfile.mkdtemp(prefix="wh-"))
    server = GrpcServer("engine", "engine-0", run_dir, open_ended=(f"/{SERVICE_NAME}/Load",))
    front = Front(
        FrontConfig(model_names=(MODEL,), **config),
        link,
        lambda serving: server.set_serving(SERVICE_NAME, serving),
        grammars,
    )
    add_EngineServiceServicer_to_server(EngineServicer(front, "engine-0", 1), server.server)
    await server.start()
    server.set_serving(SERVICE_NAME, False)
    front.start()
    try:
        async with connect(socket_target(run_dir, "engine")) as channel:
            yield Served(front, server, EngineServiceStub(channel), channel, run_dir)
        assert front.live_requests == 0, "the front still holds requests"
    finally:
        await server.stop()
        await front.stop()
        shutil.rmtree(run_dir)


async def read_all(call: Any) -> list[pb.GenerateResponse]:
    return [event async for event in call]


async def failure_of(call: Any) -> ServiceError:
    """The error with which a stream ends."""
    try:
        await read_all(call)
    except grpc.RpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call did not fail")


def kinds(events: Sequence[pb.GenerateResponse]) -> list[str | None]:
    return [event.WhichOneof("event") for event in events]


def tokens_of(events: Sequence[pb.GenerateResponse], choice: int = 0) -> list[int]:
    return [
        token
        for event in events
        if event.HasField("chunk") and event.chunk.choice == choice
        for token in event.chunk.token_ids
    ]


async def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        await asyncio.sleep(0.01)
