"""One life of the tokenizer service."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from warhorse.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

from services.common.broker import RegionBroker
from services.common.describe import new_generation
from services.common.grpc_client import MAX_RENDER_BYTES
from services.common.grpc_server import GrpcServer
from services.common.metrics import ProcessMetrics
from services.common.tracing import make_tracer
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.folder import TokenizerFolder
from services.tokenizer.images.publish import PictureStore
from services.tokenizer.images.reader import ImageReader
from services.tokenizer.lanes import ParseWatch
from services.tokenizer.parsers import parsers_of
from services.tokenizer.parsing.registry import ParserNames
from services.tokenizer.renderers import Pools, Renderers
from services.tokenizer.rendering.efforts import effort_map
from services.tokenizer.rendering.pool import RenderPool
from services.tokenizer.service import SERVICE_NAME, TokenizerServicer


async def serve(config: TokenizerConfig) -> None:
    """Run until a stop signal. Raises StartupError for files or settings that do not serve."""
    folder = await asyncio.to_thread(TokenizerFolder.open, config.model, config.chat_template)
    names = parsers_of(folder, config.tool_call_parser, config.reasoning_parser)
    strict = config.tool_call_recovery == "strict"
    async with AsyncExitStack() as cleanup:
        pools = Pools(
            RenderPool(config.limits, config.render_workers), RenderPool(config.limits, workers=1)
        )
        cleanup.push_async_callback(pools.close)
        tracer = make_tracer("tokenizer", config.instance, config.otlp_traces_endpoint)
        cleanup.callback(tracer.close)
        metrics = ProcessMetrics()
        server = GrpcServer(
            "tokenizer",
            config.instance,
            config.run_dir,
            listen=config.listen,
            open_ended=(f"/{SERVICE_NAME}/ParseMany",),
            max_receive_bytes=MAX_RENDER_BYTES,
            metrics=metrics,
            tracer=tracer,
        )
        reader = _reader(config, folder, cleanup)
        card = _card(config, folder, names)
        card.model.takes_images = reader is not None
        renderers = Renderers(folder, pools, effort_map(config.reasoning_effort_map))
        await renderers.start()
        watch = ParseWatch(tracer)
        metrics.add(*watch.readings())
        servicer = TokenizerServicer(
            folder, names, renderers, card, reader, strict_calls=strict, watch=watch
        )
        cleanup.enter_context(metrics.served(config.metrics_host, config.metrics_port))
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(servicer, server.server)
        await server.start()
        server.set_serving(SERVICE_NAME, True)
        await server.run_until_signal(servicer.drain)


def _reader(
    config: TokenizerConfig, folder: TokenizerFolder, cleanup: AsyncExitStack
) -> ImageReader | None:
    """The reader of images with its broker and store; None where the model takes none."""
    if folder.images is None or config.images_per_request == 0:
        return None
    limits, name = config.image_limits, config.instance or "tokenizer-0"
    broker = RegionBroker(config.run_dir / "tokenizer" / f"{name}.fd", name)
    cleanup.callback(broker.close)
    store = PictureStore(broker, name, limits.caching)
    cleanup.callback(store.close)
    reader = ImageReader(folder.images, limits, store)
    cleanup.push_async_callback(reader.close)
    return reader


def _card(
    config: TokenizerConfig, folder: TokenizerFolder, names: ParserNames
) -> tokenizer_pb2.DescribeTokenizerResponse:
    return tokenizer_pb2.DescribeTokenizerResponse(
        service=common_pb2.ServiceInfo(
            instance_id=config.instance or "tokenizer-0", generation=new_generation()
        ),
        model=common_pb2.ModelInfo(
            name=config.served_model_name or folder.name,
            family=folder.family.name,
            tokenizer_sha256=folder.tokenizer_sha256,
            vocab_size=folder.vocabulary.size,
            max_model_len=config.max_model_len or folder.max_model_len,
        ),
        tool_call_parser=names.tools,
        reasoning_parser=names.reasoning,
        has_chat_template=folder.template is not None or folder.dialect is not None,
        generation_config_json=folder.generation_config,
        stop_token_ids=folder.stop_token_ids,
        special_token_ids=folder.vocabulary.special_ids,
    )
