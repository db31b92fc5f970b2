"""The training model equals the unmodified transformers implementation, at random weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.models.qwen4_exp import Qwen4ExpForCausalLM
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen

from services.engine.checkpoints.nano import functional as fn
from services.engine.checkpoints.nano.config import NanoConfig
from services.engine.checkpoints.nano.export import random_state, write_checkpoint
from services.engine.checkpoints.nano.fp8 import dequantize_blocks, quantize_blocks
from services.engine.checkpoints.nano.model import NanoModel, Ops
from services.engine.checkpoints.nano.oracle import load_oracle

CFG = NanoConfig()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[NanoModel, Qwen4ExpForCausalLM]:
    """Training model and oracle with equal weights, both rounded to BF16."""
    state = random_state(CFG, 3)
    state = {k: v if v.dtype == torch.int64 else v.bfloat16().float() for k, v in state.items()}
    folder = tmp_path_factory.mktemp("nano")
    (folder / "tokenizer.json").touch()  # no tokenizer is needed here
    write_checkpoint(CFG, state, folder)
    model = NanoModel(CFG)
    model.load_state_dict(state)
    return model, load_oracle(folder)


def _row(lengths: list[int], width: int, seed: int) -> tuple[Any, ...]:
    """Pack random documents of the given lengths; starts are multiples of 4."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((1, width), CFG.endoftext_id)
    pos, start, spans, at = torch.zeros_like(ids), torch.zeros_like(ids), [], 0
    for length in lengths:
        ids[0, at : at + length] = torch.randint(
            0, CFG.tokenizer_size, (length,), generator=generator
        )
        stop = at + -(-length // 4) * 4
        stop = width if len(spans) == len(lengths) - 1 else stop
        pos[0, at:stop] = torch.arange(stop - at)
        start[0, at:stop] = at
        spans.append((at, at + length))
        at = stop
    return ids, pos, start, spans


def _hidden(model: NanoModel, row: tuple[Any, ...], select: bool) -> torch.Tensor:
    step = model.step(*row[:3], select=select, dtype=torch.float32, ops=Ops())
    return model.trunk(step, model.new_aux())[1]


@pytest.mark.parametrize("lengths", [[190], [7, 130, 1], [64, 128], [257]], ids=str)
def test_packed_rows_give_the_oracle_logits_of_each_document(pair: Any, lengths: list[int]) -> None:
    model, oracle = pair
    width = -(-sum(-(-n // 4) * 4 for n in lengths) // 64) * 64
    row = _row(lengths, width, seed=len(lengths))
    with torch.no_grad():
        ours = fn.linear(_hidden(model, row, select=True), model.lm_head.weight)
        for begin, end in row[3]:
            theirs = oracle(row[0][:, begin:end]).logits
            error = (ours[:, begin:end] - theirs).abs().max()
            assert error < 1e-4 * max(1.0, float(theirs.abs().max()))


def test_selection_changes_long_documents_only(pair: Any) -> None:
    model, _ = pair
    row = _row([256], 256, seed=0)
    with torch.no_grad():
        change = (_hidden(model, row, select=True) - _hidden(model, row, select=False)).abs()
    budget = CFG.indexer_budget + CFG.indexer_compress_ratio - 1
    assert change[:, :budget].max() < 1e-5
    assert change[:, budget + 4 :].max() > 1e-3


def test_eos_inside_a_document_cuts_the_ngram_context(pair: Any) -> None:
    model, oracle = pair
    row = _row([64], 64, seed=5)
    for at in (3, 10, 11, 40):
        row[0][0, at] = CFG.endoftext_id
    with torch.no_grad():
        ours = fn.linear(_hidden(model, row, select=True), model.lm_head.weight)
        assert (ours - oracle(row[0]).logits).abs().max() < 1e-4


@pytest.mark.parametrize("length", [64, 128, 320])
def test_delta_rule_equals_the_token_recurrence(length: int) -> None:
    torch.manual_seed(length)
    q, k, v = (torch.randn(2, 3, length, 16, dtype=torch.float64) for _ in range(3))
    k = k / k.norm(dim=-1, keepdim=True)
    decay = -torch.rand(2, 3, length, dtype=torch.float64)
    decay[:, :, length // 3] -= 60
    beta = torch.rand(2, 3, length, dtype=torch.float64)
    state = torch.zeros(2, 3, 16, 16, dtype=torch.float64)
    outs = []
    for t in range(length):
        state = state * decay[:, :, t].exp()[..., None, None]
        old = torch.einsum("bhkv,bhk->bhv", state, k[:, :, t])
        fresh = beta[:, :, t].unsqueeze(-1) * (v[:, :, t] - old)
        state = state + k[:, :, t].unsqueeze(-1) * fresh.unsqueeze(-2)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    torch.testing.assert_close(fn.delta_rule(q, k, v, decay, beta), torch.stack(outs, 2))


def test_drafts_equal_a_composition_of_the_oracle_layers(pair: Any) -> None:
    """64 tokens: all blocks are kept, so that no tie between block scores can matter."""
    model, oracle = pair
    ids, pos, start, _ = _row([64], 64, seed=9)
    streams = torch.randn(1, 64, CFG.hc_count, CFG.hidden_size)
    with torch.no_grad():
        step = model.step(ids, pos, start, select=True, dtype=torch.float32, ops=Ops())
        ours = model.drafts(streams, 1, step, model.new_aux())[0]
        theirs = _oracle_draft(model, oracle, ids, streams)
    assert (ours - theirs).abs().max() < 1e-4


def _oracle_draft(
    model: NanoModel, oracle: Qwen4ExpForCausalLM, ids: torch.Tensor, streams: torch.Tensor
) -> torch.Tensor:
    config = copy.deepcopy(oracle.config)
    config.layer_types, config.num_hidden_layers = ["indexed_attention"], 1
    config.ple_layer_ids = []
    state = {n.removeprefix("mtp."): v for n, v in model.state_dict().items() if n[:4] == "mtp."}
    for name in list(state):  # the oracle holds what the FP8 files hold
        if ".experts." in name:
            state[name] = dequantize_blocks(*quantize_blocks(state[name]))
    layer = qwen.Qwen4ExpTextDecoderLayer(config, 0).eval()
    layer.load_state_dict({n[9:]: v for n, v in state.items() if n.startswith("layers.0.")})
    mixer = qwen.Qwen4ExpTextGatedResidual(config, use_combine=False)
    mixer.load_state_dict(
        {n.split(".", 1)[1]: v for n, v in state.items() if n.startswith("hyper_connection_mixer.")}
    )

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        module = qwen.Qwen4ExpTextRMSNorm(x.shape[-1])
        module.weight.data = weight
        return module(x)

    following = oracle.model.embed_tokens(ids.roll(-1, 1))
    e = norm(following, state["pre_fc_norm_embedding.weight"]) @ state["fc_embedding.weight"].T
    h = norm(streams.flatten(2), state["pre_fc_norm_hidden.weight"]).view_as(streams)
    mixed = (h @ state["fc_hidden.weight"].T + e.unsqueeze(2)).flatten(2)
    length = ids.shape[1]
    positions = torch.arange(length).view(1, 1, -1).expand(3, 1, -1)
    causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    rotary = oracle.model.rotary_emb(mixed, positions)
    return mixer(layer(mixed, position_embeddings=rotary, attention_mask=causal))
