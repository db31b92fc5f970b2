"""The calls of TokenizerService."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Sequence

import grpc
import grpc.aio
from warhorse.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

from services.common.describe import service_info
from services.common.errors import ServiceError
from services.tokenizer.folder import TokenizerFolder
from services.tokenizer.images.publish import Picture
from services.tokenizer.images.reader import ImageReader
from services.tokenizer.lanes import Lane, ParseLanes, ParseWatch
from services.tokenizer.parsers import SessionFactory, start_state
from services.tokenizer.parsing.parser import THINK_CLOSE
from services.tokenizer.parsing.registry import ParserNames
from services.tokenizer.renderers import Renderers
from services.tokenizer.rendering.conversation import Conversation, from_request, refuse
from services.tokenizer.rendering.pool import RenderError
from services.tokenizer.rendering.prompt import Prompt
from services.tokenizer.vocabulary import Segment
from services.tokenizer.wire import pack_ids, unpack_ids

SERVICE_NAME = "warhorse.v1.TokenizerService"
logger = logging.getLogger(__name__)
_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs lack it
# Longer texts are encoded in a thread, so that streams are not held up (about 1 ms of work).
_INLINE_CHARS = 2048
_DRAIN_POLL_SECONDS = 0.02

Context = grpc.aio.ServicerContext[object, object]


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Stateless but for the streams in flight; belongs to one event loop."""

    def __init__(
        self,
        folder: TokenizerFolder,
        names: ParserNames,
        renderers: Renderers,
        card: tokenizer_pb2.DescribeTokenizerResponse,
        reader: ImageReader | None = None,
        *,
        strict_calls: bool = False,
        watch: ParseWatch | None = None,
    ) -> None:
        """card: what DescribeTokenizer answers, but for the process. reader: None takes no
        images. strict_calls: no call is made of broken markup. watch: who counts and traces the
        choices."""
        self._folder = folder
        self._vocabulary = folder.vocabulary
        self._names = names
        self._renderers = renderers
        self._card = card
        self._reader = reader
        self._watch = watch or ParseWatch()
        self._sessions = SessionFactory(folder, names, strict=strict_calls)
        self._reasoning_end = folder.vocabulary.control.get(THINK_CLOSE)
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
        renderer = self._renderers.of_request(request.chat_template)
        try:
            prompt = await renderer.render(conversation)
        except RenderError as error:
            raise ServiceError(
                common_pb2.ERROR_REASON_TEMPLATE, f"chat template: {error}", field="messages"
            ) from error
        answer = await self._prompt_response(prompt)
        logger.info("rendered", extra={"prompt_tokens": len(answer.token_ids) // 4})
        return answer

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
        state = self._start_state(prompt, ids)
        is_reasoning = state == tokenizer_pb2.PARSE_STATE_REASONING
        return tokenizer_pb2.RenderResponse(
            token_ids=pack_ids(ids),
            text=prompt.text,
            images=images,
            start_state=state,
            stop_token_ids=self._folder.stop_token_ids,
            reasoning_end_token_id=self._reasoning_end if is_reasoning else None,
            images_kept=_kept(pictures),
        )

    def _start_state(self, prompt: Prompt, ids: list[int]) -> tokenizer_pb2.ParseState:
        if prompt.plain:
            return tokenizer_pb2.PARSE_STATE_TEXT
        return start_state(ids, self._folder, self._names)

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
        logger.debug("encoded", extra={"tokens": len(ids)})
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
        lane = Lane(self._sessions, self._vocabulary, self._watch)
        try:
            await self._parse(lane, context)
        finally:
            lane.close()

    async def _parse(self, lane: Lane, context: Context) -> None:
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
        lanes = ParseLanes(self._sessions, self._vocabulary, self._watch)
        lanes.draining = self._draining
        self._lanes.add(lanes)
        try:
            while (request := await context.read()) is not _EOF:
                assert isinstance(request, tokenizer_pb2.ParseManyRequest)
                await context.write(lanes.answer(request))
        finally:
            self._lanes.discard(lanes)
            lanes.close()

    async def DescribeTokenizer(  # noqa: N802
        self, request: tokenizer_pb2.DescribeTokenizerRequest, context: Context
    ) -> tokenizer_pb2.DescribeTokenizerResponse:
        """What this process serves."""
        answer = tokenizer_pb2.DescribeTokenizerResponse()
        answer.CopyFrom(self._card)
        service = self._card.service
        answer.service.CopyFrom(service_info(service.instance_id, service.generation))
        return answer


def _kept(pictures: Sequence[Picture]) -> int:
    """How many of the pictures did not have to be decoded: those of before, and repetitions."""
    decoded = {picture.digest for picture in pictures if not picture.kept}
    return len(pictures) - len(decoded)
