"""An engine and a tokenizer behind the real contracts whose behaviour tests dictate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from warhorse.v1 import common_pb2, engine_pb2, engine_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

from services.common.errors import ServiceError
from services.gateway.tokens import pack, unpack
from tests.gateway.fake_parser import FakeParser
from tests.gateway.vocabulary import EOS, VOCAB_SIZE, ids, token_bytes

MODEL = "fake-model"
MAX_MODEL_LEN = 512
# Eight tokens that stand for an image.
IMAGE_TEXT = "[[[[]]]]"
FINISH_STOP = tokenizer_pb2.FINISH_REASON_STOP
FINISH_LENGTH = tokenizer_pb2.FINISH_REASON_LENGTH


class FakeServer:
    """A gRPC server on a Unix socket with health, that can die and come back."""

    service = ""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.server: grpc.aio.Server | None = None
        self.health = health.aio.HealthServicer()

    @property
    def target(self) -> str:
        return f"unix:{self.socket}"

    async def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self.server = grpc.aio.server()
        self.health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.add_to(self.server)
        self.server.add_insecure_port(self.target)
        await self.set_serving(True)
        await self.server.start()

    async def set_serving(self, serving: bool) -> None:
        kinds = health_pb2.HealthCheckResponse
        await self.health.set(self.service, kinds.SERVING if serving else kinds.NOT_SERVING)

    async def kill(self) -> None:
        """Cut every call at once."""
        if self.server is not None:
            await self.server.stop(None)
            self.server = None

    def add_to(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError


async def refuse(context: grpc.aio.ServicerContext, error: ServiceError) -> None:
    """End a call with the error's status and details."""
    await context.abort_with_status(rpc_status.to_status(error.to_status()))


class FakeTokenizer(FakeServer, tokenizer_pb2_grpc.TokenizerServiceServicer):
    """One token per byte; conversations become `role: text` lines."""

    service = "warhorse.v1.TokenizerService"

    def __init__(self, socket: Path, generation_config: dict[str, Any] | None = None) -> None:
        super().__init__(socket)
        self.generation_config = generation_config or {}
        self.takes_images = False
        self.renders: list[tokenizer_pb2.RenderRequest] = []
        self.openings: list[tokenizer_pb2.ParseOpen] = []
        self.decodes = 0
        self.parse_calls = 0
        self.open_choices = 0
        self.parse_error: int | None = None
        self._seen = 0  # tokens since the last opening
        self.messages: list[int] = []  # tokens in each event
        self.parse_delay = 0.0
        self.render_delay = 0.0
        self.refusal: ServiceError | None = None
        self.reasoning_end: int | None = None
        self.images_kept = 0
        self.die_after_tokens: int | None = None

    def add_to(self, server: grpc.aio.Server) -> None:
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self, server)

    async def Render(self, request, context):  # noqa: N802
        self.renders.append(request)
        await asyncio.sleep(self.render_delay)
        if self.refusal is not None:
            await refuse(context, self.refusal)
        lines = [
            f"{m.role}: {''.join(p.text or IMAGE_TEXT for p in m.content)}"
            for m in request.messages
        ]
        text = "\n".join(lines)
        reasoning = request.HasField("enable_thinking") and request.enable_thinking
        state = tokenizer_pb2.PARSE_STATE_REASONING if reasoning else None
        return tokenizer_pb2.RenderResponse(
            token_ids=pack(ids(text)),
            text=text,
            start_state=state or tokenizer_pb2.PARSE_STATE_CONTENT,
            stop_token_ids=[EOS],
            images=self._images(request, text),
            reasoning_end_token_id=self.reasoning_end,
            images_kept=self.images_kept,
        )

    def _images(self, request, text: str) -> list[tokenizer_pb2.ImageInput]:
        """An image per picture; its digest names the rendering that made it."""
        places = [i for i in range(len(text)) if text.startswith(IMAGE_TEXT, i)]
        count = sum(p.HasField("image_url") for m in request.messages for p in m.content)
        digest = bytes([len(self.renders)] * 32)
        return [
            tokenizer_pb2.ImageInput(offset=place, length=len(IMAGE_TEXT), digest=digest)
            for place in places[:count]
        ]

    async def Encode(self, request, context):  # noqa: N802
        return tokenizer_pb2.EncodeResponse(token_ids=pack(ids(request.text)))

    async def Decode(self, request, context):  # noqa: N802
        self.decodes += 1
        each = [token_bytes(t) for t in unpack(request.token_ids)]
        text = b"".join(each).decode("utf-8", "replace")
        return tokenizer_pb2.DecodeResponse(text=text, token_bytes=each if request.each else [])

    async def ParseMany(self, request_iterator, context):  # noqa: N802
        self.parse_calls += 1
        parsers: dict[int, FakeParser] = {}
        async for message in request_iterator:
            response = tokenizer_pb2.ParseManyResponse()
            await asyncio.sleep(self.parse_delay)
            for item in message.items:
                if item.drop:
                    del parsers[item.choice]
                elif answer := self._answer(parsers, item):
                    response.answers.append(answer)
            self.open_choices = len(parsers)
            if self.die_after_tokens is not None and self._seen >= self.die_after_tokens:
                self.die_after_tokens = None
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            yield response

    def _answer(self, parsers: dict[int, FakeParser], item) -> tokenizer_pb2.ParseManyAnswer | None:
        request, choice = item.request, item.choice
        kind = request.WhichOneof("event")
        if kind == "open":
            assert choice not in parsers, "a choice is opened once"
            self.openings.append(request.open)
            parsers[choice] = FakeParser(request.open)
            self._seen = 0
            return None
        if kind == "tokens" and self.parse_error is not None:
            del parsers[choice]
            return tokenizer_pb2.ParseManyAnswer(
                choice=choice, error=self.parse_error, error_message="cannot parse"
            )
        if kind == "finish":
            response = parsers.pop(choice).finish(request.finish.reason)
        else:
            tokens = list(request.tokens.token_ids)
            self.messages.append(len(tokens))
            self._seen += len(tokens)
            response = parsers[choice].push(tokens)
        return tokenizer_pb2.ParseManyAnswer(choice=choice, response=response)

    async def DescribeTokenizer(self, request, context):  # noqa: N802
        return tokenizer_pb2.DescribeTokenizerResponse(
            model=common_pb2.ModelInfo(
                name=MODEL,
                vocab_size=VOCAB_SIZE,
                tokenizer_sha256="0",
                max_model_len=MAX_MODEL_LEN,
                takes_images=self.takes_images,
            ),
            generation_config_json=json.dumps(self.generation_config),
            stop_token_ids=[EOS],
            has_chat_template=True,
        )


@dataclass
class Reply:
    """What the fake engine does for one request.

    `choices` holds the tokens of each choice (the last one is used for the rest); they are sent
    `chunk` at a time, `delay` seconds apart. `error` refuses the call; `break_after` cuts the
    stream after so many tokens of a choice with the error `broken`; `hold` waits for an event
    before the first token.
    """

    choices: Sequence[Sequence[int]]
    chunk: int = 1
    delay: float = 0.0
    finish: int = FINISH_STOP
    stop_token: int | None = None
    cached: int = 0
    created: int = 0
    error: ServiceError | None = None
    break_after: int | None = None
    broken: ServiceError | None = None
    failed: int | None = None  # ErrorReason of a Finished message
    hold: asyncio.Event | None = None
    accept: bool = True
    logprob: Callable[[int], engine_pb2.TokenLogprob] = field(
        default=lambda token: engine_pb2.TokenLogprob(token_id=token, logprob=-0.5, rank=1)
    )


def text_reply(text: str, **options: Any) -> Reply:
    """A reply with one text for every choice."""
    return Reply([ids(text)], **options)


class FakeEngine(FakeServer, engine_pb2_grpc.EngineServiceServicer):
    """Plays replies: the next of `replies`, and the last one for ever after."""

    service = "warhorse.v1.EngineService"

    def __init__(self, socket: Path) -> None:
        super().__init__(socket)
        self.takes_images = False
        self.replies: list[Reply] = [text_reply("Hello!")]
        self.requests: list[engine_pb2.GenerateRequest] = []
        self.running = 0
        self.cancelled = 0
        self.completed = 0
        self.sent_tokens = 0
        self.aborted: list[str] = []
        self.traces = False  # whether it may be told to record its steps
        self.recording = False
        self.load = engine_pb2.LoadResponse(
            running=2, waiting=3, kv_usage=0.25, preemptions=4, accepted_by_position=[9, 4]
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self, server)

    async def GenerateMany(self, request_iterator, context):  # noqa: N802
        answers: asyncio.Queue[engine_pb2.GenerateManyAnswer] = asyncio.Queue()
        tasks: dict[int, asyncio.Task[None]] = {}

        async def listen() -> None:
            async for message in request_iterator:
                for item in message.items:
                    if item.HasField("open"):
                        work = self._generate(item.request, item.open, answers)
                        tasks[item.request] = asyncio.create_task(work)
                    elif item.drop:
                        tasks[item.request].cancel()

        listener = asyncio.create_task(listen())
        try:
            while True:
                answer = await answers.get()
                yield engine_pb2.GenerateManyResponse(answers=[answer])
        finally:
            for task in (listener, *tasks.values()):
                task.cancel()

    async def _generate(self, number: int, request, answers: asyncio.Queue) -> None:
        self.requests.append(request)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        self.running += 1
        try:
            if reply.error is not None:
                raise reply.error
            async for event in self._play(request, reply):
                answers.put_nowait(engine_pb2.GenerateManyAnswer(request=number, events=[event]))
            self.completed += 1
        except ServiceError as error:
            failure = engine_pb2.GenerateManyAnswer(
                request=number,
                error=error.reason,
                error_message=error.message,
                error_field=error.field,
                retry_after_seconds=error.retry_after,
            )
            answers.put_nowait(failure)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _play(self, request, reply: Reply) -> AsyncIterator[Any]:
        prompt = unpack(request.prompt_token_ids)
        if reply.accept:
            yield engine_pb2.GenerateResponse(
                accepted=engine_pb2.Accepted(prompt_tokens=len(prompt))
            )
        if reply.hold is not None:
            await reply.hold.wait()
        yield engine_pb2.GenerateResponse(prompt_done=self._prompt_done(request, reply, prompt))
        most = request.stopping.max_tokens
        lists = [reply.choices[min(i, len(reply.choices) - 1)][:most] for i in range(request.n)]
        for at in range(0, max(map(len, lists), default=0), reply.chunk):
            if reply.break_after is not None and at >= reply.break_after:
                raise reply.broken
            for choice, tokens in enumerate(lists):
                part = tokens[at : at + reply.chunk]
                if part:
                    self.sent_tokens += len(part)
                    yield engine_pb2.GenerateResponse(
                        chunk=self._chunk(request, reply, choice, part)
                    )
            await asyncio.sleep(reply.delay)
        for choice, tokens in enumerate(lists):
            yield engine_pb2.GenerateResponse(
                finished=self._finished(request, reply, choice, tokens)
            )

    def _prompt_done(self, request, reply: Reply, prompt: list[int]) -> engine_pb2.PromptDone:
        done = engine_pb2.PromptDone(cached_tokens=reply.cached, created_cache_tokens=reply.created)
        if request.output.HasField("prompt_logprobs"):
            done.prompt_logprobs.extend(reply.logprob(t) for t in prompt[1:])
        return done

    def _chunk(self, request, reply: Reply, choice: int, part) -> engine_pb2.TokenChunk:
        chunk = engine_pb2.TokenChunk(choice=choice, token_ids=part)
        if request.output.HasField("logprobs"):
            chunk.logprobs.extend(reply.logprob(t) for t in part)
        return chunk

    def _finished(self, request, reply: Reply, choice: int, tokens) -> engine_pb2.Finished:
        if reply.failed is not None:
            return engine_pb2.Finished(
                choice=choice,
                reason=tokenizer_pb2.FINISH_REASON_ERROR,
                error=reply.failed,
                error_message="the logits were not finite",
            )
        cut = len(tokens) == request.stopping.max_tokens
        finished = engine_pb2.Finished(
            choice=choice,
            reason=FINISH_LENGTH if cut else reply.finish,
            completion_tokens=len(tokens),
        )
        if reply.stop_token is not None:
            finished.stop_token_id = reply.stop_token
        return finished

    async def DescribeEngine(self, request, context):  # noqa: N802
        return engine_pb2.DescribeEngineResponse(
            model=common_pb2.ModelInfo(
                name=MODEL,
                family="fake",
                fingerprint="0123456789abcdef",
                vocab_size=VOCAB_SIZE,
                max_model_len=MAX_MODEL_LEN,
                takes_images=self.takes_images,
            )
        )

    async def Abort(self, request, context):  # noqa: N802
        self.aborted += request.request_ids
        return engine_pb2.AbortResponse(aborted=len(request.request_ids))

    async def ProfileEngine(self, request, context):  # noqa: N802
        if not self.traces:
            await refuse(context, ServiceError(common_pb2.ERROR_REASON_UNSUPPORTED, "no traces"))
        self.recording = request.start
        return engine_pb2.ProfileEngineResponse(file="" if request.start else "a.json.gz")

    async def ResetPrefixCache(self, request, context):  # noqa: N802
        return engine_pb2.ResetPrefixCacheResponse(pages_dropped=7)

    async def Load(self, request, context):  # noqa: N802
        while True:
            yield self.load
            await asyncio.sleep(0.05)
