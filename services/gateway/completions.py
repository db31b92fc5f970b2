"""POST /v1/completions: prompts of text or token ids, without any chat format."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from warhorse.v1 import engine_pb2, tokenizer_pb2

from services.gateway.chat_options import Envelope
from services.gateway.completion_writers import (
    CompletionBodyWriter,
    CompletionOptions,
    CompletionStreamWriter,
)
from services.gateway.extra_tokens import bad_word_tokens, filled_middle
from services.gateway.generation import EventStream
from services.gateway.identity import engine_request_id, fingerprint
from services.gateway.origins import FieldNames
from services.gateway.plan import GenerationPlan, Prompt
from services.gateway.respond import Writer
from services.gateway.sampling import (
    ModelFacts,
    check_ids,
    check_logprobs,
    check_request,
    check_text_size,
    max_tokens,
    output_params,
    parse_open,
    sampling_params,
    stopping_params,
    truncate,
)
from services.gateway.schema.completion import CompletionRequest
from services.gateway.state import GatewayState
from services.gateway.structured import output_grammar, placed
from services.gateway.tokens import pack

DEFAULT_MAX_TOKENS = 16


class CompletionJob:
    """One completion request of one or more prompts."""

    names: FieldNames | None = None

    def __init__(self, request: CompletionRequest, request_id: str, state: GatewayState) -> None:
        self._request = request
        self._request_id = request_id
        self._state = state
        self.streaming = bool(request.stream)
        self.meter = state.meter()
        self._envelope = Envelope("", 0, "", "")
        self._options = CompletionOptions.of(request, state.config)

    async def prepare(self) -> Sequence[GenerationPlan]:
        """Check, encode, resolve; choices are numbered prompt by prompt."""
        request, state = self._request, self._state
        facts = await state.facts(request.model)
        self.meter.model = facts.served_as
        self._envelope = Envelope(
            f"cmpl-{self._request_id}", int(time.time()), self.meter.model, fingerprint(facts)
        )
        check_request(request, facts)
        check_logprobs("logprobs", request.logprobs, facts)
        n = request.n or 1
        self.meter.choices = n
        prompts = [await completion_prompt(p, request, state, facts) for p in request.prompt]
        words = await bad_word_tokens(request.bad_words, state.tokenizers)
        sampling = sampling_params(request, facts, words)
        return [self._plan(p, i * n, facts, sampling) for i, p in enumerate(prompts)]

    def writer(self, stream: EventStream) -> Writer:
        """SSE frames or one body."""
        kind = CompletionStreamWriter if self.streaming else CompletionBodyWriter
        return kind(self._envelope, self._options, stream)

    def _plan(
        self,
        prompt: Prompt,
        first_choice: int,
        facts: ModelFacts,
        sampling: engine_pb2.SamplingParams,
    ) -> GenerationPlan:
        request = self._request
        asked = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        most = max_tokens(asked, prompt, facts, "max_tokens", "prompt")
        self.meter.max_tokens = most
        wanted = output_grammar(request)
        opening = parse_open(request, self._request_id, prompt)
        opening.tool_call_parser = opening.reasoning_parser = "none"
        return GenerationPlan(
            prompt=prompt,
            request=engine_pb2.GenerateRequest(
                request_id=engine_request_id(self._request_id),
                model=facts.name,
                prompt_token_ids=prompt.token_ids,
                sampling=sampling,
                stopping=stopping_params(request, prompt, most),
                output=self._output(most),
                n=request.n or 1,
                priority=request.priority or 0,
                cache_salt=request.cache_salt or "",
                grammar=placed(wanted, prompt),
            ),
            parse=opening,
            first_choice=first_choice,
            stream_interval=request.stream_interval or 1,
            restartable=not self.streaming,
            deadline_seconds=self._state.config.request_timeout_seconds,
            grammar_field=wanted.field if wanted else "",
        )

    def _output(self, most: int) -> engine_pb2.OutputParams:
        request = self._request
        output = output_params(request, request.logprobs)
        if request.prompt_logprobs is not None:
            return output
        if self._options.echo_logprobs:
            output.prompt_logprobs = request.logprobs or 0
        elif most == 0:  # a prompt alone is computed only for its log-probabilities
            output.prompt_logprobs = 0
        return output


async def completion_prompt(
    given: str | list[int], request: CompletionRequest, state: GatewayState, facts: ModelFacts
) -> Prompt:
    """The tokens of one prompt; with its text where the request wants it echoed.

    The echoed text lacks the bytes of a character that is cut at its end: the parser knows the
    prompt's last tokens and completes such a character itself.
    """
    info = state.tokenizers.info
    eos = tuple(info.stop_token_ids) if info else ()
    token_ids = await _encoded(given, request, state, facts)
    if request.suffix:
        token_ids = await filled_middle(token_ids, request.suffix, state.tokenizers)
    prompt = truncate(request, Prompt(token_ids, eos_token_ids=eos), facts)
    if not request.echo:
        return prompt
    whole = prompt.token_ids == token_ids and not request.suffix
    if isinstance(given, str) and whole:
        return replace(prompt, text=given)
    return replace(prompt, text=await state.tokenizers.complete_text(prompt.token_ids))


async def _encoded(
    given: str | list[int], request: CompletionRequest, state: GatewayState, facts: ModelFacts
) -> bytes:
    if not isinstance(given, str):
        check_ids("prompt", given, facts)
        return pack(given)
    check_text_size(len(given), facts, "prompt")
    encoding = tokenizer_pb2.EncodeRequest(text=given)
    encoding.add_special_tokens = request.add_special_tokens is not False
    return await state.tokenizers.encode(encoding)
