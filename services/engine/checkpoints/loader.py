"""Weights for layers: names, shapes and this rank's part, from one checkpoint.

Layers ask a `WeightReader` for what they need by local name and full shape. A first pass over
every layer of the model runs with a reader that only checks (and so knows every expected name), a
second one reads the layers of this stage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from kernels.moe import ExpertWeights
from kernels.quant_linear import Matrix, PlainMatrix, prepare
from services.common.checkpoint import Checkpoint, CheckpointError
from services.engine.checkpoints.formats import MatrixFormat, formats_of
from services.engine.checkpoints.formats.base import form_of
from services.engine.checkpoints.tensors import (
    FLOAT_DTYPES,
    TORCH_DTYPES,
    Slice,
    TensorReader,
)
from services.engine.models.base import Shard


@dataclass(slots=True)
class _Ledger:
    """Names that the layers have asked for, and the bytes that they were given."""

    names: set[str] = field(default_factory=set)
    nbytes: int = 0


class WeightReader:
    """Reads one module's weights to `device`. `check_only` checks and records without reading.

    `prepare` puts a matrix on the device in the order that the kernels there read; ValueError
    from it becomes a CheckpointError that names the matrix.
    """

    def __init__(
        self,
        tensors: TensorReader,
        formats: tuple[MatrixFormat, ...],
        shard: Shard,
        device: torch.device,
        *,
        prefix: str = "",
        check_only: bool = False,
        prepare: Callable[[Matrix], Matrix] | None = None,
        ledger: _Ledger | None = None,
    ) -> None:
        self._tensors = tensors
        self._formats = formats
        self.shard = shard
        self.device = device
        self._prefix = prefix
        self._check_only = check_only
        self._prepare = prepare or preparation_for(device)
        self._ledger = ledger or _Ledger()

    @property
    def names(self) -> set[str]:
        """Full names of all tensors asked for so far, by this reader and those made from it."""
        return self._ledger.names

    @property
    def nbytes(self) -> int:
        """Bytes of all weights handed out so far, by this reader and those made from it."""
        return self._ledger.nbytes

    def at(self, path: str) -> WeightReader:
        """A reader for the module `path` below this one; for this one where it is empty."""
        return WeightReader(
            self._tensors,
            self._formats,
            self.shard,
            self.device,
            prefix=f"{self._prefix}{path}." if path else self._prefix,
            check_only=self._check_only,
            prepare=self._prepare,
            ledger=self._ledger,
        )

    def full_name(self, name: str) -> str:
        """The name in the checkpoint of `name` below this module."""
        return f"{self._prefix}{name}"

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds `name` below this module."""
        return f"{self._prefix}{name}" in self._tensors

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        part: Slice | None = None,
        *,
        dtypes: Sequence[str] = FLOAT_DTYPES,
    ) -> torch.Tensor:
        """The tensor `name` of full shape `shape`, or this rank's part of it, as stored.

        `dtypes` are the safetensors types that are taken. Empty from a reader that only checks.
        """
        full = f"{self._prefix}{name}"
        self._tensors.expect(full, shape, dtypes)
        self._ledger.names.add(full)
        if self._check_only:
            return torch.empty(0, dtype=TORCH_DTYPES[self._tensors.info(full).dtype])
        read = self._tensors.read(full, part)
        self._ledger.nbytes += read.nbytes
        return read.to(self.device)

    def matrix(self, module: str, shape: tuple[int, int], part: Slice | None = None) -> Matrix:
        """The matrix of `module` (without ".weight") in whatever format it is stored."""
        matrix = self._read_matrix(module, shape, part)
        return self._hand_out(matrix, (f"{self._prefix}{module}",), (matrix,))

    def experts(
        self,
        count: int,
        hidden: int,
        intermediate: int,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> ExpertWeights:
        """This rank's experts below this module, from one fused 3-D pair or from single ones.

        `names` are the modules of a single expert: gate, up and down.
        """
        if self.has("gate_up_proj"):
            return self._fused_experts(count, hidden, intermediate)
        return self._single_experts(count, hidden, intermediate, names)

    def _read_matrix(self, module: str, shape: tuple[int, int], part: Slice | None) -> Matrix:
        full = f"{self._prefix}{module}"
        matrix_format = self._format(module)
        self._ledger.names.update(matrix_format.check(self._tensors, full, shape))
        if self._check_only:
            return PlainMatrix(torch.empty(0, 0))
        return matrix_format.read(self._tensors, full, shape, part)

    def _hand_out(self, whole: Matrix, names: Sequence[str], parts: Sequence[Matrix]) -> Matrix:
        """`whole`, made of the matrices `parts`, on the device and as its kernels read it."""
        self._ledger.nbytes += whole.nbytes
        try:
            return self._prepare(whole.to(self.device))
        except ValueError:
            for name, part in zip(names, parts, strict=True):
                self._named(name, part)
            raise

    def _named(self, name: str, matrix: Matrix) -> None:
        """CheckpointError where the kernels do not take this matrix."""
        try:
            self._prepare(matrix)
        except ValueError as error:
            raise CheckpointError(str(error), tensor=name) from error

    def _fused_experts(self, count: int, hidden: int, intermediate: int) -> ExpertWeights:
        first, stop = self._expert_range(count)
        part = Slice(0, ((first, stop),))
        gate_up = self.tensor("gate_up_proj", (count, 2 * intermediate, hidden), part)
        down = self.tensor("down_proj", (count, hidden, intermediate), part)
        return ExpertWeights(PlainMatrix(gate_up), PlainMatrix(down), stop - first, first)

    def _single_experts(
        self, count: int, hidden: int, intermediate: int, names: tuple[str, str, str]
    ) -> ExpertWeights:
        first, stop = self._expert_range(count)
        wanted = range(count) if self._check_only else range(first, stop)
        gate_up = [f"{e}.{p}" for e in wanted for p in names[:2]]
        down = [f"{e}.{names[2]}" for e in wanted]
        return ExpertWeights(
            self._stack(gate_up, (intermediate, hidden), joined=2),
            self._stack(down, (hidden, intermediate), joined=1),
            stop - first,
            first,
        )

    def _stack(self, modules: list[str], shape: tuple[int, int], *, joined: int) -> Matrix:
        """A stack of matrices, each made of `joined` neighbours of the list by rows."""
        matrices = [self._read_matrix(module, shape, None) for module in modules]
        if self._check_only:
            return matrices[0]
        names = [f"{self._prefix}{module}" for module in modules]
        for name, matrix in zip(names, matrices, strict=True):
            if (form := form_of(matrix)) != form_of(matrices[0]):
                raise CheckpointError(
                    f"stored as {form}, {names[0]} as {form_of(matrices[0])}", tensor=name
                )
        stack = self._format(modules[0]).stack(matrices, joined, names[0])
        return self._hand_out(stack, names, matrices)

    def _format(self, module: str) -> MatrixFormat:
        full = f"{self._prefix}{module}"
        return next(f for f in self._formats if f.matches(self._tensors, full))

    def _expert_range(self, count: int) -> tuple[int, int]:
        each = even_share(count, self.shard.world, f"{self._prefix}experts")
        return self.shard.rank * each, (self.shard.rank + 1) * each


def preparation_for(device: torch.device) -> Callable[[Matrix], Matrix]:
    """What a matrix goes through after loading: reordering for the kernels of a GPU."""
    return prepare if device.type == "cuda" else _as_stored


def _as_stored(matrix: Matrix) -> Matrix:
    return matrix


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
) -> tuple[WeightReader, WeightReader]:
    """A reader that only checks, and one that reads to `device`."""
    formats = formats_of(checkpoint.config)
    tensors = TensorReader(checkpoint)
    checking = WeightReader(tensors, formats, shard, device, check_only=True)
    return checking, WeightReader(tensors, formats, shard, device)


def text_prefix(checkpoint: Checkpoint) -> str:
    """Where the text model's tensors lie: "model.language_model", "model" or "" (DeepSeek)."""
    for prefix in ("model.language_model", "model"):
        if f"{prefix}.embed_tokens.weight" in checkpoint:
            return prefix
    if "embed.weight" in checkpoint:
        return ""
    raise CheckpointError(
        "missing tensor (neither under model.language_model nor under model, and no embed.weight)",
        file=checkpoint.folder,
        tensor="embed_tokens.weight",
    )


def refuse_surplus(
    checkpoint: Checkpoint, expected: set[str], ignored: Iterable[re.Pattern[str]]
) -> None:
    """CheckpointError for a tensor that is neither expected nor matched by `ignored`."""
    patterns = tuple(ignored)
    for name in checkpoint.names():
        if name not in expected and not any(p.search(name) for p in patterns):
            info = checkpoint.info(name)
            raise CheckpointError(
                f"surplus tensor {info.dtype} {list(info.shape)}: the config has no place for it",
                file=info.file,
                tensor=name,
            )
