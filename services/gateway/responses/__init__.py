"""The Responses interface: POST /v1/responses."""
