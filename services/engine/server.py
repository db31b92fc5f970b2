"""EngineService over gRPC: one handler per call, no logic beyond moving messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from warhorse.v1 import engine_pb2 as pb
from warhorse.v1 import engine_pb2_grpc

from services.common.describe import service_info
from services.common.shm import region_counts
from services.engine.front import Front
from services.engine.outbox import TokenOutbox
from services.engine.shared_call import serve_shared

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[Any, Any]

SERVICE_NAME = "warhorse.v1.EngineService"


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """Answers direct clients and the gateway; holds no state of its own."""

    def __init__(self, front: Front, instance_id: str, generation: int) -> None:
        self._front = front
        self._instance_id = instance_id
        self._generation = generation

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        """Stream the request's events. The end of the call, however it comes, ends the request."""
        await self._front.complete(request)
        outbox = self._front.open(request, context.time_remaining())
        try:
            await _pump(outbox, context)
        except asyncio.CancelledError:
            if outbox.error is None:
                raise
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            raise outbox.error from None
        finally:
            self._front.close(outbox)

    async def GenerateMany(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.GenerateManyRequest], context: Context
    ) -> None:
        """Stream the events of many requests. The end of the call ends them all."""
        await serve_shared(self._front, context)

    async def Abort(  # noqa: N802
        self, request: pb.AbortRequest, context: Context
    ) -> pb.AbortResponse:
        """End requests out of band."""
        return pb.AbortResponse(aborted=self._front.abort(request.request_ids))

    async def DescribeEngine(  # noqa: N802
        self, request: pb.DescribeEngineRequest, context: Context
    ) -> pb.DescribeEngineResponse:
        """What runs here; regions are those of front and core together."""
        response = await self._front.describe()
        response.service.CopyFrom(service_info(self._instance_id, self._generation))
        regions, nbytes = region_counts()
        response.open_regions += regions
        response.region_bytes += nbytes
        return response

    async def Load(  # noqa: N802
        self, request: pb.LoadRequest, context: Context
    ) -> AsyncIterator[pb.LoadResponse]:
        """Load records for as long as the caller listens."""
        with self._front.load.watch() as watcher:
            while True:
                yield await watcher.next()

    async def Drain(  # noqa: N802
        self, request: pb.DrainRequest, context: Context
    ) -> pb.DrainResponse:
        """Refuse new requests; answers when the last running one ended."""
        await self._front.drain()
        return pb.DrainResponse()

    async def ResetPrefixCache(  # noqa: N802
        self, request: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        """Drop what only the prefix index holds."""
        return pb.ResetPrefixCacheResponse(pages_dropped=await self._front.reset_prefix_cache())

    async def ProfileEngine(  # noqa: N802
        self, request: pb.ProfileEngineRequest, context: Context
    ) -> pb.ProfileEngineResponse:
        """Record the steps, or stop and write what was recorded."""
        return pb.ProfileEngineResponse(file=await self._front.profile(start=request.start))


async def _pump(outbox: TokenOutbox, context: Context) -> None:
    # By itself: the library cannot end a call whose first write, which would carry it, is given up.
    await context.send_initial_metadata(())
    outbox.bind_writer(asyncio.current_task())
    while (event := await outbox.next()) is not None:
        await context.write(event)
