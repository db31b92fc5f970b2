"""Row ids of the n-gram table: golden values, the oracle's own hash, any cut of the text."""

from __future__ import annotations

import pytest
import torch

from services.common.checkpoint import Checkpoint
from services.common.ngram_table import hash_parameters
from services.engine.checkpoints.local_table import LocalTable
from services.engine.checkpoints.tensors import TORCH_DTYPES
from services.engine.models.ngram import TableHash
from tests.models.conftest import GetTiny, load
from tests.models.tiny import EOS, prompt

# Constants of the released Qwen3.8-Flash-Next.
RELEASE = {
    "vocab_size": 248320,
    "hidden_size": 2560,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "eos_token_id": 248044,
}
MULTIPLIERS = (23703573157769, 20109073645365, 8052911324071)
SIZES = (
    *(20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077),
    *(20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171),
)
# token, ids before it -> rows of its 16 heads.
GOLDEN = {
    (5, ()): (
        *(15389869, 39778609, 55713969, 62213332, 88817728, 118483999, 133731511, 155458159),
        *(179763390, 197956758, 205378969, 220499474, 242466248, 265658744, 293662119, 315720898),
    ),
    (5, (3, 4)): (
        *(8807125, 30450454, 51272170, 64422588, 81408710, 113737508, 122230591, 146888097),
        *(171649727, 195298022, 212887723, 231715632, 253540006, 275364398, 289305919, 319013232),
    ),
    (0, (1, 248319)): (
        *(3745007, 25177969, 59639583, 68080282, 84924354, 118004746, 128374230, 156931756),
        *(172761553, 197612981, 204483545, 233935219, 255798531, 278560661, 299681215, 306781200),
    ),
}


@pytest.fixture
def release() -> TableHash:
    return TableHash.from_parameters("t", hash_parameters(RELEASE, 0))


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_constants_of_the_release() -> None:
    parameters = hash_parameters(RELEASE, 0)
    assert parameters.multipliers == MULTIPLIERS
    assert parameters.head_sizes == SIZES
    assert parameters.head_offsets == tuple(sum(SIZES[:h]) for h in range(16))


@pytest.mark.parametrize(("case", "rows"), GOLDEN.items())
def test_golden_rows(release: TableHash, case: tuple[int, tuple[int, ...]], rows) -> None:
    token, context = case
    assert release.row_ids(ids(token), ids(*context)).tolist() == [list(rows)]


def test_end_of_text_hides_itself_and_all_before_it(release: TableHash) -> None:
    eos = RELEASE["eos_token_id"]
    nothing = release.row_ids(ids(5), ids())
    assert torch.equal(release.row_ids(ids(5), ids(3, eos)), nothing)
    assert torch.equal(release.row_ids(ids(5), ids(eos, eos)), nothing)
    assert torch.equal(
        release.row_ids(ids(5), ids(4))[:, :8], release.row_ids(ids(5), ids(3, 4))[:, :8]
    )
    assert torch.equal(release.row_ids(ids(5), ids(eos, 4)), release.row_ids(ids(5), ids(4)))


def test_own_end_of_text_does_not_hide_the_context(release: TableHash) -> None:
    eos = RELEASE["eos_token_id"]
    assert not torch.equal(release.row_ids(ids(eos), ids(3, 4)), release.row_ids(ids(eos), ids()))


def test_row_ids_equal_the_oracle_at_every_cut(get_tiny: GetTiny) -> None:
    tiny = get_tiny("qwen4_exp", "fp32")
    text = prompt(50, seed=71)
    module = tiny.oracle.model.language_model.layers[1].ple.ple_embedding
    seen: list[torch.Tensor] = []
    hook = module.ngram_embedding.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    module(torch.tensor([text]), None)
    hook.remove()
    (ngram,) = load(tiny.folder).ngrams
    assert ngram.table == "qwen4_exp.layers.1.ple"
    for cut in range(1, len(text)):
        before = ngram.row_ids(ids(*text[:cut]), ids())
        after = ngram.row_ids(ids(*text[cut:]), ids(*text[max(0, cut - 2) : cut]))
        assert torch.equal(torch.cat([before, after]), seen[0][0])


def test_context_longer_than_needed_is_cut(release: TableHash) -> None:
    long = release.row_ids(ids(5), ids(9, 9, 9, 3, 4))
    assert torch.equal(long, release.row_ids(ids(5), ids(3, 4)))


@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_local_table_gives_the_stored_rows(get_tiny: GetTiny, layout) -> None:
    tiny = get_tiny("qwen4_exp", layout)
    table = LocalTable.open(Checkpoint.open(tiny.folder))
    rows = torch.tensor([[0, 1087, 1088, 4351], [5, 5, 2176, 3000]])
    found = table.start_gather(rows).wait()
    whole = tiny.oracle.model.language_model.layers[1].ple.ple_embedding.ngram_embedding.weight
    expected = whole[rows].flatten(1)
    if layout == "fp8":
        assert found.dtype == torch.uint8
        found = found.view(TORCH_DTYPES["F8_E4M3"]).float() * table.layout.scale
    else:
        assert found.dtype == torch.bfloat16
    assert torch.equal(found.float(), expected)


@pytest.mark.parametrize("bad", [-1, 4352])
def test_local_table_refuses_rows_outside(get_tiny: GetTiny, bad: int) -> None:
    table = LocalTable.open(Checkpoint.open(get_tiny("qwen4_exp", "fp8").folder))
    with pytest.raises(IndexError, match=str(bad)):
        table.start_gather(torch.tensor([[0, bad]]))


def test_text_without_end_of_text_uses_every_predecessor(release: TableHash) -> None:
    assert EOS not in (3, 4)
    a = release.row_ids(ids(3, 4, 5), ids())[2]
    assert torch.equal(a, release.row_ids(ids(5), ids(3, 4))[0])
