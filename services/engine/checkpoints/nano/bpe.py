"""The nano tokenizer: byte-level BPE trained on the generated conversations.

Digits, single spaces and runs of letters are separate pieces, so a name has the same tokens
wherever it stands; this is what makes exact copying easy for a small model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from services.engine.checkpoints.nano.config import ADDED_TOKENS, NanoConfig
from services.engine.checkpoints.nano.conversation import render
from services.engine.checkpoints.nano.corpus import conversations

_PIECES = r"\p{L}+|\p{N}|\n+|[^\s\p{L}\p{N}]+(?: [^\s\p{L}\p{N}]+)*|\s"
_SAMPLE = 6_000  # conversations
_SEED = 20_26


def _texts() -> Iterator[str]:
    marks = [token for token, _ in ADDED_TOKENS]
    for item in islice(conversations(_SEED), _SAMPLE):
        text = "".join(piece.text for piece in render(item))
        for mark in marks:
            text = text.replace(mark, "\n")
        yield text


def train_tokenizer(cfg: NanoConfig) -> Tokenizer:
    """Return a tokenizer of `cfg.tokenizer_size` entries, the added tokens last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=cfg.first_added_id,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_tokens(
        [AddedToken(t, special=special, normalized=False) for t, special in ADDED_TOKENS]
    )
    if tokenizer.get_vocab_size() != cfg.tokenizer_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} entries, not {cfg.tokenizer_size}"
        )
    return tokenizer


def tokenizer_config(cfg: NanoConfig) -> dict[str, object]:
    """Return tokenizer_config.json."""
    decoder = {
        str(cfg.token_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": special,
        }
        for token, special in ADDED_TOKENS
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": decoder,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": cfg.max_position_embeddings,
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }


def write_tokenizer(cfg: NanoConfig, folder: Path) -> None:
    """Train the tokenizer and write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    text = train_tokenizer(cfg).to_str(pretty=True)
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    text = json.dumps(tokenizer_config(cfg), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
