"""A small byte-level BPE tokenizer, trained on the nano conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.engine.checkpoints.nano.corpus import conversations

_PIECES = r"\p{L}+|\p{N}|\n+|[^\s\p{L}\p{N}]+(?: [^\s\p{L}\p{N}]+)*|\s"
_SAMPLE = 300  # conversations


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """Tokens that are not learnt, in the order of their ids."""

    first: Sequence[str]  # special, from id 0 on
    behind: Mapping[str, bool]  # behind the learnt ones; whether decoders may skip the token


def train(size: int, tokens: AddedTokens, seed: int) -> Tokenizer:
    """A tokenizer of `size` entries; ValueError when the sample has too few pieces for them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(tokens.behind),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[_added(text, special=True) for text in tokens.first],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed), trainer)
    for text, special in tokens.behind.items():
        tokenizer.add_tokens([_added(text, special=special)])
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} entries, not {size}")
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path, max_length: int, **names: str) -> None:
    """Write tokenizer.json and tokenizer_config.json without a chat template.

    `names` are the roles of special tokens: bos_token, eos_token, pad_token.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        **names,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    text = tokenizer.to_str(pretty=True)
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _texts(seed: int) -> Iterator[str]:
    for item in islice(conversations(seed), _SAMPLE):
        for message in item.messages:
            yield f"{message.content}\n{message.reasoning}"


def _added(text: str, *, special: bool) -> AddedToken:
    return AddedToken(text, special=special, normalized=False)
