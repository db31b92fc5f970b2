"""The Anthropic interface: POST /v1/messages."""
