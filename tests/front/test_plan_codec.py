"""Plans and results survive the way over the wire unchanged."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from warhorse.v1 import stage_pb2 as pb

from services.common.checkpoint import Checkpoint
from services.engine.cache.spec import PageId, SlotId
from services.engine.checkpoints.local_table import local_tables
from services.engine.config import CoreConfig
from services.engine.core import EngineCore
from services.engine.images import ImageSpan
from services.engine.models.registry import load_model
from services.engine.plan_codec import decode_plan, decode_result, encode_plan, encode_result
from services.engine.runtime.executor import LocalExecutor
from services.engine.sampling.params import SamplingParams, ThinkingBudget
from services.engine.scheduler.messages import (
    Request,
    RequestSampling,
    RequestStopping,
    TokensOut,
)
from services.engine.scheduler.plan import (
    Executor,
    Logprob,
    SequenceBegin,
    SequenceId,
    SequenceResult,
    SequenceStep,
    StepPlan,
    StepResult,
)
from tests.models.tiny import save_tiny

TOKEN = st.integers(0, 2**32 - 1)
TOKENS = st.lists(TOKEN, max_size=8).map(tuple)
ID = st.integers(0, 2**31 - 1)
COUNT = st.integers(0, 2**32 - 1)
FLOAT = st.floats(allow_nan=False)
GROUP = st.text(string.ascii_lowercase, min_size=1, max_size=4)
SEQUENCE = st.integers(0, 2**63 - 1).map(SequenceId)


def by_group(values: st.SearchStrategy) -> st.SearchStrategy:  # type: ignore[type-arg]
    return st.dictionaries(GROUP, values, max_size=3)


SAMPLING = st.builds(
    SamplingParams,
    temperature=FLOAT,
    top_p=FLOAT,
    top_k=COUNT,
    min_p=FLOAT,
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=FLOAT,
    frequency_penalty=FLOAT,
    repetition_penalty=FLOAT,
    logit_bias=st.dictionaries(TOKEN, FLOAT, max_size=3),
    allowed_token_ids=TOKENS,
    stop_token_ids=TOKENS,
    min_tokens=COUNT,
    logprobs=st.none() | COUNT,
    logprob_token_ids=TOKENS,
    bad_words=st.lists(TOKENS, max_size=3).map(tuple),
    thinking_budget=st.none() | st.builds(ThinkingBudget, COUNT, TOKEN),
)
IMAGE = st.builds(
    ImageSpan, offset=COUNT, length=COUNT, digest=st.binary(max_size=32), height=COUNT, width=COUNT
)
STEP = st.builds(
    SequenceStep,
    sequence=SEQUENCE,
    start=COUNT,
    token_ids=TOKENS,
    ngram_context=TOKENS,
    new_pages=by_group(st.lists(ID.map(PageId), max_size=5).map(tuple)),
    freed_pages=by_group(COUNT),
    state_read=by_group(st.none() | ID.map(SlotId)),
    state_writes=by_group(st.lists(st.tuples(COUNT, ID.map(SlotId)), max_size=3).map(tuple)),
    begin=st.none()
    | st.builds(
        SequenceBegin,
        sampling=SAMPLING,
        prompt_token_ids=TOKENS,
        output_token_ids=TOKENS,
        output_tokens=COUNT,
        images=st.lists(IMAGE, max_size=3).map(tuple),
    ),
    sample_from=st.none() | COUNT,
    prompt_logprobs=st.none() | COUNT,
    prompt_targets=TOKENS,
)
IDS = by_group(st.lists(ID, max_size=4).map(tuple))
PLAN = st.builds(
    StepPlan,
    number=st.integers(0, 2**64 - 1),
    sequences=st.lists(STEP, max_size=3).map(tuple),
    ended=st.lists(SEQUENCE, max_size=3).map(tuple),
    zero=IDS,
    garbage=IDS,
)
LOGPROBS = st.lists(
    st.builds(
        Logprob,
        token_id=TOKEN,
        logprob=FLOAT,
        rank=COUNT,
        top=st.lists(st.tuples(TOKEN, FLOAT), max_size=3).map(tuple),
    ),
    max_size=3,
).map(tuple)
RESULT = st.builds(
    StepResult,
    number=st.integers(0, 2**64 - 1),
    sequences=st.lists(
        st.builds(
            SequenceResult,
            sequence=SEQUENCE,
            token_ids=TOKENS,
            logprobs=LOGPROBS,
            prompt_logprobs=LOGPROBS,
            finite=st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
)


@given(PLAN)
@settings(max_examples=150, deadline=None)
def test_plan_round_trip(plan: StepPlan) -> None:
    data = encode_plan(plan).SerializeToString()
    assert decode_plan(pb.StepPlan.FromString(data)) == plan


@given(RESULT)
@settings(max_examples=100, deadline=None)
def test_result_round_trip(result: StepResult) -> None:
    data = encode_result(result).SerializeToString()
    assert decode_result(pb.StepResult.FromString(data)) == result


class WireExecutor:
    """Runs what arrives at the other end of the wire; counts the bytes of the plans."""

    def __init__(self, inner: Executor, sizes: list[int]) -> None:
        self.inner = inner
        self.sizes = sizes

    def execute(self, plan: StepPlan) -> StepResult:
        data = encode_plan(plan).SerializeToString()
        self.sizes.append(len(data))
        result = self.inner.execute(decode_plan(pb.StepPlan.FromString(data)))
        answer = encode_result(result).SerializeToString()
        return decode_result(pb.StepResult.FromString(answer))


def generate(folder: Path, wire: bool) -> tuple[list[int], list[int]]:
    """Tokens of one sampled request, and the sizes of the plans that were sent."""
    device = torch.device("cpu")
    model = load_model(folder, device=device, compute_dtype=torch.float32)
    config = CoreConfig(max_model_len=512, max_num_seqs=2, max_num_batched_tokens=64)
    table = local_tables(Checkpoint.open(folder))
    sizes: list[int] = []

    def over_wire(*parts: Any) -> Executor:
        return WireExecutor(LocalExecutor(*parts), sizes)

    core = EngineCore(model, config, table, make_executor=over_wire if wire else LocalExecutor)
    sampling = RequestSampling(temperature=1.0, seed=5, repetition_penalty=1.2, top_p=0.9)
    prompt = tuple((7 * i) % 400 + 20 for i in range(130))
    core.submit(Request("r", prompt, RequestStopping(max_tokens=40), sampling, logprobs=3))
    tokens: list[int] = []
    while core.has_work:
        for event in core.step():
            if isinstance(event, TokensOut):
                tokens.extend(event.tokens)
    core.check_invariants()
    return tokens, sizes


def test_core_behind_the_wire_gives_the_same_tokens_with_plans_of_constant_size(
    tmp_path: Path,
) -> None:
    save_tiny(tmp_path, "qwen4_exp", "fp8")
    tokens, sizes = generate(tmp_path, wire=True)
    assert tokens == generate(tmp_path, wire=False)[0]
    assert len(tokens) == 40
    assert max(sizes[-30:]) < 200  # a decode step, whatever the length of the context
