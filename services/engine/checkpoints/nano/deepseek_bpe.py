"""A small byte-level BPE tokenizer with the special tokens of the DeepSeek family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.engine.checkpoints.nano.corpus import conversations

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
_PIECES = r"\p{L}+|\p{N}|\n+|[^\s\p{L}\p{N}]+(?: [^\s\p{L}\p{N}]+)*|\s"
_SAMPLE = 300  # conversations


def _texts(seed: int) -> Iterator[str]:
    for item in islice(conversations(seed), _SAMPLE):
        for message in item.messages:
            yield f"{message.content}\n{message.reasoning}"


def train_tokenizer(seed: int) -> Tokenizer:
    """A tokenizer of TOKENIZER_SIZE entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE - len(_SPECIAL) - len(_PLAIN),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[_added(t, special=True) for t in _FIRST],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed), trainer)
    tokenizer.add_tokens([_added(t, special=True) for t in _SPECIAL])
    tokenizer.add_tokens([_added(t, special=False) for t in _PLAIN])
    if tokenizer.get_vocab_size() != TOKENIZER_SIZE:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} entries, not {TOKENIZER_SIZE}"
        )
    return tokenizer


def _added(text: str, *, special: bool) -> AddedToken:
    return AddedToken(text, special=special, normalized=False)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; the family has no chat template."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    text = tokenizer.to_str(pretty=True)
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
