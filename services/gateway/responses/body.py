"""The response object and its output items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.gateway.blocks import Block, BlockKind, BlockList
from services.gateway.errors import ApiError
from services.gateway.events import Ended, Usage
from services.gateway.responses.schema import ResponsesRequest
from services.gateway.responses.tools import ToolNames

_PREFIX = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What is known of a response before it begins. `created` in seconds since 1970."""

    id: str
    created: int
    model: str
    request: ResponsesRequest
    names: ToolNames

    def item_id(self, block: Block) -> str:
        """Id of the item of a block: the same in the stream and in the final output."""
        return f"{_PREFIX[block.kind]}_{self.id.removeprefix('resp_')}_{block.index}"

    def item(self, block: Block, status: str) -> dict[str, Any]:
        """The output item of a block as far as it goes."""
        item_id = self.item_id(block)
        match block.kind:
            case BlockKind.TEXT:
                content = [text_part(block.text)] if block.parts else []
                fields = {"type": "message", "role": "assistant", "content": content}
            case BlockKind.REASONING:
                content = [{"type": "reasoning_text", "text": block.text}] if block.parts else []
                fields = {"type": "reasoning", "summary": [], "content": content}
            case BlockKind.CALL:
                fields = self.names.item(block.name, block.call_id, item_id, block.text)
        return {"id": item_id, "status": status} | fields

    def body(self, status: str, **fields: Any) -> dict[str, Any]:
        """The response object; `fields` replace what it has by default."""
        request = self.request
        reasoning = request.reasoning
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "service_tier": "default",
            "store": request.store is not False,
            "temperature": request.temperature,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        } | fields

    def final(self, blocks: BlockList, ended: Ended | None, usage: Usage) -> dict[str, Any]:
        """The response object of a generation that came to its end."""
        cut = ended is not None and ended.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        last = blocks.blocks[-1] if blocks.blocks else None
        output = [self.item(b, status if b is last else "completed") for b in blocks.blocks]
        details = {"reason": "max_output_tokens"} if cut else None
        return self.body(
            status, output=output, incomplete_details=details, usage=usage_fields(usage)
        )

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The response object of a generation that broke."""
        return self.body("failed", error={"code": "server_error", "message": error.message})


def text_part(text: str) -> dict[str, Any]:
    """The content part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Counts under the names of the Responses interface."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
