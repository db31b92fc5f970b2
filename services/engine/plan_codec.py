"""Step plans and results as protobuf messages, for ranks and stages outside this process.

Encoding and decoding are exact inverses: a plan that was sent equals the plan that arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from warhorse.v1 import engine_pb2
from warhorse.v1 import stage_pb2 as pb

from services.engine.cache.spec import PageId, SlotId
from services.engine.images import ImageSpan
from services.engine.sampling.params import GrammarUse, SamplingParams, ThinkingBudget
from services.engine.scheduler.plan import (
    Logprob,
    SequenceBegin,
    SequenceId,
    SequenceResult,
    SequenceStep,
    StepPlan,
    StepResult,
)


def encode_plan(plan: StepPlan) -> pb.StepPlan:
    """The message of a plan."""
    return pb.StepPlan(
        number=plan.number,
        sequences=[_encode_step(step) for step in plan.sequences],
        ended=plan.ended,
        zero=_encode_groups(plan.zero),
        garbage=_encode_groups(plan.garbage),
    )


def decode_plan(message: pb.StepPlan) -> StepPlan:
    """The plan of a message."""
    return StepPlan(
        number=message.number,
        sequences=tuple(_decode_step(step) for step in message.sequences),
        ended=tuple(SequenceId(s) for s in message.ended),
        zero=_decode_groups(message.zero),
        garbage=_decode_groups(message.garbage),
    )


def encode_result(result: StepResult) -> pb.StepResult:
    """The message of a result."""
    return pb.StepResult(
        number=result.number,
        sequences=[
            pb.SequenceResult(
                sequence=s.sequence,
                token_ids=s.token_ids,
                logprobs=_encode_logprobs(s.logprobs),
                prompt_logprobs=_encode_logprobs(s.prompt_logprobs),
                finite=s.finite,
            )
            for s in result.sequences
        ],
    )


def decode_result(message: pb.StepResult) -> StepResult:
    """The result of a message."""
    return StepResult(
        number=message.number,
        sequences=tuple(
            SequenceResult(
                sequence=SequenceId(s.sequence),
                token_ids=tuple(s.token_ids),
                logprobs=_decode_logprobs(s.logprobs),
                prompt_logprobs=_decode_logprobs(s.prompt_logprobs),
                finite=s.finite,
            )
            for s in message.sequences
        ),
    )


def _encode_step(step: SequenceStep) -> pb.SequenceStep:
    return pb.SequenceStep(
        sequence=step.sequence,
        start=step.start,
        token_ids=_pack_tokens(step.token_ids),
        ngram_context=_pack_tokens(step.ngram_context),
        new_pages=_encode_groups(step.new_pages),
        freed_pages=[pb.FreedPages(group=g, count=n) for g, n in step.freed_pages.items()],
        state_read=[pb.StateRead(group=g, slot=slot) for g, slot in step.state_read.items()],
        state_writes=[
            pb.StateWrites(group=g, writes=[pb.StateWrite(token=t, slot=s) for t, s in writes])
            for g, writes in step.state_writes.items()
        ],
        begin=None if step.begin is None else _encode_begin(step.begin),
        sample_from=step.sample_from,
        prompt_logprobs=step.prompt_logprobs,
        prompt_targets=_pack_tokens(step.prompt_targets),
    )


def _decode_step(message: pb.SequenceStep) -> SequenceStep:
    return SequenceStep(
        sequence=SequenceId(message.sequence),
        start=message.start,
        token_ids=_unpack_tokens(message.token_ids),
        ngram_context=_unpack_tokens(message.ngram_context),
        new_pages={
            group: tuple(PageId(i) for i in ids)
            for group, ids in _decode_groups(message.new_pages).items()
        },
        freed_pages={f.group: f.count for f in message.freed_pages},
        state_read={
            r.group: SlotId(r.slot) if r.HasField("slot") else None for r in message.state_read
        },
        state_writes={
            w.group: tuple((write.token, SlotId(write.slot)) for write in w.writes)
            for w in message.state_writes
        },
        begin=_decode_begin(message.begin) if message.HasField("begin") else None,
        sample_from=message.sample_from if message.HasField("sample_from") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        prompt_targets=_unpack_tokens(message.prompt_targets),
    )


def _encode_begin(begin: SequenceBegin) -> pb.SequenceBegin:
    return pb.SequenceBegin(
        sampling=_encode_sampling(begin.sampling),
        prompt_token_ids=_pack_tokens(begin.prompt_token_ids),
        output_token_ids=_pack_tokens(begin.output_token_ids),
        output_tokens=begin.output_tokens,
        images=[
            pb.ImagePlace(
                offset=image.offset,
                length=image.length,
                digest=image.digest,
                height=image.height,
                width=image.width,
            )
            for image in begin.images
        ],
    )


def _decode_begin(message: pb.SequenceBegin) -> SequenceBegin:
    return SequenceBegin(
        sampling=_decode_sampling(message.sampling),
        prompt_token_ids=_unpack_tokens(message.prompt_token_ids),
        output_token_ids=_unpack_tokens(message.output_token_ids),
        output_tokens=message.output_tokens,
        images=tuple(
            ImageSpan(image.offset, image.length, image.digest, image.height, image.width)
            for image in message.images
        ),
    )


def _encode_sampling(sampling: SamplingParams) -> pb.SequenceSampling:
    return pb.SequenceSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        stop_token_ids=sampling.stop_token_ids,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
        logprob_token_ids=sampling.logprob_token_ids,
        grammar=_encode_grammar(sampling.grammar),
        bad_words=[engine_pb2.TokenSequence(token_ids=word) for word in sampling.bad_words],
        thinking_budget=_encode_budget(sampling.thinking_budget),
    )


def _encode_grammar(grammar: GrammarUse | None) -> pb.SequenceGrammar | None:
    if grammar is None:
        return None
    return pb.SequenceGrammar(compiled=grammar.compiled, after_token_id=grammar.after_token_id)


def _encode_budget(budget: ThinkingBudget | None) -> engine_pb2.ThinkingBudget | None:
    if budget is None:
        return None
    return engine_pb2.ThinkingBudget(tokens=budget.tokens, end_token_id=budget.end_token_id)


def decode_budget(
    message: pb.SequenceSampling | engine_pb2.SamplingParams,
) -> ThinkingBudget | None:
    """The budget that a message holds."""
    if not message.HasField("thinking_budget"):
        return None
    return ThinkingBudget(message.thinking_budget.tokens, message.thinking_budget.end_token_id)


def _decode_grammar(message: pb.SequenceSampling) -> GrammarUse | None:
    if not message.HasField("grammar"):
        return None
    grammar = message.grammar
    after = grammar.after_token_id if grammar.HasField("after_token_id") else None
    return GrammarUse(grammar.compiled, after)


def _decode_sampling(message: pb.SequenceSampling) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
        stop_token_ids=tuple(message.stop_token_ids),
        min_tokens=message.min_tokens,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        logprob_token_ids=tuple(message.logprob_token_ids),
        grammar=_decode_grammar(message),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        thinking_budget=decode_budget(message),
    )


def _encode_groups(groups: Mapping[str, Sequence[int]]) -> list[pb.GroupIds]:
    return [
        pb.GroupIds(group=group, ids=np.asarray(ids, dtype="<i4").tobytes())
        for group, ids in groups.items()
    ]


def _decode_groups(messages: Iterable[pb.GroupIds]) -> dict[str, tuple[int, ...]]:
    return {m.group: tuple(np.frombuffer(m.ids, dtype="<i4").tolist()) for m in messages}


def _pack_tokens(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()


def _unpack_tokens(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(data, dtype="<u4").tolist())


def _encode_logprobs(logprobs: Iterable[Logprob]) -> list[pb.StepLogprob]:
    return [
        pb.StepLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            rank=entry.rank,
            top=[pb.StepTopLogprob(token_id=t, logprob=p) for t, p in entry.top],
        )
        for entry in logprobs
    ]


def _decode_logprobs(messages: Iterable[pb.StepLogprob]) -> tuple[Logprob, ...]:
    return tuple(
        Logprob(
            token_id=m.token_id,
            logprob=m.logprob,
            rank=m.rank,
            top=tuple((t.token_id, t.logprob) for t in m.top),
        )
        for m in messages
    )
