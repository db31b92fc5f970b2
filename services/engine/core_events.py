"""Between the ring's messages and the engine core's own types; used inside the core process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import numpy as np
from warhorse.v1 import engine_pb2 as pb
from warhorse.v1.common_pb2 import ErrorReason
from warhorse.v1.stage_pb2 import CoreRefusal, CoreSubmit
from warhorse.v1.tokenizer_pb2 import ImageInput

from services.common.prefix_chain import SHORT_BYTES, UnitHash
from services.engine.images import ImageSpan
from services.engine.plan_codec import decode_budget
from services.engine.sampling.params import GrammarUse
from services.engine.scheduler.messages import (
    CoreLoad,
    EngineEvent,
    FinishedOut,
    ProgressOut,
    PromptDone,
    Request,
    RequestRefused,
    RequestSampling,
    RequestStopping,
    TokensOut,
)
from services.engine.scheduler.plan import Logprob

RETRY_REASONS = (
    ErrorReason.ERROR_REASON_QUEUE_FULL,
    ErrorReason.ERROR_REASON_POOL_EXHAUSTED,
    ErrorReason.ERROR_REASON_STALE_GENERATION,  # of a picture: rendering publishes it again
)
RETRY_SECONDS = 1.0


def to_request(submit: CoreSubmit) -> Request:
    """The core's form of a request that the front has validated and completed."""
    request = submit.request
    prompt = np.frombuffer(request.prompt_token_ids, dtype="<u4")
    output = request.output
    return Request(
        request_id=submit.request_id,
        prompt_token_ids=tuple(prompt.tolist()),
        stopping=_stopping(request.stopping),
        sampling=_sampling(request.sampling, _grammar(request)),
        logprobs=output.logprobs if output.HasField("logprobs") else None,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        logprob_token_ids=tuple(output.logprob_token_ids),
        n=request.n,
        priority=request.priority,
        cache_salt=request.cache_salt,
        images=tuple(_span(image) for image in request.images),
        queue_timeout=_seconds_until(submit.deadline_ns),
    )


def _span(image: ImageInput) -> ImageSpan:
    height, width, _ = image.pixels.shape
    return ImageSpan(image.offset, image.length, image.digest, height, width)


def _seconds_until(deadline_ns: int) -> float | None:
    """Both processes read the same monotonic clock of the host."""
    return max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9) if deadline_ns else None


def _stopping(stopping: pb.StoppingParams) -> RequestStopping:
    return RequestStopping(
        max_tokens=stopping.max_tokens,
        min_tokens=stopping.min_tokens,
        stop_token_ids=tuple(stopping.stop_token_ids),
        eos_token_ids=tuple(stopping.eos_token_ids),
        ignore_eos=stopping.ignore_eos,
    )


def _grammar(request: pb.GenerateRequest) -> GrammarUse | None:
    if not request.HasField("grammar"):
        return None
    grammar = request.grammar
    after = grammar.after_token_id if grammar.HasField("after_token_id") else None
    return GrammarUse(grammar.compiled, after)


def _sampling(sampling: pb.SamplingParams, grammar: GrammarUse | None) -> RequestSampling:
    return RequestSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias={b.token_id: b.bias for b in sampling.logit_bias},
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        grammar=grammar,
        bad_words=tuple(tuple(word.token_ids) for word in sampling.bad_words),
        thinking_budget=decode_budget(sampling),
    )


def to_refusal(refused: RequestRefused) -> CoreRefusal:
    """Why the core did not take a request, and when to come again where that helps."""
    refusal = CoreRefusal(reason=refused.reason, message=refused.message, field=refused.field)
    if refused.reason in RETRY_REASONS:
        refusal.retry_after_seconds = RETRY_SECONDS
    return refusal


def to_response(event: EngineEvent) -> pb.GenerateResponse:
    """The message that a reader of the stream gets."""
    match event:
        case TokensOut():
            return pb.GenerateResponse(
                chunk=pb.TokenChunk(
                    choice=event.choice,
                    token_ids=event.tokens,
                    logprobs=_logprobs(event.logprobs),
                )
            )
        case FinishedOut():
            return pb.GenerateResponse(
                finished=pb.Finished(
                    choice=event.choice,
                    reason=event.reason,
                    stop_token_id=event.stop_token_id,
                    completion_tokens=event.completion_tokens,
                    error=event.error,
                    error_message=event.error_message,
                    preemptions=event.preemptions,
                )
            )
        case PromptDone():
            return pb.GenerateResponse(
                prompt_done=pb.PromptDone(
                    cached_tokens=event.cached,
                    external_cached_tokens=event.external_cached,
                    prompt_logprobs=_logprobs(event.prompt_logprobs),
                    queue_seconds=event.queue_seconds,
                    prefill_seconds=event.prefill_seconds,
                    created_cache_tokens=event.created,
                )
            )
        case ProgressOut():
            progress = pb.Progress(prefilled_tokens=event.prefilled, total_tokens=event.total)
            return pb.GenerateResponse(progress=progress)


def _logprobs(logprobs: Iterable[Logprob]) -> list[pb.TokenLogprob]:
    return [
        pb.TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            top=[pb.TopLogprob(token_id=t, logprob=p) for t, p in entry.top],
        )
        for entry in logprobs
    ]


def to_load_record(
    load: CoreLoad, silence_seconds: float, news: Mapping[UnitHash, bool]
) -> pb.LoadResponse:
    """The load record as it is pushed to watchers; `news` as in `EngineCore.prefix_news`."""
    return pb.LoadResponse(
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        kv_usage=load.kv_usage,
        preemptions=load.preemptions,
        prompt_tokens=load.prompt_tokens,
        generation_tokens=load.generation_tokens,
        prefix_queries_tokens=load.prefix_queries_tokens,
        prefix_hit_tokens=load.prefix_hit_tokens,
        external_query_tokens=load.external_query_tokens,
        external_hit_tokens=load.external_hit_tokens,
        prefixes_gone=b"".join(h[:SHORT_BYTES] for h, came in news.items() if not came),
        prefixes_added=b"".join(h[:SHORT_BYTES] for h, came in news.items() if came),
        silence_ms=int(silence_seconds * 1000),
        steps_by_tokens=load.steps_by_tokens,
        step_tokens=load.step_tokens,
        drafts=load.drafts,
        draft_tokens=load.draft_tokens,
        accepted_draft_tokens=load.accepted_draft_tokens,
        accepted_by_position=load.accepted_by_position,
    )


def to_cache_groups(load: CoreLoad) -> list[pb.CacheGroupInfo]:
    """Fill of every pool."""
    return [
        pb.CacheGroupInfo(
            name=group.name,
            kind=group.kind,
            page_tokens=group.page_tokens,
            page_bytes=group.page_bytes,
            total_pages=group.total,
            free_pages=group.free,
            cached_pages=group.cached,
        )
        for group in load.groups
    ]
