"""One life of the tokenizer service."""

from __future__ import annotations

import asyncio

from warhorse.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

from services.common.describe import new_generation
from services.common.grpc_server import GrpcServer
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.folder import TokenizerFolder
from services.tokenizer.parsers import parsers_of
from services.tokenizer.parsing.registry import ParserNames
from services.tokenizer.rendering.pool import RenderPool
from services.tokenizer.service import SERVICE_NAME, Pools, TokenizerServicer


async def serve(config: TokenizerConfig) -> None:
    """Run until a stop signal. Raises StartupError for files or settings that do not serve."""
    folder = await asyncio.to_thread(TokenizerFolder.open, config.model, config.chat_template)
    names = parsers_of(folder, config.tool_call_parser, config.reasoning_parser)
    pools = Pools(
        RenderPool(config.limits, config.render_workers), RenderPool(config.limits, workers=1)
    )
    server = GrpcServer(
        "tokenizer",
        config.instance,
        config.run_dir,
        listen=config.listen,
        open_ended=(f"/{SERVICE_NAME}/ParseMany",),
    )
    servicer = TokenizerServicer(folder, names, pools, _card(config, folder, names))
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(servicer, server.server)
    try:
        await pools.own.start()
        await server.start()
        server.set_serving(SERVICE_NAME, True)
        await server.run_until_signal(servicer.drain)
    finally:
        await pools.close()


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
        has_chat_template=folder.template is not None,
        generation_config_json=folder.generation_config,
        stop_token_ids=folder.stop_token_ids,
        special_token_ids=folder.vocabulary.special_ids,
    )
