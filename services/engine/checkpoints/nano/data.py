"""Token rows for training and scoring: conversations encoded, packed and handed over by workers.

A row holds whole documents; each begins at a multiple of 4 so that index blocks never straddle two.
"""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from services.engine.checkpoints.nano.conversation import Conversation, render
from services.engine.checkpoints.nano.corpus import conversations, held_out

ALIGN = 4
_POOL = 96  # documents from which a row is filled

IDS, POS, START, TARGET, DOCUMENT = range(5)  # planes of a row
Rows = NDArray[np.int32]  # [rows, 5, length]


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids of a conversation and which of them the model has to produce."""

    ids: NDArray[np.int32]
    target: NDArray[np.bool_]


def encode(conversation: Conversation, tokenizer: Tokenizer, last_only: bool = False) -> Document:
    """Encode a conversation piece by piece; `last_only` marks only its last produced piece.

    Pieces end where the tokenizer splits anyway, so the ids equal those of the whole text.
    """
    pieces = render(conversation)
    produced = [i for i, piece in enumerate(pieces) if piece.produced]
    marked = set(produced[-1:] if last_only else produced)
    coded = tokenizer.encode_batch([p.text for p in pieces], add_special_tokens=False)
    ids = [np.array(c.ids, dtype=np.int32) for c in coded]
    flags = [np.full(len(part), i in marked) for i, part in enumerate(ids)]
    return Document(np.concatenate(ids), np.concatenate(flags))


def _fill(row: Rows, documents: list[Document], fill_id: int) -> None:
    """Write documents into one row [5, length]; padding belongs to the document before it."""
    length, at = row.shape[1], 0
    row[IDS], row[TARGET] = fill_id, 0
    for number, document in enumerate(documents):
        size = len(document.ids)
        stop = length if number == len(documents) - 1 else at + -(-size // ALIGN) * ALIGN
        row[IDS, at : at + size] = document.ids
        row[TARGET, at : at + size] = document.target
        row[POS, at:stop] = np.arange(stop - at)
        row[START, at:stop] = at
        row[DOCUMENT, at:stop] = number
        at = stop


def pack(documents: Iterator[Document], length: int, fill_id: int) -> Iterator[tuple[Rows, int]]:
    """Yield rows [5, length] and their document counts, filled greedily from a small pool.

    Documents longer than a row are cut. Ends when the documents end.
    """
    pool: list[Document] = []
    ended = False
    while pool or not ended:
        more = list(islice(documents, _POOL - len(pool)))
        ended = len(more) < _POOL - len(pool)
        pool += [Document(d.ids[:length], d.target[:length]) for d in more]
        pool.sort(key=lambda d: len(d.ids), reverse=True)
        chosen, room = [], length
        for document in [*pool[-1:], *pool[:-1]] if len(pool) % 2 else list(pool):
            size = -(-len(document.ids) // ALIGN) * ALIGN
            if size <= room:
                chosen.append(document)
                room -= size
        taken = {id(document) for document in chosen}
        pool = [document for document in pool if id(document) not in taken]
        if chosen:
            row = np.zeros((5, length), dtype=np.int32)
            _fill(row, chosen, fill_id)
            yield row, len(chosen)


def training_rows(tokenizer: Tokenizer, seed: int, length: int, fill_id: int) -> Iterator[Rows]:
    """Yield training rows without end."""
    documents = (encode(item, tokenizer) for item in conversations(seed))
    for row, _ in pack(documents, length, fill_id):
        yield row


def scoring_rows(
    tokenizer: Tokenizer, task: str, count: int, length: int, fill_id: int, thinking: bool = True
) -> Rows:
    """Return rows with `count` held-out conversations of a task; targets are their last answers."""
    items = islice(held_out(task, seed=1, thinking=thinking), count)
    documents = (encode(item, tokenizer, last_only=True) for item in items)
    fitting = (document for document in documents if len(document.ids) <= length)
    return np.stack([row for row, _ in pack(fitting, length, fill_id)])


def _work(queue: Queue[Rows], path: Path, seed: int, length: int, fill_id: int, rows: int) -> None:
    tokenizer = Tokenizer.from_file(str(path))
    stream = training_rows(tokenizer, seed, length, fill_id)
    while True:
        queue.put(np.stack(list(islice(stream, rows))))


class RowServer:
    """Owns the worker processes that make training rows; `close` ends them."""

    def __init__(
        self, path: Path, seed: int, length: int, fill_id: int, rows: int, workers: int
    ) -> None:
        context = mp.get_context("spawn")
        self._queue: Queue[Rows] = context.Queue(maxsize=64)
        self._workers = [
            context.Process(
                target=_work,
                args=(self._queue, path, seed * 1000 + n, length, fill_id, rows),
                daemon=True,
            )
            for n in range(workers)
        ]
        for worker in self._workers:
            worker.start()

    def take(self) -> Rows:
        """Return the next batch [rows, 5, length]; waits for a worker."""
        return self._queue.get(timeout=120)

    def waiting(self) -> int:
        """Return how many batches are ready."""
        return self._queue.qsize()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.terminate()
