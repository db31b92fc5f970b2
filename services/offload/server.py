"""One life of the offload service: tables, broker and gRPC server."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from warhorse.v1 import offload_pb2, offload_pb2_grpc

from services.common.broker import RegionBroker
from services.common.checkpoint import Checkpoint, CheckpointError
from services.common.describe import new_generation
from services.common.errors import StartupError
from services.common.grpc_server import GrpcServer
from services.common.metrics import ProcessMetrics
from services.common.ngram.message import table_message
from services.common.ngram_table import find_tables
from services.common.tracing import make_tracer
from services.offload.config import OffloadConfig
from services.offload.service import SERVICE_NAME, OffloadServicer, Served
from services.offload.tables import OpenTable, open_tables, owned_directory


async def serve(config: OffloadConfig) -> None:
    """Load or adopt the tables, then run until a stop signal. The table files stay."""
    with ExitStack() as cleanup:
        cleanup.enter_context(owned_directory(config.tables))
        tables = await asyncio.to_thread(_open, config)
        for table in tables:
            cleanup.callback(table.close)
        tracer = make_tracer("offload", config.instance, config.otlp_traces_endpoint)
        cleanup.callback(tracer.close)
        metrics = ProcessMetrics()
        server = GrpcServer(
            "offload",
            config.instance,
            config.run_dir,
            listen=config.listen,
            metrics=metrics,
            tracer=tracer,
        )
        broker = RegionBroker(config.run_dir / "offload" / f"{config.instance}.fd", config.instance)
        cleanup.callback(broker.close)
        served = [Served(t, _message(t, broker)) for t in tables]
        servicer = OffloadServicer(config.instance, new_generation(), served)
        metrics.add(*servicer.readings())
        cleanup.enter_context(metrics.served(config.metrics_host, config.metrics_port))
        offload_pb2_grpc.add_OffloadServiceServicer_to_server(servicer, server.server)
        await server.start()
        server.set_serving(SERVICE_NAME, True)
        await server.run_until_signal()


def _message(table: OpenTable, broker: RegionBroker) -> offload_pb2.Table:
    if table.region is None:
        return table_message(table.layout, offload_pb2.TABLE_STORAGE_FILE)
    region = broker.publish(table.region)
    return table_message(table.layout, offload_pb2.TABLE_STORAGE_MEMORY, region)


def _open(config: OffloadConfig) -> tuple[OpenTable, ...]:
    try:
        with Checkpoint.open(config.model) as checkpoint:
            layouts = find_tables(checkpoint)
        return open_tables(layouts, config.table_storage, config.tables, config.instance)
    except CheckpointError as error:
        raise StartupError(f"the checkpoint is refused: {error}") from error
