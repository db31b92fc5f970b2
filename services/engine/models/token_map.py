"""The token map of Engram: ids whose texts differ only in case, accents or spacing become one.

Source: the release's inference code. For every token in ascending order of ids its text is made
(the raw decoding of the single id); equal normalised texts share a compressed id, numbered by
first appearance.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.normalizers import (
    NFD,
    NFKC,
    Lowercase,
    Normalizer,
    Replace,
    Sequence,
    Strip,
    StripAccents,
)

from services.common.checkpoint import CheckpointError

FILE_NAME = "tokenizer.json"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Stands for a lone space while texts are stripped: a private-use character.
_SPACE = "\ue000"


def token_map(folder: Path, distinct: int) -> torch.Tensor:
    """Compressed id int64 [tokens] of every id of the folder's tokenizer.

    Raises CheckpointError where tokenizer.json is missing or unreadable, or the number of
    compressed ids is not `distinct`: other rows than those of the training would be read.
    """
    path = folder / FILE_NAME
    keys = token_keys(_tokenizer(path))
    numbers: dict[str, int] = {}
    ids = [numbers.setdefault(key, len(numbers)) for key in keys]
    if len(numbers) != distinct:
        raise CheckpointError(
            f"the tokenizer has {len(numbers)} distinct normalised tokens, the config's "
            f"engram_compressed_vocab_size is {distinct}",
            file=path,
        )
    return torch.tensor(ids, dtype=torch.int64)


def token_keys(tokenizer: Tokenizer) -> list[str]:
    """What each id, in ascending order, is compared by.

    The normalised text, or the text itself where nothing is left of it; the raw vocabulary entry
    where the token is a part of a character.
    """
    normalizer = _normalizer()
    keys = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if _REPLACEMENT in text:
            keys.append(tokenizer.id_to_token(token) or text)
        else:
            keys.append(normalizer.normalize_str(text) or text)
    return keys


def _normalizer() -> Normalizer:
    return Sequence(
        [
            NFKC(),
            NFD(),
            StripAccents(),
            Lowercase(),
            Replace(Regex(r"[ \t\r\n]+"), " "),
            Replace(Regex(r"^ $"), _SPACE),
            Strip(),
            Replace(_SPACE, " "),
        ]
    )


def _tokenizer(path: Path) -> Tokenizer:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"the tokenizer cannot be read: {error}", file=path) from error
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"the tokenizer cannot be read: {error}", file=path) from error
