"""The served vocabulary in the forms that the grammar libraries take."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

if TYPE_CHECKING:
    import llguidance
    import xgrammar


# The library wants an end token of its own; the tokens that end an output are handled by us.
LLGUIDANCE_END = 0


@lru_cache(maxsize=1)
def xgrammar_vocabulary(folder: Path, vocab_size: int) -> xgrammar.TokenizerInfo:
    """The tokens of `folder`'s tokenizer.json, in `vocab_size` rows of logits."""
    import xgrammar

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size(True))]
    kind = xgrammar.VocabType.BYTE_LEVEL
    # Which tokens end an output is said for each request.
    return xgrammar.TokenizerInfo(texts, kind, vocab_size=vocab_size, stop_token_ids=[])


@lru_cache(maxsize=1)
def llguidance_vocabulary(folder: Path, vocab_size: int) -> llguidance.LLTokenizer:
    """The same for llguidance."""
    import llguidance

    definition = (folder / "tokenizer.json").read_text("utf-8")
    return llguidance.LLTokenizer(definition, vocab_size, LLGUIDANCE_END)
