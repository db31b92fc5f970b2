"""How much of a prompt an engine has in its prefix cache, told from the hashes that it reports."""

from __future__ import annotations

from collections.abc import Sequence

from warhorse.v1 import engine_pb2

from services.common.prefix_chain import SHORT_BYTES, HashChain, root_hash
from services.gateway.tokens import unpack


class PromptPrefix:
    """The units of one prompt; hashed once per kind of engine, when first asked."""

    def __init__(self, request: engine_pb2.GenerateRequest) -> None:
        self._request = request
        self._tokens: list[int] | None = None
        self._chains: dict[tuple[str, int], Sequence[bytes]] = {}

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self._request.prompt_token_ids) // 4

    def cached_tokens(self, info: engine_pb2.DescribeEngineResponse, known: set[bytes]) -> int:
        """Tokens of the longest hit with which `known` units end; the last token never counts."""
        unit = info.unit_tokens
        if not unit or not known:
            return 0
        hashes = self._hashes(info.model.fingerprint, unit)
        most = (self.length - 1) // unit
        return next((k * unit for k in range(most, 0, -1) if hashes[k - 1] in known), 0)

    def _hashes(self, fingerprint: str, unit: int) -> Sequence[bytes]:
        key = (fingerprint, unit)
        if key not in self._chains:
            if self._tokens is None:
                self._tokens = unpack(self._request.prompt_token_ids)
            root = root_hash(fingerprint, self._request.cache_salt)
            chain = HashChain(root, unit, self._request.images)
            chain.extend(self._tokens)
            self._chains[key] = [h[:SHORT_BYTES] for h in chain.hashes]
        return self._chains[key]
