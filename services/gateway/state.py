"""What all requests of a gateway share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.common.grpc_client import socket_target
from services.common.tracing import Tracer, make_tracer
from services.gateway.config import GatewayConfig
from services.gateway.engines import Engines
from services.gateway.errors import NOT_FOUND, ApiError, shorten
from services.gateway.live import LiveRequests
from services.gateway.meter import RequestMeter
from services.gateway.metrics import Metrics
from services.gateway.patience import Patience
from services.gateway.queue import Queue
from services.gateway.responses.store import ResponseStore
from services.gateway.sampling import ModelFacts
from services.gateway.schema.defaults import of_checkpoint
from services.gateway.tokenizers import Tokenizers


@dataclass(frozen=True, slots=True)
class GatewayState:
    """Peers, metrics and settings; made once, before the event loop serves requests."""

    config: GatewayConfig
    engines: Engines
    tokenizers: Tokenizers
    metrics: Metrics
    live: LiveRequests
    responses: ResponseStore
    queue: Queue
    tracer: Tracer

    @classmethod
    def create(cls, config: GatewayConfig) -> GatewayState:
        """Connect (lazily) to the peers of `config`. Needs a running event loop."""
        engines = Engines(
            _targets(config.engine_address, config.run_dir, "engine"), config.peer_wait_seconds
        )
        tokenizers = Tokenizers(
            _targets(config.tokenizer_address, config.run_dir, "tokenizer"),
            config.peer_wait_seconds,
        )
        responses = ResponseStore(config.response_store_mb << 20, config.response_store_seconds)
        return cls(
            config,
            engines,
            tokenizers,
            Metrics(engines.set.peers),
            LiveRequests(),
            responses,
            Queue(config.max_num_queued),
            make_tracer("gateway", "gateway-0", config.otlp_traces_endpoint),
        )

    async def start(self) -> None:
        """Begin to watch the peers."""
        await self.engines.set.start()
        await self.tokenizers.set.start()

    async def stop(self) -> None:
        """Close the channels."""
        await self.engines.stop()
        await self.tokenizers.stop()
        await asyncio.to_thread(self.tracer.close)

    @property
    def healthy(self) -> bool:
        """Whether requests can be served now."""
        return bool(self.engines.set.healthy() and self.tokenizers.set.healthy())

    @property
    def patience(self) -> Patience:
        """How long clients may be idle or stalled."""
        return Patience(self.config.sse_keep_alive_interval, self.config.stall_seconds)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that requests may ask for; empty until an engine was seen."""
        info = self.engines.info
        own = (info.model.name,) if info else ()
        return self.config.served_model_name or own

    def meter(self) -> RequestMeter:
        """A meter for a request that begins now."""
        return RequestMeter(self.metrics)

    async def facts(self, asked: str | None = None) -> ModelFacts:
        """What the model that a request asks for allows; None: any.

        Waits for an engine and a tokenizer as requests do. Raises ApiError 404 for a model that is
        not served.
        """
        await self.engines.set.pick(lambda _: 0.0)
        await self.tokenizers.set.pick(lambda _: 0.0)
        info = self.engines.info
        if info is None:
            raise ApiError(503, "ServiceUnavailableError", "No engine is serving at the moment.")
        return ModelFacts(
            name=info.model.name,
            served_as=self._name_of(asked),
            fingerprint=info.model.fingerprint,
            family=info.model.family,
            vocab_size=info.model.vocab_size,
            max_model_len=info.model.max_model_len,
            defaults=self._defaults(),
            max_logprobs=self.config.max_logprobs,
        )

    @property
    def takes_images(self) -> bool:
        """Whether messages may hold images: nobody who was asked says no."""
        infos = (self.tokenizers.info, self.engines.info)
        return all(info.model.takes_images for info in infos if info is not None)

    def _defaults(self) -> dict[str, object]:
        found = self.tokenizers.generation_config if self.config.generation_config == "auto" else {}
        merged = {**of_checkpoint(found), **self.config.generation_overrides}
        return {name: value for name, value in merged.items() if value is not None}

    def _name_of(self, asked: str | None) -> str:
        names = self.model_names
        if asked and asked not in names:
            message = f"The model `{shorten(asked)}` does not exist."
            raise ApiError(404, NOT_FOUND, message, param="model")
        return names[0]


def _targets(addresses: Sequence[str], run_dir: Path, service: str) -> tuple[str, ...]:
    return tuple(addresses) or (socket_target(run_dir, service),)
