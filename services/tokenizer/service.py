"""The calls of TokenizerService."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio
from warhorse.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

from services.common.describe import service_info
from services.common.errors import ServiceError
from services.tokenizer.folder import TokenizerFolder
from services.tokenizer.images.publish import Picture
from services.tokenizer.images.reader import ImageReader
from services.tokenizer.lanes import Lane, ParseLanes
from services.tokenizer.parsers import SessionFactory, start_state
from services.tokenizer.parsing.registry import ParserNames
from services.tokenizer.rendering.conversation import Conversation, from_request, refuse
from services.tokenizer.rendering.pool import RenderError, RenderPool
from services.tokenizer.rendering.renderer import ChatTemplate, Prompt, Renderer
from services.tokenizer.vocabulary import Segment
from services.tokenizer.wire import pack_ids, unpack_ids

SERVICE_NAME = "warhorse.v1.TokenizerService"
_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
# Longer texts are encoded in a thread, so that streams are not held up (about 1 ms of work).
_INLINE_CHARS = 2048
_DRAIN_POLL_SECONDS = 0.02

Context = grpc.aio.ServicerContext[object, object]


class Pools:
    """Render workers: for the checkpoint's template and, apart, for templates of requests."""

    def __init__(self, own: RenderPool, foreign: RenderPool) -> None:
        self.own = own
        self.foreign = foreign

    async def close(self) -> None:
        """End all workers."""
        await self.own.close()
        await self.foreign.close()


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Stateless but for the streams in flight; belongs to one event loop."""

    def __init__(
        self,
        folder: TokenizerFolder,
        names: ParserNames,
        pools: Pools,
        card: tokenizer_pb2.DescribeTokenizerResponse,
        reader: ImageReader | None = None,
    ) -> None:
        """card: what DescribeTokenizer answers, but for the process. reader: None takes no
        images."""
        self._folder = folder
        self._vocabulary = folder.vocabulary
        self._names = names
        self._pools = pools
        self._card = card
        self._template = ChatTemplate.of(folder.template) if folder.template else None
        self._reader = reader
        self._renderer = Renderer(
            folder.vocabulary,
            folder.family.rules(),
            folder.template_variables,
            folder.images.placeholder if folder.images else None,
        )
        self._sessions = SessionFactory(folder, names)
        self._lanes: set[ParseLanes] = set()
        self._draining = False

    async def drain(self) -> None:
        """Take no new choices over ParseMany and return when those in flight have ended."""
        self._draining = True
        for lanes in self._lanes:
            lanes.draining = True
        while any(lanes.open for lanes in self._lanes):
            await asyncio.sleep(_DRAIN_POLL_SECONDS)

    async def Render(  # noqa: N802
        self, request: tokenizer_pb2.RenderRequest, context: Context
    ) -> tokenizer_pb2.RenderResponse:
        """Conversation to prompt ids."""
        conversation = from_request(request)
        self._check_images(conversation)
        template, pool = self._template, self._pools.own
        if request.chat_template:
            template, pool = ChatTemplate.of(request.chat_template), self._pools.foreign
        if template is None:
            raise ServiceError(
                common_pb2.ERROR_REASON_TEMPLATE,
                "the checkpoint has no chat template; send one or use completions",
                field="messages",
            )
        try:
            prompt = await self._renderer.render(conversation, template, pool)
        except RenderError as error:
            raise ServiceError(
                common_pb2.ERROR_REASON_TEMPLATE, f"chat template: {error}", field="messages"
            ) from error
        return await self._prompt_response(prompt)

    def _check_images(self, conversation: Conversation) -> None:
        images = conversation.images()
        if images and self._reader is None:
            raise refuse("this model takes no images", images[0].where)
        if self._reader is not None:
            self._reader.check(images)

    async def _prompt_response(self, prompt: Prompt) -> tokenizer_pb2.RenderResponse:
        pictures: Sequence[Picture] = ()
        if self._reader is not None and prompt.images:
            pictures = await self._reader.read(prompt.images)
        ids, images = await self._assembled(prompt, pictures)
        return tokenizer_pb2.RenderResponse(
            token_ids=pack_ids(ids),
            text=prompt.text,
            images=images,
            start_state=start_state(ids, self._folder, self._names),
            stop_token_ids=self._folder.stop_token_ids,
        )

    async def _assembled(
        self, prompt: Prompt, pictures: Sequence[Picture]
    ) -> tuple[list[int], list[tokenizer_pb2.ImageInput]]:
        """The ids of a prompt with its pictures in the places of its images."""
        ids: list[int] = []
        images: list[tokenizer_pb2.ImageInput] = []
        for is_text, run in itertools.groupby(prompt.segments, lambda p: isinstance(p, Segment)):
            if is_text:
                segments = [piece for piece in run if isinstance(piece, Segment)]
                ids += await self._encoded(segments, sum(len(s.text) for s in segments))
                continue
            assert self._reader is not None
            for picture in pictures[len(images) : len(images) + len(list(run))]:
                tokens = self._reader.tokens(picture, len(ids))
                images.append(picture.placed(len(ids), len(tokens)))
                ids += tokens
        return ids, images

    async def _encoded(self, segments: list[Segment], chars: int) -> list[int]:
        if chars <= _INLINE_CHARS:
            return self._vocabulary.encode_segments(segments)
        return await asyncio.to_thread(self._vocabulary.encode_segments, segments)

    async def Encode(  # noqa: N802
        self, request: tokenizer_pb2.EncodeRequest, context: Context
    ) -> tokenizer_pb2.EncodeResponse:
        """Text to ids; control tokens in it count only when asked for."""
        text = request.text
        segments = self._vocabulary.split(text) if request.parse_special else [Segment(text, False)]
        ids = await self._encoded(segments, len(text))
        if not request.HasField("add_special_tokens") or request.add_special_tokens:
            ids = self._vocabulary.framed(ids)
        return tokenizer_pb2.EncodeResponse(token_ids=pack_ids(ids))

    async def Decode(  # noqa: N802
        self, request: tokenizer_pb2.DecodeRequest, context: Context
    ) -> tokenizer_pb2.DecodeResponse:
        """Ids to text and, if asked for, to the bytes of each."""
        ids = unpack_ids(request.token_ids, "token_ids")
        limit = self._folder.vocab_rows
        beyond = max(ids, default=0)
        if beyond >= limit:
            raise refuse(f"token_ids must be below {limit}, got {beyond}", "token_ids")
        text = self._vocabulary.decode(ids, skip_special=request.skip_special_tokens)
        each = [self._vocabulary.token_bytes(token_id) for token_id in ids] if request.each else []
        return tokenizer_pb2.DecodeResponse(text=text, token_bytes=each)

    async def Parse(  # noqa: N802
        self, request_iterator: AsyncIterator[tokenizer_pb2.ParseRequest], context: Context
    ) -> None:
        """Tokens of one choice to deltas."""
        lane = Lane(self._sessions, self._vocabulary)
        while (request := await context.read()) is not _EOF:
            assert isinstance(request, tokenizer_pb2.ParseRequest)
            answer = lane.answer(request)
            if answer is not None:
                await context.write(answer)
            if lane.finished:
                return

    async def ParseMany(  # noqa: N802
        self, request_iterator: AsyncIterator[tokenizer_pb2.ParseManyRequest], context: Context
    ) -> None:
        """Tokens of many choices to deltas."""
        lanes = ParseLanes(self._sessions, self._vocabulary)
        lanes.draining = self._draining
        self._lanes.add(lanes)
        try:
            while (request := await context.read()) is not _EOF:
                assert isinstance(request, tokenizer_pb2.ParseManyRequest)
                await context.write(lanes.answer(request))
        finally:
            self._lanes.discard(lanes)

    async def DescribeTokenizer(  # noqa: N802
        self, request: tokenizer_pb2.DescribeTokenizerRequest, context: Context
    ) -> tokenizer_pb2.DescribeTokenizerResponse:
        """What this process serves."""
        answer = tokenizer_pb2.DescribeTokenizerResponse()
        answer.CopyFrom(self._card)
        service = self._card.service
        answer.service.CopyFrom(service_info(service.instance_id, service.generation))
        return answer
