"""A small byte-level BPE tokenizer with the special tokens of the GLM family."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from services.engine.checkpoints.nano import byte_bpe

PAD, EOS = "<|pad|>", "<|endoftext|>"
_PLAIN = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_TURNS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
# The last six, so that their ids are those of the nano config.
_MEDIA = (
    *("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>"),
)


def train_tokenizer(image_id: int, seed: int) -> Tokenizer:
    """A tokenizer whose image token has the id `image_id`, the other media tokens behind it."""
    behind = dict.fromkeys(_PLAIN, False) | dict.fromkeys((*_TURNS, *_MEDIA), True)
    tokens = byte_bpe.AddedTokens((PAD, EOS), behind)
    return byte_bpe.train(image_id + len(_MEDIA), tokens, seed)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; the built-in chat template serves."""
    byte_bpe.write(tokenizer, folder, max_length, eos_token=EOS, pad_token=PAD)
