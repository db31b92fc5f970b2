"""POST /inference/v1/generate: a completion whose prompt and output stay token ids."""

from __future__ import annotations

from services.gateway.body import validate
from services.gateway.completions import CompletionJob
from services.gateway.errors import bad_request
from services.gateway.generation import EventStream
from services.gateway.respond import Writer
from services.gateway.schema.completion import CompletionRequest
from services.gateway.schema.native import TokensRequest
from services.gateway.state import GatewayState
from services.gateway.token_writers import TokenBodyWriter, TokenOptions, TokenStreamWriter
from services.gateway.unsupported import COMMON_ONLY

_OF_THE_ENVELOPE = ("prompt", "stream", "stream_options", "model", "echo")


class TokensJob(CompletionJob):
    """One request. Raises ApiError 400 where its sampling parameters are wrong."""

    def __init__(self, request: TokensRequest, request_id: str, state: GatewayState) -> None:
        for name in _OF_THE_ENVELOPE:
            if name in (request.sampling_params or {}):
                message = f"`sampling_params` must not hold `{name}`."
                raise bad_request(message, f"sampling_params.{name}")
        fields = validate(CompletionRequest, request.completion_fields(), COMMON_ONLY)
        super().__init__(fields, request_id, state)
        usage = request.stream_options
        self._shown = TokenOptions(
            request_id=request_id,
            logprobs=fields.logprobs is not None,
            prompt_logprobs=fields.prompt_logprobs is not None,
            include_usage=bool(usage and usage.include_usage),
        )

    def writer(self, stream: EventStream) -> Writer:
        """SSE frames or one body."""
        kind = TokenStreamWriter if self.streaming else TokenBodyWriter
        return kind(self._shown, stream)
