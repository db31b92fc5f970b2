"""The tokenizers as the gateway uses them: render, encode, decode, and streams of Parse."""

from __future__ import annotations

import asyncio
import codecs
import functools
import itertools
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
from warhorse.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

from services.common.errors import ServiceError, from_rpc_error
from services.common.grpc_client import MAX_RENDER_BYTES, connect, request_metadata
from services.gateway.calls import TokenizerLostError
from services.gateway.choice import Choice
from services.gateway.parse_hub import ParseHub
from services.gateway.peers import DESCRIBE_SECONDS, PeerSet
from services.gateway.tokens import pack, unpack

UNARY_SECONDS = 60.0
ATTEMPTS = 3
MAX_LOSSES = 4

T = TypeVar("T")


class TokenizerPeer:
    """One tokenizer replica."""

    service = "warhorse.v1.TokenizerService"

    def __init__(self, target: str, on_lost: Callable[[TokenizerPeer, list[Choice]], None]) -> None:
        self.target = target
        self.channel = connect(target, max_send_bytes=MAX_RENDER_BYTES)
        self.stub = tokenizer_pb2_grpc.TokenizerServiceStub(self.channel)
        self.inflight = 0
        self.hub = ParseHub(self.stub, functools.partial(on_lost, self))
        self.info = tokenizer_pb2.DescribeTokenizerResponse()

    async def describe(self) -> None:
        """Fetch `info`."""
        request = tokenizer_pb2.DescribeTokenizerRequest()
        self.info = await self.stub.DescribeTokenizer(request, timeout=DESCRIBE_SECONDS)

    async def follow(self) -> None:
        """Tokenizers report nothing beside their health."""
        await asyncio.Event().wait()


class Tokenizers:
    """All replicas; they are equal, so any healthy one serves any call."""

    def __init__(self, targets: Sequence[str], wait_seconds: float) -> None:
        peers = [TokenizerPeer(target, self._on_lost) for target in targets]
        self.set = PeerSet(peers, "tokenizer", wait_seconds)
        self._moves: set[asyncio.Task[None]] = set()
        self._turns = itertools.count()
        self._last_turn: dict[tuple[str, bool], int] = {}
        self._token_bytes: dict[int, bytes] = {}
        self._token_bytes_of = ""

    @property
    def info(self) -> tokenizer_pb2.DescribeTokenizerResponse | None:
        """What the first replica that was ever seen says; None before that."""
        described = [p.info for p in self.set.peers if p.info.model.vocab_size]
        return described[0] if described else None

    @property
    def generation_config(self) -> dict[str, Any]:
        """The checkpoint's generation_config.json; empty when it has none."""
        text = self.info.generation_config_json if self.info else ""
        value = json.loads(text) if text else {}
        return value if isinstance(value, dict) else {}

    async def pick(self, *, stream: bool = False) -> TokenizerPeer:
        """The healthy replica that was used longest ago, for streams and for other calls apart.

        With one turn for both, the first call of every request would meet the same replica.
        """
        peer = await self.set.pick(lambda p: self._last_turn.get((p.target, stream), -1))
        self._last_turn[peer.target, stream] = next(self._turns)
        return peer

    async def attach(self, choice: Choice) -> None:
        """Have `choice` parsed by a healthy replica; raises TokenizerLostError."""
        try:
            peer = await self.pick(stream=True)
        except ServiceError as error:
            raise TokenizerLostError(error.reason, error.message) from error
        if not choice.abandoned:
            peer.hub.attach(choice)

    def detach(self, choice: Choice) -> None:
        """Forget `choice`, wherever it is parsed or shall be parsed again."""
        choice.abandoned = True
        for peer in self.set.peers:
            peer.hub.detach(choice)

    async def stop(self) -> None:
        """End all calls and close the channels."""
        for task in self._moves:
            task.cancel()
        for peer in self.set.peers:
            await peer.hub.close()
        await self.set.stop()

    def _on_lost(self, peer: TokenizerPeer, choices: list[Choice]) -> None:
        """A replica died: its choices are parsed again elsewhere, or after its restart."""
        self.set.mark_lost(peer)
        if choices:
            task = asyncio.create_task(self._move(choices))
            self._moves.add(task)
            task.add_done_callback(self._moves.discard)

    async def _move(self, choices: list[Choice]) -> None:
        for choice in choices:
            choice.losses += 1
            try:
                if choice.losses == MAX_LOSSES:
                    reason = common_pb2.ERROR_REASON_ENGINE_LOST
                    raise TokenizerLostError(reason, "The tokenizer failed again and again.")
                await self.attach(choice)
            except TokenizerLostError as error:
                choice.fail(error)

    async def render(self, request: tokenizer_pb2.RenderRequest) -> tokenizer_pb2.RenderResponse:
        """Conversation to prompt tokens."""
        return await self._unary(
            lambda p: p.stub.Render(request, timeout=UNARY_SECONDS, metadata=request_metadata())
        )

    async def encode(self, request: tokenizer_pb2.EncodeRequest) -> bytes:
        """Text to packed token ids."""
        answer: tokenizer_pb2.EncodeResponse = await self._unary(
            lambda p: p.stub.Encode(request, timeout=UNARY_SECONDS, metadata=request_metadata())
        )
        return answer.token_ids

    async def decode(self, packed: bytes) -> str:
        """Packed token ids to text, special tokens included."""
        request = tokenizer_pb2.DecodeRequest(token_ids=packed)
        answer: tokenizer_pb2.DecodeResponse = await self._unary(
            lambda p: p.stub.Decode(request, timeout=UNARY_SECONDS, metadata=request_metadata())
        )
        return answer.text

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Each token's own bytes. Asked for once per token and remembered."""
        known = self._known_bytes()
        missing = sorted({t for t in token_ids if t not in known})
        if missing:
            request = tokenizer_pb2.DecodeRequest(token_ids=pack(missing), each=True)
            answer = await self._unary(
                lambda p: p.stub.Decode(request, timeout=UNARY_SECONDS, metadata=request_metadata())
            )
            known.update(zip(missing, answer.token_bytes, strict=True))
        return [known[t] for t in token_ids]

    async def complete_text(self, packed: bytes) -> str:
        """Text of packed tokens without the bytes of a character that is cut at their end."""
        joined = b"".join(await self.token_bytes(unpack(packed)))
        return codecs.getincrementaldecoder("utf-8")("replace").decode(joined)

    def _known_bytes(self) -> dict[int, bytes]:
        sha = self.info.model.tokenizer_sha256 if self.info else ""
        if sha != self._token_bytes_of:
            self._token_bytes, self._token_bytes_of = {}, sha
        return self._token_bytes

    async def _unary(self, call: Callable[[TokenizerPeer], Awaitable[T]]) -> T:
        """Run an idempotent call, on another replica or after a restart when one is lost."""
        for attempt in range(ATTEMPTS):
            peer = await self.pick()
            try:
                return await call(peer)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or attempt == ATTEMPTS - 1:
                    raise _refusal(error) from error
                self.set.mark_lost(peer)
        raise AssertionError("unreachable: the last attempt returns or raises")


def _refusal(error: grpc.RpcError) -> ServiceError:
    """The error of a unary call; a message above the transport's limit is a prompt too long."""
    known = from_rpc_error(error)
    exhausted = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    if exhausted and known.reason == common_pb2.ERROR_REASON_INVALID_FIELD:
        return ServiceError(
            common_pb2.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED,
            "The prompt is far longer than the model's maximum context length.",
        )
    return known
