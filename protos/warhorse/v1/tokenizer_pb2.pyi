from warhorse.v1 import common_pb2 as _common_pb2
from warhorse.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolChoice(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_CHOICE_UNSPECIFIED: _ClassVar[ToolChoice]
    TOOL_CHOICE_NONE: _ClassVar[ToolChoice]
    TOOL_CHOICE_AUTO: _ClassVar[ToolChoice]
    TOOL_CHOICE_REQUIRED: _ClassVar[ToolChoice]
    TOOL_CHOICE_NAMED: _ClassVar[ToolChoice]

class ParseState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PARSE_STATE_UNSPECIFIED: _ClassVar[ParseState]
    PARSE_STATE_REASONING: _ClassVar[ParseState]
    PARSE_STATE_CONTENT: _ClassVar[ParseState]
    PARSE_STATE_TEXT: _ClassVar[ParseState]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
TOOL_CHOICE_UNSPECIFIED: ToolChoice
TOOL_CHOICE_NONE: ToolChoice
TOOL_CHOICE_AUTO: ToolChoice
TOOL_CHOICE_REQUIRED: ToolChoice
TOOL_CHOICE_NAMED: ToolChoice
PARSE_STATE_UNSPECIFIED: ParseState
PARSE_STATE_REASONING: ParseState
PARSE_STATE_CONTENT: ParseState
PARSE_STATE_TEXT: ParseState
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason

class ContentPart(_message.Message):
    __slots__ = ("text", "image_url", "image_detail")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_URL_FIELD_NUMBER: _ClassVar[int]
    IMAGE_DETAIL_FIELD_NUMBER: _ClassVar[int]
    text: str
    image_url: str
    image_detail: str
    def __init__(self, text: _Optional[str] = ..., image_url: _Optional[str] = ..., image_detail: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "reasoning", "tool_calls", "tool_call_id", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: _containers.RepeatedCompositeFieldContainer[ContentPart]
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("name", "description", "parameters_json", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_JSON_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters_json: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters_json: _Optional[str] = ..., strict: _Optional[bool] = ...) -> None: ...

class RenderRequest(_message.Message):
    __slots__ = ("messages", "tools", "tool_choice", "tool_name", "reasoning_effort", "enable_thinking", "template_kwargs_json", "add_generation_prompt", "continue_final_message", "chat_template", "response_format_json", "task")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOOL_NAME_FIELD_NUMBER: _ClassVar[int]
    REASONING_EFFORT_FIELD_NUMBER: _ClassVar[int]
    ENABLE_THINKING_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FORMAT_JSON_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: ToolChoice
    tool_name: str
    reasoning_effort: str
    enable_thinking: bool
    template_kwargs_json: str
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str
    response_format_json: str
    task: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[_Union[ToolChoice, str]] = ..., tool_name: _Optional[str] = ..., reasoning_effort: _Optional[str] = ..., enable_thinking: _Optional[bool] = ..., template_kwargs_json: _Optional[str] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ..., chat_template: _Optional[str] = ..., response_format_json: _Optional[str] = ..., task: _Optional[str] = ...) -> None: ...

class RenderResponse(_message.Message):
    __slots__ = ("token_ids", "text", "images", "start_state", "stop_token_ids", "reasoning_end_token_id", "images_kept")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    START_STATE_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REASONING_END_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    IMAGES_KEPT_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    text: str
    images: _containers.RepeatedCompositeFieldContainer[ImageInput]
    start_state: ParseState
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    reasoning_end_token_id: int
    images_kept: int
    def __init__(self, token_ids: _Optional[bytes] = ..., text: _Optional[str] = ..., images: _Optional[_Iterable[_Union[ImageInput, _Mapping]]] = ..., start_state: _Optional[_Union[ParseState, str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., reasoning_end_token_id: _Optional[int] = ..., images_kept: _Optional[int] = ...) -> None: ...

class ImageInput(_message.Message):
    __slots__ = ("pixels", "region", "offset", "length", "digest")
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    pixels: _tensor_pb2.Tensor
    region: _tensor_pb2.Region
    offset: int
    length: int
    digest: bytes
    def __init__(self, pixels: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., region: _Optional[_Union[_tensor_pb2.Region, _Mapping]] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("text", "add_special_tokens", "parse_special")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARSE_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    text: str
    add_special_tokens: bool
    parse_special: bool
    def __init__(self, text: _Optional[str] = ..., add_special_tokens: _Optional[bool] = ..., parse_special: _Optional[bool] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    def __init__(self, token_ids: _Optional[bytes] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("token_ids", "skip_special_tokens", "each")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EACH_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    skip_special_tokens: bool
    each: bool
    def __init__(self, token_ids: _Optional[bytes] = ..., skip_special_tokens: _Optional[bool] = ..., each: _Optional[bool] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("text", "token_bytes")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_bytes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, text: _Optional[str] = ..., token_bytes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ParseOpen(_message.Message):
    __slots__ = ("request_id", "start_state", "tools", "tool_choice", "parallel_tool_calls", "stop", "include_stop_str_in_output", "skip_special_tokens", "prompt_tail", "tool_call_parser", "reasoning_parser", "token_texts", "hidden_token_ids", "call_id_seed", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    START_STATE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TAIL_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_PARSER_FIELD_NUMBER: _ClassVar[int]
    REASONING_PARSER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TEXTS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_SEED_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    start_state: ParseState
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    prompt_tail: bytes
    tool_call_parser: str
    reasoning_parser: str
    token_texts: bool
    hidden_token_ids: _containers.RepeatedScalarFieldContainer[int]
    call_id_seed: str
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., start_state: _Optional[_Union[ParseState, str]] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[_Union[ToolChoice, str]] = ..., parallel_tool_calls: _Optional[bool] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop_str_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., prompt_tail: _Optional[bytes] = ..., tool_call_parser: _Optional[str] = ..., reasoning_parser: _Optional[str] = ..., token_texts: _Optional[bool] = ..., hidden_token_ids: _Optional[_Iterable[int]] = ..., call_id_seed: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class ParseTokens(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ParseFinish(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ...) -> None: ...

class ParseRequest(_message.Message):
    __slots__ = ("open", "tokens", "finish")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    open: ParseOpen
    tokens: ParseTokens
    finish: ParseFinish
    def __init__(self, open: _Optional[_Union[ParseOpen, _Mapping]] = ..., tokens: _Optional[_Union[ParseTokens, _Mapping]] = ..., finish: _Optional[_Union[ParseFinish, _Mapping]] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("reasoning", "content", "tool_call")
    REASONING_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    reasoning: str
    content: str
    tool_call: ToolCallDelta
    def __init__(self, reasoning: _Optional[str] = ..., content: _Optional[str] = ..., tool_call: _Optional[_Union[ToolCallDelta, _Mapping]] = ...) -> None: ...

class ParseResponse(_message.Message):
    __slots__ = ("deltas", "stop_matched", "finish_reason", "tokens_used", "reasoning_tokens", "token_bytes")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    STOP_MATCHED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_USED_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    stop_matched: int
    finish_reason: FinishReason
    tokens_used: int
    reasoning_tokens: int
    token_bytes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., stop_matched: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., tokens_used: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ..., token_bytes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ParseManyItem(_message.Message):
    __slots__ = ("choice", "request", "drop")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    choice: int
    request: ParseRequest
    drop: bool
    def __init__(self, choice: _Optional[int] = ..., request: _Optional[_Union[ParseRequest, _Mapping]] = ..., drop: _Optional[bool] = ...) -> None: ...

class ParseManyRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ParseManyItem]
    def __init__(self, items: _Optional[_Iterable[_Union[ParseManyItem, _Mapping]]] = ...) -> None: ...

class ParseManyAnswer(_message.Message):
    __slots__ = ("choice", "response", "error", "error_message", "error_field")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_FIELD_NUMBER: _ClassVar[int]
    choice: int
    response: ParseResponse
    error: _common_pb2.ErrorReason
    error_message: str
    error_field: str
    def __init__(self, choice: _Optional[int] = ..., response: _Optional[_Union[ParseResponse, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.ErrorReason, str]] = ..., error_message: _Optional[str] = ..., error_field: _Optional[str] = ...) -> None: ...

class ParseManyResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[ParseManyAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[ParseManyAnswer, _Mapping]]] = ...) -> None: ...

class DescribeTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeTokenizerResponse(_message.Message):
    __slots__ = ("service", "model", "tool_call_parser", "reasoning_parser", "has_chat_template", "generation_config_json", "stop_token_ids", "special_token_ids")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_PARSER_FIELD_NUMBER: _ClassVar[int]
    REASONING_PARSER_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    service: _common_pb2.ServiceInfo
    model: _common_pb2.ModelInfo
    tool_call_parser: str
    reasoning_parser: str
    has_chat_template: bool
    generation_config_json: str
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    special_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, service: _Optional[_Union[_common_pb2.ServiceInfo, _Mapping]] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., tool_call_parser: _Optional[str] = ..., reasoning_parser: _Optional[str] = ..., has_chat_template: _Optional[bool] = ..., generation_config_json: _Optional[str] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., special_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...
