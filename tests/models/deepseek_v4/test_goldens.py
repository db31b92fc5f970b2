"""The vendor's own numbers: logits of all cases and activations at named points."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
import torch

from services.engine.layers.deepseek import indexer as indexer_module
from services.engine.layers.deepseek.streams import Sublayer
from services.engine.models.deepseek_v4_layer import Layer
from tests.models.deepseek_v4.conftest import GOLDENS, Model, load
from tests.models.runner import Live, Part, Runner

TOLERANCE = 1e-4  # absolute, fp32; logits have a standard deviation of 3
CASES: dict[str, list[int]] = {
    name: case["input_ids"]
    for name, case in json.loads((GOLDENS / "cases.json").read_text())["cases"].items()
}
DECODES: dict[str, int] = json.loads((GOLDENS / "cases.json").read_text())["decode"]
Arrays = Mapping[str, npt.NDArray[np.float32]]


@pytest.fixture(scope="module")
def golden() -> Model:
    return load(GOLDENS)


@pytest.fixture(scope="module")
def logits() -> Arrays:
    return np.load(GOLDENS / "logits_exact.npz")


def assert_near(found: torch.Tensor, wanted: npt.NDArray[np.float32]) -> None:
    torch.testing.assert_close(found, torch.from_numpy(wanted), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_prompt_logits_equal_the_vendors(golden: Model, logits: Arrays, name: str) -> None:
    ids = CASES[name]
    assert_near(Runner([golden]).run(ids, len(ids)), logits[f"{name}.prefill_logits"])


@pytest.mark.parametrize("name", DECODES)
def test_decoded_logits_equal_the_vendors(golden: Model, logits: Arrays, name: str) -> None:
    """Token by token behind a prefix, as the vendor's decode loop ran."""
    ids, first = CASES[name], DECODES[name]
    runner, live = Runner([golden]), Live()
    runner.step([Part(live, ids[:first])])
    steps = ids[first : first + 20]
    found = [runner.step([Part(live, [token])])[0][0] for token in steps]
    assert_near(torch.cat(found), logits[f"{name}.decode_from{first}_logits"][: len(steps)])


@dataclass
class Trace:
    """Values at the golden files' named points."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def half(self, name: str, sublayer: Sublayer, x_TnD: torch.Tensor) -> torch.Tensor:
        mixes = sublayer.mixer(x_TnD)
        x = (x_TnD * mixes.pre_Tn[..., None]).sum(1)
        self.values |= {f"{name}_x": x, f"{name}_post": mixes.post_Tn}
        self.values[f"{name}_comb"] = mixes.comb_Tnn
        return sublayer.norm(x)


@pytest.fixture(scope="module")
def trace(golden: Model) -> dict[str, torch.Tensor]:
    """The first 140 tokens of long300, layer by layer."""
    runner, trace = Runner([golden]), Trace()
    live = Live()
    batch, _ = runner._batch([Part(live, CASES["long300"][:140])])
    pools, parts = runner.pools[0], golden.weights.parts
    patch = pytest.MonkeyPatch()
    selections: list[torch.Tensor] = []
    select = indexer_module.select_entries

    def recording(*args: object, **kwargs: object) -> torch.Tensor:
        selections.append(select(*args, **kwargs))
        return selections[-1]

    patch.setattr(indexer_module, "select_entries", recording)
    with torch.inference_mode():
        hidden = parts.entry(batch)
        ctx = golden.context(batch, pools)
        for index, layer in enumerate(parts.layers):
            assert isinstance(layer, Layer)
            x = hidden.unflatten(1, (4, -1))
            attn_in = trace.half(f"L{index}.hc_attn", layer.attn_streams, x)
            trace.values[f"L{index}.attn_in"] = attn_in
            trace.values[f"L{index}.attn_out"] = layer.attn(attn_in, ctx)
            if layer.attn.indexer is not None:
                trace.values[f"L{index}.topk_ids"] = selections[-1]
            x = layer.attn_streams.around(x, lambda _, i=index: trace.values[f"L{i}.attn_out"])
            ffn_in = trace.half(f"L{index}.hc_ffn", layer.ffn_streams, x)
            trace.values[f"L{index}.router_ids"], weights = layer.ffn.router(ffn_in, ctx)
            trace.values[f"L{index}.router_weights"] = weights
            trace.values[f"L{index}.ffn_out"] = layer.ffn(ffn_in, ctx)
            hidden = layer(hidden, ctx)
            trace.values[f"L{index}.stream_out"] = hidden.unflatten(1, (4, -1))
        trace.values["final_normed"] = parts.exit.norm(
            parts.exit.collapse(hidden.unflatten(1, (4, -1)))
        )
    patch.undo()
    for group in ("csa", "index", "hca"):
        for name, pool in pools[group].items():
            rows = pool[live.pages[group]].flatten(0, 1)
            count = 140 // runner.groups[group].stride
            layer = name.split(".")[1]
            kind = "index_keys" if group == "index" else "compressed_kv"
            trace.values[f"L{layer}.{kind}"] = rows[:count]
    return trace.values


ACTIVATIONS: Arrays = np.load(GOLDENS / "activations_exact.npz")
DISCRETE = ("topk_ids", "router_ids", "index_keys_hadamard")


@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if not n.endswith(DISCRETE)])
def test_activations_equal_the_vendors(trace: dict[str, torch.Tensor], name: str) -> None:
    assert_near(trace[name], ACTIVATIONS[name])


@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n.endswith(("topk_ids", "router_ids"))])
def test_selections_equal_the_vendors_as_sets(trace: dict[str, torch.Tensor], name: str) -> None:
    found = trace[name].sort(dim=1).values
    wanted = torch.from_numpy(ACTIVATIONS[name]).long().sort(dim=1).values
    assert torch.equal(found, wanted)


def hadamard(width: int) -> torch.Tensor:
    """The orthonormal Sylvester matrix."""
    matrix = torch.ones(1, 1)
    while len(matrix) < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * width**-0.5


@pytest.mark.parametrize("layer", [2, 4, 6])
def test_index_keys_equal_the_vendors(trace: dict[str, torch.Tensor], layer: int) -> None:
    keys = trace[f"L{layer}.index_keys"]
    wanted = ACTIVATIONS[f"L{layer}.index_keys_hadamard"]
    assert_near(keys @ hadamard(keys.shape[1]), wanted)
