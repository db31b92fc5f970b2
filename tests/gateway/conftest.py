"""The real gateway on a real port, between a real client and fake peers."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.gateway.__main__ import listen, server
from services.gateway.config import GatewayConfig
from tests.gateway.fakes import FakeEngine, FakeTokenizer
from tests.gateway.sse import Frames, parse_frames


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for `condition`; fails the test when it does not come true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass
class Stack:
    """A running gateway and its peers."""

    engine: FakeEngine
    tokenizer: FakeTokenizer
    url: str
    http: httpx.AsyncClient
    sdk: openai.AsyncOpenAI
    app: Any

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def stream(self, path: str = "/v1/chat/completions", **fields: Any) -> Frames:
        """All frames of a streamed request."""
        default = (
            {"prompt": "Hi"}
            if path.endswith("/completions") and "chat" not in path
            else {"messages": [{"role": "user", "content": "Hi"}]}
        )
        response = await self.http.post(path, json={**default, "stream": True, **fields})
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return parse_frames(response.text)


MakeStack = Callable[..., Awaitable[Stack]]


@pytest.fixture
async def make_stack() -> AsyncIterator[MakeStack]:
    """Starts stacks; afterwards no request may be left at an engine."""
    async with AsyncExitStack() as stack:
        made: list[Stack] = []

        async def make(
            *,
            start_engine: bool = True,
            checkpoint: Any = None,
            takes_images: bool = False,
            **settings: Any,
        ) -> Stack:
            run_dir = Path(tempfile.mkdtemp(prefix="wh-"))
            stack.callback(shutil.rmtree, run_dir)
            engine = FakeEngine(run_dir / "engine.sock")
            tokenizer = FakeTokenizer(run_dir / "tokenizer.sock", checkpoint)
            tokenizer.takes_images = engine.takes_images = takes_images
            stack.push_async_callback(engine.kill)
            stack.push_async_callback(tokenizer.kill)
            if start_engine:
                await engine.start()
            await tokenizer.start()
            result = await serve_gateway(stack, engine, tokenizer, settings)
            made.append(result)
            return result

        yield make
        for one in made:
            await until(lambda one=one: one.engine.running == 0)
            inflight = [p.inflight for p in one.app.state.gateway.engines.set.peers]
            assert inflight == [0] * len(inflight)


async def serve_gateway(
    stack: AsyncExitStack, engine: FakeEngine, tokenizer: FakeTokenizer, settings: dict[str, Any]
) -> Stack:
    """Start a gateway between these peers; it ends with `stack`."""
    defaults = {
        "host": "127.0.0.1",
        "port": 0,
        "engine_address": (engine.target,),
        "tokenizer_address": (tokenizer.target,),
        "peer_wait_seconds": 3.0,
        "shutdown_timeout": 1.0,
    }
    config = GatewayConfig(**{**defaults, **settings})
    listening = listen(config)
    uvicorn_server = server(config)
    task = asyncio.create_task(uvicorn_server.serve(sockets=[listening]))
    stack.push_async_callback(_stop, uvicorn_server, task)
    await until(lambda: uvicorn_server.started)
    path = None if config.uds is None else str(config.uds)
    url = "http://gateway" if path else f"http://127.0.0.1:{listening.getsockname()[1]}"
    transport = httpx.AsyncHTTPTransport(uds=path)
    http = await stack.enter_async_context(
        httpx.AsyncClient(base_url=url, timeout=20, transport=transport)
    )
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
    sdk = await stack.enter_async_context(client)
    app = uvicorn_server.config.loaded_app
    while not hasattr(app, "state"):
        app = app.app
    if engine.server is not None:
        await until(lambda: app.state.gateway.healthy)
    return Stack(engine, tokenizer, url, http, sdk, app)


async def _stop(uvicorn_server: Any, task: asyncio.Task[None]) -> None:
    uvicorn_server.should_exit = True
    await task


@pytest.fixture
async def stack(make_stack: MakeStack) -> Stack:
    return await make_stack()
