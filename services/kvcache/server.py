"""One life of the kvcache service: arena, broker, store and gRPC server."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
from warhorse.v1 import kvcache_pb2_grpc

from services.common.broker import RegionBroker
from services.common.describe import new_generation
from services.common.grpc_server import GrpcServer
from services.common.metrics import ProcessMetrics
from services.common.shm import Region
from services.common.tracing import make_tracer
from services.kvcache.config import KvCacheConfig
from services.kvcache.service import SERVICE_NAME, Identity, KvCacheServicer
from services.kvcache.storage import ArenaStorage
from services.kvcache.store import KvStore

_SESSION = f"/{SERVICE_NAME}/Session"


async def serve(config: KvCacheConfig) -> None:
    """Run until a stop signal. The arena goes with the process; nothing outlives it."""
    with ExitStack() as cleanup:
        tracer = make_tracer("kvcache", config.instance, config.otlp_traces_endpoint)
        cleanup.callback(tracer.close)
        metrics = ProcessMetrics()
        server = GrpcServer(
            "kvcache",
            config.instance,
            config.run_dir,
            listen=config.listen,
            open_ended=(_SESSION,),
            metrics=metrics,
            tracer=tracer,
        )
        servicer = _build(config, cleanup)
        metrics.add(*servicer.readings())
        cleanup.enter_context(metrics.served(config.metrics_host, config.metrics_port))
        kvcache_pb2_grpc.add_KvCacheServiceServicer_to_server(servicer, server.server)
        await server.start()
        server.set_serving(SERVICE_NAME, True)
        await server.run_until_signal()


def _build(config: KvCacheConfig, cleanup: ExitStack) -> KvCacheServicer:
    generation = new_generation()
    region = Region.create(config.arena_bytes, owner=config.instance)
    cleanup.callback(region.close)
    broker = RegionBroker(config.run_dir / "kvcache" / f"{config.instance}.fd", config.instance)
    cleanup.callback(broker.close)
    identity = Identity(config.instance, generation, broker.publish(region))
    arena = region.array(np.uint8)
    store = KvStore(
        lambda removed: ArenaStorage(arena, config.storage, removed),
        generation,
        config.reservation_grace_seconds,
    )
    cleanup.callback(store.close)
    return KvCacheServicer(store, identity, config.silence_seconds)
