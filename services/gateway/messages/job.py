"""POST /v1/messages: a chat completion in the Anthropic interface."""

from __future__ import annotations

from services.gateway.chat import ChatJob
from services.gateway.generation import EventStream
from services.gateway.messages.writers import MessageBodyWriter, MessageStreamWriter
from services.gateway.respond import Writer


class MessagesJob(ChatJob):
    """One message."""

    id_prefix = "msg_"

    def writer(self, stream: EventStream) -> Writer:
        """Events or one body."""
        kind = MessageStreamWriter if self.streaming else MessageBodyWriter
        return kind(self.envelope, stream)
