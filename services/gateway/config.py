"""Settings of the gateway. Names follow the flags of other OpenAI-compatible servers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from services.common.logs import LogLevel
from services.common.tracing import TRACES_HELP
from services.gateway.schema.defaults import overrides


def _help(text: str, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    bounds = {"min": low, "max": high}
    return {"help": text} | {name: value for name, value in bounds.items() if value is not None}


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Flags of `python -m services.gateway`; every one is also WARHORSE_<NAME>."""

    host: str = field(default="0.0.0.0", metadata=_help("address to listen on"))
    port: int = field(default=8000, metadata=_help("TCP port; 0: any free one", 0, 65535))
    run_dir: Path = field(
        default=Path("/run/warhorse"), metadata=_help("directory of the services' sockets")
    )
    uds: Path | None = field(
        default=None, metadata=_help("Unix socket to listen on instead of host and port")
    )
    ssl_keyfile: Path | None = field(default=None, metadata=_help("private key for HTTPS"))
    ssl_certfile: Path | None = field(default=None, metadata=_help("certificate for HTTPS"))
    ssl_ca_certs: Path | None = field(
        default=None, metadata=_help("certificates that clients' certificates must come from")
    )
    ssl_cert_reqs: int = field(
        default=0, metadata=_help("certificates of clients: 0 none, 1 optional, 2 required", 0, 2)
    )
    tokenizer_address: tuple[str, ...] = field(
        default=(), metadata=_help("gRPC targets of tokenizers; default: the run directory's")
    )
    engine_address: tuple[str, ...] = field(
        default=(), metadata=_help("gRPC targets of engines; default: the run directory's")
    )
    served_model_name: tuple[str, ...] = field(
        default=(), metadata=_help("names of the model; default: the engine's own name")
    )
    api_key: tuple[str, ...] = field(
        default=(), metadata=_help("accepted keys; without any, no key is asked for")
    )
    allowed_origins: tuple[str, ...] = field(
        default=(), metadata=_help("origins that browsers may call from")
    )
    root_path: str = field(default="", metadata=_help("path prefix added by a proxy"))
    max_body_mb: int = field(default=64, metadata=_help("largest request body, MiB", 1, 1024))
    max_num_queued: int = field(
        default=0, metadata=_help("requests that may wait for their first token; 0: any", 0)
    )
    max_logprobs: int = field(default=20, metadata=_help("largest top_logprobs", 0, 1000))
    generation_config: Literal["auto", "none"] = field(
        default="auto", metadata=_help("auto: the checkpoint's sampling defaults; none: ours")
    )
    override_generation_config: str = field(
        default="", metadata=_help("JSON object laid over the checkpoint's generation config")
    )
    deepseek_official_sampling: bool = field(
        default=False,
        metadata=_help(
            "DeepSeek chats: temperature and top_p as DeepSeek's own interface sets them"
        ),
    )
    default_chat_template_kwargs: str = field(
        default="", metadata=_help("JSON object of template arguments for every chat request")
    )
    trust_request_chat_template: bool = field(
        default=False, metadata=_help("allow requests to bring their own chat template")
    )
    tool_call_parser: str = field(
        default="", metadata=_help("tool-call format; default: the checkpoint's; none: off")
    )
    tool_strict_level: Literal["none", "auto", "function"] = field(
        default="auto",
        metadata=_help("free tool calls follow their schemas: never, for strict tools, always"),
    )
    enable_auto_tool_choice: bool = field(
        default=True, metadata=_help("parse calls that the model makes of its own accord")
    )
    exclude_tools_when_tool_choice_none: bool = field(
        default=True, metadata=_help("tool_choice none keeps the tools out of the prompt")
    )
    reasoning_parser: str = field(
        default="", metadata=_help("reasoning format; default: the checkpoint's; none: off")
    )
    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = field(
        default="both", metadata=_help("field name of reasoning in responses")
    )
    response_role: str = field(
        default="assistant", metadata=_help("role of the messages in chat responses")
    )
    enable_prompt_tokens_details: bool = field(
        default=True, metadata=_help("cached and image tokens in usage")
    )
    enable_server_load_tracking: bool = field(
        default=True, metadata=_help("count running requests for /load")
    )
    enable_force_include_usage: bool = field(
        default=False, metadata=_help("usage in every streamed frame and at its end, asked or not")
    )
    enable_request_id_headers: bool = field(
        default=False, metadata=_help("echo X-Request-Id in responses")
    )
    disable_access_log: bool = field(
        default=False,
        metadata=_help("no log line per request") | {"aliases": ("--disable-uvicorn-access-log",)},
    )
    disable_log_requests: bool = field(
        default=True, metadata=_help("the contents of requests are never logged; cannot be off")
    )
    trust_remote_code: bool = field(
        default=False, metadata=_help("accepted; no code of a checkpoint is ever run")
    )
    tokenizer_mode: Literal["auto", "hf"] = field(
        default="auto", metadata=_help("accepted; tokenizers read tokenizer.json")
    )
    chat_template_content_format: Literal["auto"] = field(
        default="auto", metadata=_help("accepted; follows from the chat template")
    )
    disable_fastapi_docs: bool = field(default=False, metadata=_help("no /docs, /openapi.json"))
    sse_keep_alive_interval: float = field(
        default=15.0, metadata=_help("idle seconds before a keep-alive comment; 0: never", 0)
    )
    stall_seconds: float = field(
        default=60.0, metadata=_help("a client that takes nothing for so long is cut", 0.1)
    )
    peer_wait_seconds: float = field(
        default=8.0, metadata=_help("how long a request waits for a lost peer", 0)
    )
    request_timeout_seconds: float = field(
        default=7200.0, metadata=_help("deadline of a generation", 1)
    )
    response_store_mb: int = field(
        default=256, metadata=_help("MiB of responses kept for /v1/responses; 0: none", 0, 65536)
    )
    response_store_seconds: float = field(
        default=3600.0, metadata=_help("how long a response is kept", 0)
    )
    shutdown_timeout: float = field(
        default=30.0, metadata=_help("seconds that running requests get after SIGTERM", 0)
    )
    otlp_traces_endpoint: str = field(default="", metadata=_help(TRACES_HELP))
    log_level: LogLevel = field(default="info", metadata=_help("least severe level that is logged"))

    def __post_init__(self) -> None:
        overrides(self.generation_overrides)
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile need each other")
        if self.ssl_certfile is None and (self.ssl_ca_certs or self.ssl_cert_reqs):
            raise ValueError("ssl_ca_certs and ssl_cert_reqs need ssl_certfile")
        if not self.disable_log_requests:
            raise ValueError("disable_log_requests cannot be off: requests are never logged")
        _json_object("default_chat_template_kwargs", self.default_chat_template_kwargs)

    @property
    def generation_overrides(self) -> dict[str, Any]:
        """Parsed `override_generation_config`."""
        return _json_object("override_generation_config", self.override_generation_config)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Parsed `default_chat_template_kwargs`."""
        return _json_object("default_chat_template_kwargs", self.default_chat_template_kwargs)


def _json_object(name: str, text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} must be a JSON object, got {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON object, got {text!r}")
    return value
