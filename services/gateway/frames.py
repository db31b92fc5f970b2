"""What all streams of the OpenAI chat and completion interfaces share."""

from __future__ import annotations

import orjson

from services.gateway.errors import ApiError

DONE = b"data: [DONE]\n\n"


class OpenAiFrames:
    """Keep-alive and failure of a writer."""

    keep_alive = b": keep-alive\n\n"

    def fail(self, error: ApiError) -> bytes:
        """An error frame and the end mark."""
        return b"data: " + orjson.dumps(error.body()) + b"\n\n" + DONE
