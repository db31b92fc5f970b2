"""Which renderer makes the prompts of a checkpoint and of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from warhorse.v1 import common_pb2

from services.common.errors import ServiceError, StartupError
from services.tokenizer.folder import TokenizerFolder
from services.tokenizer.rendering.deepseek import DeepSeekRenderer, Dialect
from services.tokenizer.rendering.deepseek_texts import v4_texts, v41_texts
from services.tokenizer.rendering.pool import RenderError, RenderPool
from services.tokenizer.rendering.prompt import Renderer
from services.tokenizer.rendering.template import ChatTemplate, TemplateRenderer


class Pools:
    """Render workers: for the checkpoint's template and, apart, for templates of requests."""

    def __init__(self, own: RenderPool, foreign: RenderPool) -> None:
        self.own = own
        self.foreign = foreign

    async def close(self) -> None:
        """End all workers."""
        await self.own.close()
        await self.foreign.close()


class Renderers:
    """The renderers of one checkpoint. Safe to share between requests."""

    def __init__(
        self, folder: TokenizerFolder, pools: Pools, renamed_efforts: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._pools = pools
        self._rules = folder.family.rules(renamed_efforts)
        self._placeholder = folder.images.placeholder if folder.images else None
        self._renamed = renamed_efforts
        self._own: Renderer | None = None

    async def start(self) -> None:
        """Make the checkpoint's own renderer. Raises StartupError naming the file at fault."""
        folder = self._folder
        if folder.dialect is not None:
            self._own = await asyncio.to_thread(self._native, folder.dialect)
            return
        await self._pools.own.start()
        if folder.template is None:
            return
        try:
            await self._pools.own.check(folder.template)
        except RenderError as error:
            raise StartupError(f"{folder.template_source}: {error}") from error
        self._own = self._by_template(folder.template, self._pools.own)

    def _native(self, dialect: Dialect) -> Renderer:
        folder = self._folder
        missing = [t for t in dialect.required if t not in folder.vocabulary.control]
        if missing:
            raise StartupError(
                f"{folder.path / 'tokenizer.json'} lacks the tokens {', '.join(missing)} of the "
                "DeepSeek chat format"
            )
        texts = v41_texts() if dialect.system else v4_texts(folder.path, folder.config)
        placeholder = self._placeholder or "<｜image｜>"
        return DeepSeekRenderer(folder.vocabulary, dialect, texts, self._renamed, placeholder)

    def _by_template(self, source: str, pool: RenderPool) -> Renderer:
        return TemplateRenderer(
            self._folder.vocabulary,
            self._rules,
            self._folder.template_variables,
            ChatTemplate.of(source),
            pool,
            self._placeholder,
        )

    def of_request(self, chat_template: str) -> Renderer:
        """Return the renderer of a request. chat_template: the request's own, or empty.

        Raises ServiceError when there is none.
        """
        if chat_template:
            return self._by_template(chat_template, self._pools.foreign)
        if self._own is None:
            raise ServiceError(
                common_pb2.ERROR_REASON_TEMPLATE,
                "the checkpoint has no chat template; send one or use completions",
                field="messages",
            )
        return self._own
