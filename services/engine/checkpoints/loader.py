"""Weights for layers: names, shapes and this rank's part, from one checkpoint.

Layers ask a `WeightReader` for what they need by local name and full shape. A first pass over
every layer of the model runs with a reader that only checks (and so knows every expected name), a
second one reads the layers of this stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from kernels.moe import ExpertWeights
from kernels.quant_linear import Matrix, PlainMatrix
from services.common.checkpoint import Checkpoint, CheckpointError
from services.engine.checkpoints.formats import MatrixFormat, formats_of
from services.engine.checkpoints.tensors import FLOAT_DTYPES, Slice, TensorReader
from services.engine.models.base import Shard

# Names of the vision towers; skipped, since only text is served.
_VISION = re.compile(
    r"^(model\.)?visual\.("
    r"patch_embed\.proj|pos_embed|merger\.(norm|linear_fc[12])|deepstack_merger_list\.\d+\..+"
    r"|blocks\.\d+\.(norm[12]|attn\.(qkv|proj)|mlp\.linear_fc[12])"
    r")\.(weight|bias|weight_scale_inv)$"
)


@dataclass(slots=True)
class _Ledger:
    """Names that the layers have asked for."""

    names: set[str] = field(default_factory=set)


class WeightReader:
    """Reads one module's weights. `check_only` checks and records without reading."""

    def __init__(
        self,
        tensors: TensorReader,
        formats: tuple[MatrixFormat, ...],
        shard: Shard,
        *,
        prefix: str = "",
        check_only: bool = False,
        ledger: _Ledger | None = None,
    ) -> None:
        self._tensors = tensors
        self._formats = formats
        self.shard = shard
        self._prefix = prefix
        self._check_only = check_only
        self._ledger = ledger or _Ledger()

    @property
    def names(self) -> set[str]:
        """Full names of all tensors asked for so far, by this reader and those made from it."""
        return self._ledger.names

    def at(self, path: str) -> WeightReader:
        """A reader for the module `path` below this one."""
        return WeightReader(
            self._tensors,
            self._formats,
            self.shard,
            prefix=f"{self._prefix}{path}.",
            check_only=self._check_only,
            ledger=self._ledger,
        )

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds `name` below this module."""
        return f"{self._prefix}{name}" in self._tensors

    def tensor(self, name: str, shape: tuple[int, ...], part: Slice | None = None) -> torch.Tensor:
        """A float tensor `name` of full shape `shape`, or this rank's part of it."""
        full = f"{self._prefix}{name}"
        self._tensors.expect(full, shape, FLOAT_DTYPES)
        self._ledger.names.add(full)
        return torch.empty(0) if self._check_only else self._tensors.read(full, part)

    def matrix(self, module: str, shape: tuple[int, int], part: Slice | None = None) -> Matrix:
        """The matrix of `module` (without ".weight") in whatever format it is stored."""
        full = f"{self._prefix}{module}"
        matrix_format = self._format(module)
        self._ledger.names.update(matrix_format.check(self._tensors, full, shape))
        if self._check_only:
            return PlainMatrix(torch.empty(0, 0))
        return matrix_format.read(self._tensors, full, part)

    def experts(self, count: int, hidden: int, intermediate: int) -> ExpertWeights:
        """This rank's experts below this module, from one fused 3-D pair or from single ones."""
        if self.has("gate_up_proj"):
            return self._fused_experts(count, hidden, intermediate)
        return self._single_experts(count, hidden, intermediate)

    def _fused_experts(self, count: int, hidden: int, intermediate: int) -> ExpertWeights:
        first, stop = self._expert_range(count)
        part = Slice(0, ((first, stop),))
        gate_up = self.tensor("gate_up_proj", (count, 2 * intermediate, hidden), part)
        down = self.tensor("down_proj", (count, hidden, intermediate), part)
        return ExpertWeights(PlainMatrix(gate_up), PlainMatrix(down), stop - first, first)

    def _single_experts(self, count: int, hidden: int, intermediate: int) -> ExpertWeights:
        first, stop = self._expert_range(count)
        wanted = range(count) if self._check_only else range(first, stop)
        gate_up = [f"{e}.{p}" for e in wanted for p in ("gate_proj", "up_proj")]
        down = [f"{e}.down_proj" for e in wanted]
        return ExpertWeights(
            self._stack(gate_up, (intermediate, hidden), joined=2),
            self._stack(down, (hidden, intermediate), joined=1),
            stop - first,
            first,
        )

    def _stack(self, modules: list[str], shape: tuple[int, int], *, joined: int) -> Matrix:
        """A stack of matrices, each made of `joined` neighbours of the list by rows."""
        formats = {module: self._format(module) for module in modules}
        first = formats[modules[0]]
        for module, other in formats.items():
            if other is not first:
                raise CheckpointError(
                    f"stored in another format than {self._prefix}{modules[0]}",
                    tensor=f"{self._prefix}{module}",
                )
        matrices = [self.matrix(module, shape) for module in modules]
        return matrices[0] if self._check_only else first.stack(matrices, joined)

    def _format(self, module: str) -> MatrixFormat:
        full = f"{self._prefix}{module}"
        return next(f for f in self._formats if f.matches(self._tensors, full))

    def _expert_range(self, count: int) -> tuple[int, int]:
        each = even_share(count, self.shard.world, f"{self._prefix}experts")
        return self.shard.rank * each, (self.shard.rank + 1) * each


def even_share(total: int, world: int, what: str) -> int:
    """total / world; CheckpointError naming `what` where it does not divide."""
    if total % world:
        raise CheckpointError(f"{what}: {total} does not divide over {world} tensor-parallel ranks")
    return total // world


def even_part(shard: Shard, dim: int, *segments: int, what: str) -> Slice | None:
    """This rank's even share of each of the segments that lie behind each other along `dim`.

    None on a single rank: the whole.
    """
    if shard.world == 1:
        return None
    ranges = []
    start = 0
    for size in segments:
        share = even_share(size, shard.world, what)
        ranges.append((start + shard.rank * share, start + (shard.rank + 1) * share))
        start += size
    return Slice(dim, tuple(ranges))


def make_readers(
    checkpoint: Checkpoint, device: torch.device, shard: Shard
) -> tuple[WeightReader, WeightReader, TensorReader]:
    """A checking reader, a reading one, and what counts the bytes read."""
    formats = formats_of(checkpoint.config)
    tensors = TensorReader(checkpoint, device)
    checking = WeightReader(tensors, formats, shard, check_only=True)
    return checking, WeightReader(tensors, formats, shard), tensors


def text_prefix(checkpoint: Checkpoint) -> str:
    """Where the text model's tensors lie: "model.language_model" or "model"."""
    for prefix in ("model.language_model", "model"):
        if f"{prefix}.embed_tokens.weight" in checkpoint:
            return prefix
    raise CheckpointError(
        "missing tensor (neither under model.language_model nor under model)",
        file=checkpoint.folder,
        tensor="embed_tokens.weight",
    )


def refuse_surplus(
    checkpoint: Checkpoint, expected: set[str], ignored: Iterable[re.Pattern[str]]
) -> None:
    """CheckpointError for a tensor that is neither expected, nor vision, nor ignored."""
    patterns = (_VISION, *ignored)
    for name in checkpoint.names():
        if name not in expected and not any(p.search(name) for p in patterns):
            info = checkpoint.info(name)
            raise CheckpointError(
                f"surplus tensor {info.dtype} {list(info.shape)}: the config has no place for it",
                file=info.file,
                tensor=name,
            )
