"""A small byte-level BPE tokenizer with the special tokens of the DeepSeek family."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from services.engine.checkpoints.nano import byte_bpe

_BAR = "\N{FULLWIDTH VERTICAL LINE}"


def _mark(name: str) -> str:
    return f"<{_BAR}{name}{_BAR}>"


BOS = _mark("begin▁of▁sentence")
EOS = _mark("end▁of▁sentence")
PAD = _mark("▁pad▁")
IMAGE = _mark("deepseek_image")
NOISE = _mark("noise")  # fills the open places of a draft block
TOKENIZER_SIZE = 504
# Behind the learnt entries, in this order; the first three come before them, as in the release.
_FIRST = (BOS, EOS, PAD)
_TURNS = ("User", "Assistant", "System", "latest_reminder")
_TASKS = ("action", "query", "authority", "domain", "title", "read_url")
_FILLING = ("fim▁begin", "fim▁hole", "fim▁end")
_PLACES = ("ref", "/ref", "box", "/box", "point", "/point", "polygon", "/polygon")
_SPECIAL = (
    f"{_BAR}DSML{_BAR}",
    *(_mark(name) for name in (*_TURNS, *_TASKS, *_FILLING, *_PLACES)),
    IMAGE,
    NOISE,
)
_PLAIN = ("<think>", "</think>")  # kept by decoders that skip special tokens


def train_tokenizer(seed: int) -> Tokenizer:
    """A tokenizer of TOKENIZER_SIZE entries."""
    behind = dict.fromkeys(_SPECIAL, True) | dict.fromkeys(_PLAIN, False)
    return byte_bpe.train(TOKENIZER_SIZE, byte_bpe.AddedTokens(_FIRST, behind), seed)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; the family has no chat template."""
    byte_bpe.write(tokenizer, folder, max_length, bos_token=BOS, eos_token=EOS, pad_token=PAD)
