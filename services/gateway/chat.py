"""POST /v1/chat/completions: from a valid request to a plan and a writer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from warhorse.v1 import engine_pb2, tokenizer_pb2

from services.gateway.chat_body import ChatBodyWriter
from services.gateway.chat_options import ChatOptions, Envelope
from services.gateway.chat_stream import ChatStreamWriter
from services.gateway.conversation import (
    refuse_images,
    render_request,
    text_bytes,
    tool_choice,
    tool_messages,
    tool_name,
)
from services.gateway.deepseek_sampling import follow_deepseek
from services.gateway.errors import bad_request
from services.gateway.extra_tokens import bad_word_tokens, framed
from services.gateway.generation import EventStream
from services.gateway.identity import engine_request_id, fingerprint
from services.gateway.origins import FieldNames
from services.gateway.plan import GenerationPlan, Prompt
from services.gateway.respond import Writer
from services.gateway.sampling import (
    ModelFacts,
    check_logprobs,
    check_messages,
    check_request,
    check_text_size,
    max_tokens,
    output_params,
    parse_open,
    sampling_params,
    stopping_params,
    truncate,
)
from services.gateway.schema.chat import ChatRequest
from services.gateway.state import GatewayState
from services.gateway.structured import Wanted, call_grammar, chosen, output_grammar, placed


class ChatJob:
    """One chat completion."""

    id_prefix = "chatcmpl-"

    def __init__(
        self,
        request: ChatRequest,
        request_id: str,
        state: GatewayState,
        names: FieldNames | None = None,
    ) -> None:
        self._request = request
        self.names = names
        self._request_id = request_id
        self.state = state
        self.streaming = bool(request.stream)
        self.meter = state.meter()
        self.envelope = Envelope("", 0, "", "")

    async def prepare(self) -> Sequence[GenerationPlan]:
        """Check, render, resolve."""
        request, state = self._request, self.state
        facts = await state.facts(request.model)
        self.meter.model = facts.served_as
        self.envelope = Envelope(
            f"{self.id_prefix}{self._request_id}",
            int(time.time()),
            self.meter.model,
            fingerprint(facts),
        )
        check_chat(request, facts)
        prompt = await render_chat(request, state, facts)
        self.meter.on_images(len(prompt.images), prompt.images_kept)
        words = await bad_word_tokens(request.bad_words, state.tokenizers)
        plan = self._plan(prompt, facts, sampling_params(request, facts, words))
        self.meter.choices = plan.request.n
        self.meter.tools = bool(plan.parse.tools)
        self.meter.max_tokens = plan.request.stopping.max_tokens
        return [plan]

    def writer(self, stream: EventStream) -> Writer:
        """SSE frames or one body."""
        options = ChatOptions.of(self._request, self.state.config)
        kind = ChatStreamWriter if self.streaming else ChatBodyWriter
        return kind(self.envelope, options, stream)

    def _plan(
        self, prompt: Prompt, facts: ModelFacts, sampling: engine_pb2.SamplingParams
    ) -> GenerationPlan:
        request = self._request
        _limit_thinking(request, prompt, sampling)
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        asked = getattr(request, name)
        most = max_tokens(asked, prompt, facts, name, "messages")
        opening = self._parse_open(prompt)
        if self.state.config.deepseek_official_sampling:
            follow_deepseek(
                sampling,
                request.top_p,
                family=facts.family,
                thinks=prompt.reasoning_end is not None,
                has_tools=opening.tool_choice != tokenizer_pb2.TOOL_CHOICE_NONE,
            )
        wanted = self._wanted(opening)
        return GenerationPlan(
            prompt=prompt,
            request=engine_pb2.GenerateRequest(
                request_id=engine_request_id(self._request_id),
                model=facts.name,
                prompt_token_ids=prompt.token_ids,
                images=prompt.images,
                sampling=sampling,
                stopping=stopping_params(request, prompt, most),
                output=self._output(),
                n=request.n or 1,
                priority=request.priority or 0,
                cache_salt=request.cache_salt or "",
                grammar=placed(wanted, prompt),
            ),
            parse=opening,
            stream_interval=request.stream_interval or 1,
            restartable=not self.streaming,
            deadline_seconds=self.state.config.request_timeout_seconds,
            grammar_field=wanted.field if wanted else "",
            rerender=partial(render_chat, request, self.state, facts) if prompt.images else None,
        )

    def _wanted(self, opening: tokenizer_pb2.ParseOpen) -> Wanted | None:
        """What the output must look like: forced or strict calls, or a format."""
        info = self.state.tokenizers.info
        calls = call_grammar(
            opening,
            info.tool_call_parser if info else "",
            tool_name(self._request),
            auto=self._strict_calls(),
        )
        forced = opening.tool_choice != tokenizer_pb2.TOOL_CHOICE_AUTO
        return chosen(calls, output_grammar(self._request), forced=forced)

    def _strict_calls(self) -> bool:
        level = self.state.config.tool_strict_level
        tools = self._request.tools or ()
        return level == "function" or (level == "auto" and any(t.function.strict for t in tools))

    def _output(self) -> engine_pb2.OutputParams:
        request = self._request
        return output_params(request, (request.top_logprobs or 0) if request.logprobs else None)

    def _parse_open(self, prompt: Prompt) -> tokenizer_pb2.ParseOpen:
        request, config = self._request, self.state.config
        opening = parse_open(request, self._request_id, prompt)
        opening.tools.extend(tool_messages(request))
        opening.tool_choice = tool_choice(request)
        opening.parallel_tool_calls = request.parallel_tool_calls is not False
        opening.tool_call_parser = config.tool_call_parser
        opening.reasoning_parser = config.reasoning_parser
        is_auto = opening.tool_choice == tokenizer_pb2.TOOL_CHOICE_AUTO
        if is_auto and not config.enable_auto_tool_choice:
            opening.tool_choice = tokenizer_pb2.TOOL_CHOICE_NONE
            opening.tool_call_parser = "none"
        return opening


def _limit_thinking(
    request: ChatRequest, prompt: Prompt, sampling: engine_pb2.SamplingParams
) -> None:
    """Bound the reasoning, where the output begins inside one."""
    budget = request.thinking_token_budget
    if budget not in (None, -1) and prompt.reasoning_end is not None:
        sampling.thinking_budget.tokens = budget
        sampling.thinking_budget.end_token_id = prompt.reasoning_end


def check_chat(request: ChatRequest, facts: ModelFacts) -> None:
    """Relations between the fields of a chat request. Raises ApiError 400."""
    check_request(request, facts)
    if request.top_logprobs is not None:
        if not request.logprobs:
            raise bad_request("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
        check_logprobs("top_logprobs", request.top_logprobs, facts)


async def render_chat(request: ChatRequest, state: GatewayState, facts: ModelFacts) -> Prompt:
    """The prompt of a conversation. Raises ApiError or ServiceError."""
    config = state.config
    check_messages(len(request.messages), facts)
    rendering = render_request(
        request,
        config.template_kwargs,
        trust_template=config.trust_request_chat_template,
    )
    if request.tool_choice == "none" and not config.exclude_tools_when_tool_choice_none:
        rendering.tool_choice = tokenizer_pb2.TOOL_CHOICE_AUTO  # the prompt shows the tools
    check_text_size(text_bytes(request), facts, "messages")
    info = state.tokenizers.info
    if not state.takes_images:
        refuse_images(request)
    answer = await state.tokenizers.render(rendering)
    eos = tuple(answer.stop_token_ids) or tuple(info.stop_token_ids if info else ())
    images = tuple(answer.images)
    end = answer.reasoning_end_token_id if answer.HasField("reasoning_end_token_id") else None
    prompt = Prompt(
        answer.token_ids, answer.text, answer.start_state, eos, images, end, answer.images_kept
    )
    if request.add_special_tokens:
        prompt = await framed(prompt, state.tokenizers)
    return truncate(request, prompt, facts)
