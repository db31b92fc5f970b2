"""The engines as the gateway uses them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from warhorse.v1 import engine_pb2, engine_pb2_grpc

from services.common.grpc_client import connect
from services.gateway.engine_hub import EngineHub
from services.gateway.peers import DESCRIBE_SECONDS, PeerSet


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

    async def describe(self) -> None:
        """Fetch `info`."""
        request = engine_pb2.DescribeEngineRequest()
        self.info = await self.stub.DescribeEngine(request, timeout=DESCRIBE_SECONDS)

    async def follow(self) -> None:
        """Keep `load` fresh."""
        async for record in self.stub.Load(engine_pb2.LoadRequest()):
            self.load = record


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

    async def pick(self, exclude: Iterable[EnginePeer] = ()) -> EnginePeer:
        """The healthy replica with the fewest requests of ours, then the shortest queue."""
        return await self.set.pick(lambda p: p.inflight + p.load.waiting / 1e6, exclude)
