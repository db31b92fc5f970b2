"""Named points inside the golden model: streams, mixes, routing, entries, keys, selections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kernels.lightning_index import Candidates, reference
from services.engine.layers.deepseek.moe import Router
from services.engine.layers.deepseek.streams import HyperMixer
from services.engine.layers.deepseek41 import indexer as indexer_module
from services.engine.layers.deepseek41.engram import EngramLayer
from services.engine.layers.deepseek41.source import SharedCache
from services.engine.layers.deepseek41.streams import SinglePassSublayer
from services.engine.runtime.tables_api import TableSource
from tests.models.deepseek_v41.conftest import Cases, assert_rows_near, golden
from tests.models.runner import Runner

Points = dict[str, torch.Tensor]
TOLERANCE = 1e-4  # absolute, fp32
RECORDED = (1, 2, 3, 6, 8)
SOURCES = (2, 4, 6)


class Recorder:
    """Collects what the layers compute during one pass, under the names of the golden files."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.points: Points = {}
        self.sublayers = self.routed = self.engrams = 0
        self.mixes: Any = None
        self.index_layers = iter((2, 4, 6, 8))
        self.layer = 0
        self._streams(patch)
        self._experts(patch)
        self._caches(patch)
        self._indexers(patch)

    def _streams(self, patch: pytest.MonkeyPatch) -> None:
        mix, around, engram = HyperMixer.__call__, SinglePassSublayer.around, EngramLayer.__call__

        def recorded_mix(mixer: HyperMixer, x_TnD: torch.Tensor) -> Any:
            self.mixes = mix(mixer, x_TnD)
            return self.mixes

        def recorded(sublayer: SinglePassSublayer, x_TnD: Any, pre_Tn: Any, block: Any) -> Any:
            name = f"L{self.sublayers // 2}."
            half = ("attn", "ffn")[self.sublayers % 2]
            self.sublayers += 1

            def inner(x: torch.Tensor) -> torch.Tensor:
                y = block(x)
                self.points |= {f"{name}{half}_in": x, f"{name}{half}_out": y}
                return y

            out = around(sublayer, x_TnD, pre_Tn, inner)
            for part in ("pre", "post"):
                self.points[f"{name}hc_{half}_{part}"] = getattr(self.mixes, f"{part}_Tn")
            self.points[f"{name}hc_{half}_comb"] = self.mixes.comb_Tnn
            self.points |= {f"{name}stream_out": out[0], f"{name}next_pre_mix": out[1]}
            return out

        def recorded_engram(layer: EngramLayer, x_TnD: torch.Tensor, ctx: Any) -> torch.Tensor:
            out = engram(layer, x_TnD, ctx)
            self.points[f"L{(1, 4)[self.engrams]}.stream_after_engram"] = out
            self.engrams += 1
            return out

        patch.setattr(HyperMixer, "__call__", recorded_mix)
        patch.setattr(SinglePassSublayer, "around", recorded)
        patch.setattr(EngramLayer, "__call__", recorded_engram)

    def _experts(self, patch: pytest.MonkeyPatch) -> None:
        route = Router.__call__

        def recorded(router: Router, x: torch.Tensor, ctx: Any) -> Any:
            ids, weights = route(router, x, ctx)
            name = f"L{self.routed}."
            self.points |= {f"{name}router_ids": ids, f"{name}router_weights": weights}
            self.routed += 1
            return ids, weights

        patch.setattr(Router, "__call__", recorded)

    def _caches(self, patch: pytest.MonkeyPatch) -> None:
        write = SharedCache.write

        def recorded(cache: SharedCache, new: Any, ctx: Any) -> None:
            write(cache, new, ctx)
            for name, rows in (
                ("compressed_kv", cache.entries(ctx)),
                ("index_keys", cache.keys(ctx)),
            ):
                keys = reference.Keys(rows.pool, rows.pages, rows.form)
                stored = rows.pool.index_select(0, rows.pages[0]).flatten(0, 1)
                count = len(ctx.positions_T) // cache.ratio
                self.points[f"L{cache.layer}.{name}"] = keys.values(stored)[:count]

        patch.setattr(SharedCache, "write", recorded)

    def _indexers(self, patch: pytest.MonkeyPatch) -> None:
        select, choose = indexer_module.select_entries, indexer_module.select_candidates

        def selected(
            q: Any, weights: Any, pool: Any, pages: Any, *rest: Any, **options: Any
        ) -> Any:
            self.layer = next(self.index_layers)
            found = select(q, weights, pool, pages, *rest, **options)
            keys = reference.Keys(pool, pages, options["form"])
            limit: Candidates | None = options["candidates"]
            rows = [
                _scores(q[t], weights[t], keys, visible, limit and limit.blocks_TC[t], limit)
                for t, visible in enumerate(rest[1].tolist())
            ]
            scores = torch.nn.utils.rnn.pad_sequence(rows, True, -torch.inf)
            self.points |= {f"L{self.layer}.topk_ids": found, f"L{self.layer}.index_scores": scores}
            return found

        def chosen(*args: Any, **options: Any) -> Candidates:
            found = choose(*args, **options)
            counts = args[-1].tolist()
            rows = [
                reference.allowed_entries(found.blocks_TC[t], found.size, visible)
                for t, visible in enumerate(counts)
            ]
            mask = torch.nn.utils.rnn.pad_sequence(rows, True, False)
            self.points[f"L{self.layer}.candidate_mask"] = mask
            return found

        patch.setattr(indexer_module, "select_entries", selected)
        patch.setattr(indexer_module, "select_candidates", chosen)


def _scores(q: Any, weights: Any, keys: Any, visible: int, blocks: Any, limit: Any) -> torch.Tensor:
    scores = reference.entry_scores(q, weights, keys, 0, visible)
    if limit is None:
        return scores
    allowed = reference.allowed_entries(blocks, limit.size, visible)
    return scores.masked_fill(~allowed, -torch.inf)


def recorded(model: Any, tables: TableSource, ids: list[int]) -> Points:
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        Runner([model], tables).run(ids, len(ids))
    return recorder.points


@pytest.fixture(scope="module")
def expected() -> Points:
    return golden("activations_exact")


@pytest.fixture(scope="module")
def found(exact: Any, tables: TableSource, cases: Cases) -> Iterator[Points]:
    yield recorded(exact, tables, cases.prompts["long75"])


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-5, atol=TOLERANCE)


@pytest.mark.parametrize("layer", RECORDED)
def test_halves_of_a_layer(found: Points, expected: Points, layer: int) -> None:
    for half in ("attn", "ffn"):
        for point in ("in", "out"):
            name = f"L{layer}.{half}_{point}"
            assert_near(found[name], expected[name])
    assert_near(found[f"L{layer}.next_pre_mix"], expected[f"L{layer}.next_pre_mix"])


@pytest.mark.parametrize("layer", RECORDED)
def test_mixing_weights(found: Points, expected: Points, layer: int) -> None:
    for half in ("attn", "ffn"):
        for part in ("pre", "post", "comb"):
            name = f"L{layer}.hc_{half}_{part}"
            assert_near(found[name], expected[name])


@pytest.mark.parametrize("layer", RECORDED)
def test_routing(found: Points, expected: Points, layer: int) -> None:
    ids, order = found[f"L{layer}.router_ids"].sort(dim=1)
    golden_ids, golden_order = expected[f"L{layer}.router_ids"].sort(dim=1)
    assert torch.equal(ids, golden_ids)
    weights = expected[f"L{layer}.router_weights"].gather(1, golden_order)
    assert_near(found[f"L{layer}.router_weights"].gather(1, order), weights)


@pytest.mark.parametrize("layer", SOURCES)
def test_entries_and_keys_of_sources(found: Points, expected: Points, layer: int) -> None:
    for name in (f"L{layer}.compressed_kv", f"L{layer}.index_keys"):
        assert_near(found[name], expected[name])


@pytest.mark.parametrize("layer", [*SOURCES, 8])
def test_scores_and_selections(found: Points, expected: Points, layer: int) -> None:
    """Layer 8 is limited to the blocks that layer 6 has chosen."""
    assert_near(found[f"L{layer}.index_scores"], expected[f"L{layer}.index_scores"])
    ids, golden_ids = found[f"L{layer}.topk_ids"], expected[f"L{layer}.topk_ids"].long()
    assert torch.equal(ids.sort(dim=1).values, golden_ids.sort(dim=1).values)


def test_candidates(found: Points, expected: Points) -> None:
    """Of the blocks chosen, the entries that a token sees; the release's mask has whole blocks."""
    visible = expected["L6.index_scores"] > -torch.inf
    assert torch.equal(found["L6.candidate_mask"], expected["L6.candidate_mask"] & visible)


@pytest.mark.parametrize("layer", [1, 4])
def test_streams_after_engram(found: Points, expected: Points, layer: int) -> None:
    name = f"L{layer}.stream_after_engram"
    assert_near(found[name], expected[name])


def test_row_ids_of_the_tables(exact: Any, cases: Cases, expected: Points) -> None:
    ids, none = torch.tensor(cases.prompts["long75"]), torch.tensor([], dtype=torch.int64)
    for layer, ngram in zip((1, 4), exact.ngrams, strict=True):
        assert ngram.table == f"deepseek_v41.layers.{layer}.engram"
        assert torch.equal(ngram.row_ids(ids, none), expected[f"L{layer}.engram_hash_ids"])


@pytest.mark.parametrize("layer", [2, 6])
def test_quantised_entries_and_keys(
    quantised: Any, tables: TableSource, cases: Cases, layer: int
) -> None:
    """What lies in the cache is on the grid of the release, value by value."""
    found = recorded(quantised, tables, cases.prompts["long75"])
    expected = golden("activations_kv")
    for name in (f"L{layer}.compressed_kv", f"L{layer}.index_keys"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=0)
    for name in (f"L{layer}.attn_in", f"L{layer}.attn_out"):
        assert_rows_near(found[name], expected[name], TOLERANCE)
    ids, golden_ids = found[f"L{layer}.topk_ids"], expected[f"L{layer}.topk_ids"].long()
    assert torch.equal(ids.sort(dim=1).values, golden_ids.sort(dim=1).values)
