"""The engines as the gateway uses them."""

from __future__ import annotations

from collections.abc import Sequence

from warhorse.v1 import engine_pb2, engine_pb2_grpc

from services.common.grpc_client import connect
from services.common.prefix_chain import short_hashes
from services.gateway.engine_hub import EngineHub
from services.gateway.peers import DESCRIBE_SECONDS, PeerSet
from services.gateway.prefix import PromptPrefix

# Tokens of prompt that a running request counts for: what decoding it costs the others.
REQUEST_TOKENS = 64
LAST_RESORT_TOKENS = 1 << 40


class EnginePeer:
    """One engine replica, its description and its last load record."""

    service = "warhorse.v1.EngineService"

    def __init__(self, target: str, index: int) -> None:
        self.target = target
        self.index = index
        self.channel = connect(target)
        self.stub = engine_pb2_grpc.EngineServiceStub(self.channel)
        self.hub = EngineHub(self.stub)
        self.inflight = 0
        self.info = engine_pb2.DescribeEngineResponse()
        self.load = engine_pb2.LoadResponse()
        self.prefixes: set[bytes] = set()  # short hashes of the units with which a hit may end

    async def describe(self) -> None:
        """Fetch `info`."""
        request = engine_pb2.DescribeEngineRequest()
        self.info = await self.stub.DescribeEngine(request, timeout=DESCRIBE_SECONDS)

    async def follow(self) -> None:
        """Keep `load` and `prefixes` fresh."""
        async for record in self.stub.Load(engine_pb2.LoadRequest()):
            self._take_prefixes(record)
            self.load = record

    def _take_prefixes(self, record: engine_pb2.LoadResponse) -> None:
        if record.prefixes_reset:
            self.prefixes.clear()
        self.prefixes.difference_update(short_hashes(record.prefixes_gone))
        self.prefixes.update(short_hashes(record.prefixes_added))
        record.ClearField("prefixes_gone")
        record.ClearField("prefixes_added")


class Engines:
    """All replicas of the served model."""

    def __init__(self, targets: Sequence[str], wait_seconds: float) -> None:
        peers = [EnginePeer(target, i) for i, target in enumerate(targets)]
        self.set = PeerSet(peers, "engine", wait_seconds)

    async def stop(self) -> None:
        """End all calls and close the channels."""
        for peer in self.set.peers:
            await peer.hub.close()
        await self.set.stop()

    @property
    def info(self) -> engine_pb2.DescribeEngineResponse | None:
        """What the first replica that was ever seen says; None before that."""
        described = [p.info for p in self.set.peers if p.info.model.max_model_len]
        return described[0] if described else None

    async def pick(
        self,
        prefix: PromptPrefix,
        exclude: Sequence[EnginePeer] = (),
        avoid: Sequence[EnginePeer] = (),
    ) -> EnginePeer:
        """The healthy replica that will have computed the prompt first, as far as can be told.

        It has the least prompt tokens in front: those that wait there already, those of the
        prompt that it has not cached, and something for every request of ours that it runs.
        One of `avoid`, or one that drains, is taken only where there is no other.
        """

        def cost(peer: EnginePeer) -> float:
            last_resort = peer.load.draining or peer in avoid
            return self._cost(peer, prefix) + LAST_RESORT_TOKENS * last_resort

        return await self.set.pick(cost, exclude)

    def _cost(self, peer: EnginePeer, prefix: PromptPrefix) -> float:
        if len(self.set.peers) == 1:
            return 0.0
        cached = prefix.cached_tokens(peer.info, peer.prefixes)
        waiting = peer.load.waiting_tokens + REQUEST_TOKENS * peer.inflight
        return prefix.length - cached + waiting
