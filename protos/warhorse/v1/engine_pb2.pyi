from warhorse.v1 import common_pb2 as _common_pb2
from warhorse.v1 import tokenizer_pb2 as _tokenizer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ThinkingBudget(_message.Message):
    __slots__ = ("tokens", "end_token_id")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    end_token_id: int
    def __init__(self, tokens: _Optional[int] = ..., end_token_id: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "thinking_budget")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    THINKING_BUDGET_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    thinking_budget: ThinkingBudget
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., thinking_budget: _Optional[_Union[ThinkingBudget, _Mapping]] = ...) -> None: ...

class StoppingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop_token_ids", "eos_token_ids", "ignore_eos")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class OutputParams(_message.Message):
    __slots__ = ("logprobs", "prompt_logprobs", "logprob_token_ids")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    logprobs: int
    prompt_logprobs: int
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ToolCallGrammar(_message.Message):
    __slots__ = ("parser", "tools", "choice", "tool_name", "parallel")
    PARSER_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOOL_NAME_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_FIELD_NUMBER: _ClassVar[int]
    parser: str
    tools: _containers.RepeatedCompositeFieldContainer[_tokenizer_pb2.Tool]
    choice: _tokenizer_pb2.ToolChoice
    tool_name: str
    parallel: bool
    def __init__(self, parser: _Optional[str] = ..., tools: _Optional[_Iterable[_Union[_tokenizer_pb2.Tool, _Mapping]]] = ..., choice: _Optional[_Union[_tokenizer_pb2.ToolChoice, str]] = ..., tool_name: _Optional[str] = ..., parallel: _Optional[bool] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "ebnf", "structural_tag", "tool_calls", "after_token_id", "compiled", "whitespace_pattern", "fixed_whitespace")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    EBNF_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    AFTER_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    COMPILED_FIELD_NUMBER: _ClassVar[int]
    WHITESPACE_PATTERN_FIELD_NUMBER: _ClassVar[int]
    FIXED_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    ebnf: str
    structural_tag: str
    tool_calls: ToolCallGrammar
    after_token_id: int
    compiled: bytes
    whitespace_pattern: str
    fixed_whitespace: bool
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., ebnf: _Optional[str] = ..., structural_tag: _Optional[str] = ..., tool_calls: _Optional[_Union[ToolCallGrammar, _Mapping]] = ..., after_token_id: _Optional[int] = ..., compiled: _Optional[bytes] = ..., whitespace_pattern: _Optional[str] = ..., fixed_whitespace: _Optional[bool] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "prompt_token_ids", "images", "sampling", "stopping", "output", "n", "priority", "cache_salt", "grammar", "traceparent", "client_request_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt_token_ids: bytes
    images: _containers.RepeatedCompositeFieldContainer[_tokenizer_pb2.ImageInput]
    sampling: SamplingParams
    stopping: StoppingParams
    output: OutputParams
    n: int
    priority: int
    cache_salt: str
    grammar: Grammar
    traceparent: str
    client_request_id: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_token_ids: _Optional[bytes] = ..., images: _Optional[_Iterable[_Union[_tokenizer_pb2.ImageInput, _Mapping]]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stopping: _Optional[_Union[StoppingParams, _Mapping]] = ..., output: _Optional[_Union[OutputParams, _Mapping]] = ..., n: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., traceparent: _Optional[str] = ..., client_request_id: _Optional[str] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("prompt_tokens",)
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ...) -> None: ...

class PromptDone(_message.Message):
    __slots__ = ("cached_tokens", "external_cached_tokens", "prompt_logprobs", "queue_seconds", "prefill_seconds", "created_cache_tokens")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CREATED_CACHE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    external_cached_tokens: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    queue_seconds: float
    prefill_seconds: float
    created_cache_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ..., external_cached_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., created_cache_tokens: _Optional[int] = ...) -> None: ...

class TokenChunk(_message.Message):
    __slots__ = ("choice", "token_ids", "logprobs")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, choice: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("prefilled_tokens", "total_tokens")
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefilled_tokens: int
    total_tokens: int
    def __init__(self, prefilled_tokens: _Optional[int] = ..., total_tokens: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("choice", "reason", "stop_token_id", "completion_tokens", "error", "error_message", "preemptions")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    reason: _tokenizer_pb2.FinishReason
    stop_token_id: int
    completion_tokens: int
    error: _common_pb2.ErrorReason
    error_message: str
    preemptions: int
    def __init__(self, choice: _Optional[int] = ..., reason: _Optional[_Union[_tokenizer_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.ErrorReason, str]] = ..., error_message: _Optional[str] = ..., preemptions: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("accepted", "prompt_done", "chunk", "progress", "finished")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DONE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    prompt_done: PromptDone
    chunk: TokenChunk
    progress: Progress
    finished: Finished
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., prompt_done: _Optional[_Union[PromptDone, _Mapping]] = ..., chunk: _Optional[_Union[TokenChunk, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class GenerateManyItem(_message.Message):
    __slots__ = ("request", "open", "timeout_seconds", "drop", "taken")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    request: int
    open: GenerateRequest
    timeout_seconds: float
    drop: bool
    taken: int
    def __init__(self, request: _Optional[int] = ..., open: _Optional[_Union[GenerateRequest, _Mapping]] = ..., timeout_seconds: _Optional[float] = ..., drop: _Optional[bool] = ..., taken: _Optional[int] = ...) -> None: ...

class GenerateManyRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[GenerateManyItem]
    def __init__(self, items: _Optional[_Iterable[_Union[GenerateManyItem, _Mapping]]] = ...) -> None: ...

class GenerateManyAnswer(_message.Message):
    __slots__ = ("request", "events", "error", "error_message", "error_field", "retry_after_seconds")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request: int
    events: _containers.RepeatedCompositeFieldContainer[GenerateResponse]
    error: _common_pb2.ErrorReason
    error_message: str
    error_field: str
    retry_after_seconds: float
    def __init__(self, request: _Optional[int] = ..., events: _Optional[_Iterable[_Union[GenerateResponse, _Mapping]]] = ..., error: _Optional[_Union[_common_pb2.ErrorReason, str]] = ..., error_message: _Optional[str] = ..., error_field: _Optional[str] = ..., retry_after_seconds: _Optional[float] = ...) -> None: ...

class GenerateManyResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[GenerateManyAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[GenerateManyAnswer, _Mapping]]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class DescribeEngineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheGroupInfo(_message.Message):
    __slots__ = ("name", "kind", "page_tokens", "page_bytes", "total_pages", "free_pages", "cached_pages")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    page_tokens: int
    page_bytes: int
    total_pages: int
    free_pages: int
    cached_pages: int
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., page_tokens: _Optional[int] = ..., page_bytes: _Optional[int] = ..., total_pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., cached_pages: _Optional[int] = ...) -> None: ...

class DescribeEngineResponse(_message.Message):
    __slots__ = ("service", "model", "cache_groups", "weight_bytes", "regions_pinned", "device", "max_num_seqs", "max_num_batched_tokens", "unit_tokens", "open_regions", "region_bytes", "kvcache_connected", "offload_connected")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CACHE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    REGIONS_PINNED_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPEN_REGIONS_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    KVCACHE_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    OFFLOAD_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    service: _common_pb2.ServiceInfo
    model: _common_pb2.ModelInfo
    cache_groups: _containers.RepeatedCompositeFieldContainer[CacheGroupInfo]
    weight_bytes: int
    regions_pinned: bool
    device: str
    max_num_seqs: int
    max_num_batched_tokens: int
    unit_tokens: int
    open_regions: int
    region_bytes: int
    kvcache_connected: bool
    offload_connected: bool
    def __init__(self, service: _Optional[_Union[_common_pb2.ServiceInfo, _Mapping]] = ..., model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., cache_groups: _Optional[_Iterable[_Union[CacheGroupInfo, _Mapping]]] = ..., weight_bytes: _Optional[int] = ..., regions_pinned: _Optional[bool] = ..., device: _Optional[str] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., unit_tokens: _Optional[int] = ..., open_regions: _Optional[int] = ..., region_bytes: _Optional[int] = ..., kvcache_connected: _Optional[bool] = ..., offload_connected: _Optional[bool] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("sequence", "running", "waiting", "waiting_tokens", "kv_usage", "preemptions", "prompt_tokens", "generation_tokens", "prefix_queries_tokens", "prefix_hit_tokens", "external_query_tokens", "external_hit_tokens", "silence_ms", "draining", "prefixes_reset", "prefixes_gone", "prefixes_added", "steps_by_tokens", "step_tokens", "drafts", "draft_tokens", "accepted_draft_tokens", "accepted_by_position")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTERNAL_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SILENCE_MS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_RESET_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_GONE_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_ADDED_FIELD_NUMBER: _ClassVar[int]
    STEPS_BY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    running: int
    waiting: int
    waiting_tokens: int
    kv_usage: float
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_queries_tokens: int
    prefix_hit_tokens: int
    external_query_tokens: int
    external_hit_tokens: int
    silence_ms: int
    draining: bool
    prefixes_reset: bool
    prefixes_gone: bytes
    prefixes_added: bytes
    steps_by_tokens: _containers.RepeatedScalarFieldContainer[int]
    step_tokens: int
    drafts: int
    draft_tokens: int
    accepted_draft_tokens: int
    accepted_by_position: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., kv_usage: _Optional[float] = ..., preemptions: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generation_tokens: _Optional[int] = ..., prefix_queries_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., external_query_tokens: _Optional[int] = ..., external_hit_tokens: _Optional[int] = ..., silence_ms: _Optional[int] = ..., draining: _Optional[bool] = ..., prefixes_reset: _Optional[bool] = ..., prefixes_gone: _Optional[bytes] = ..., prefixes_added: _Optional[bytes] = ..., steps_by_tokens: _Optional[_Iterable[int]] = ..., step_tokens: _Optional[int] = ..., drafts: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., accepted_by_position: _Optional[_Iterable[int]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("pages_dropped",)
    PAGES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    pages_dropped: int
    def __init__(self, pages_dropped: _Optional[int] = ...) -> None: ...

class ProfileEngineRequest(_message.Message):
    __slots__ = ("start",)
    START_FIELD_NUMBER: _ClassVar[int]
    start: bool
    def __init__(self, start: _Optional[bool] = ...) -> None: ...

class ProfileEngineResponse(_message.Message):
    __slots__ = ("file",)
    FILE_FIELD_NUMBER: _ClassVar[int]
    file: str
    def __init__(self, file: _Optional[str] = ...) -> None: ...
