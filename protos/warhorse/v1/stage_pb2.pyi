from warhorse.v1 import common_pb2 as _common_pb2
from warhorse.v1 import engine_pb2 as _engine_pb2
from warhorse.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConfigureRequest(_message.Message):
    __slots__ = ("model", "fingerprint", "rank", "world", "first_layer", "last_layer", "activation_dtype", "device", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "pools")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    model: str
    fingerprint: str
    rank: int
    world: int
    first_layer: int
    last_layer: int
    activation_dtype: _tensor_pb2.Dtype
    device: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolSize]
    def __init__(self, model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., rank: _Optional[int] = ..., world: _Optional[int] = ..., first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ..., activation_dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ..., device: _Optional[str] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_model_len: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolSize, _Mapping]]] = ...) -> None: ...

class PoolSize(_message.Message):
    __slots__ = ("group", "count")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    group: str
    count: int
    def __init__(self, group: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class ConfigureResponse(_message.Message):
    __slots__ = ("service", "weight_bytes", "cache_groups", "device")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    service: _common_pb2.ServiceInfo
    weight_bytes: int
    cache_groups: _containers.RepeatedCompositeFieldContainer[_engine_pb2.CacheGroupInfo]
    device: str
    def __init__(self, service: _Optional[_Union[_common_pb2.ServiceInfo, _Mapping]] = ..., weight_bytes: _Optional[int] = ..., cache_groups: _Optional[_Iterable[_Union[_engine_pb2.CacheGroupInfo, _Mapping]]] = ..., device: _Optional[str] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: StepPlan
    def __init__(self, plan: _Optional[_Union[StepPlan, _Mapping]] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: StepResult
    def __init__(self, result: _Optional[_Union[StepResult, _Mapping]] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("number", "sequences", "ended", "zero", "garbage")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ZERO_FIELD_NUMBER: _ClassVar[int]
    GARBAGE_FIELD_NUMBER: _ClassVar[int]
    number: int
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceStep]
    ended: _containers.RepeatedScalarFieldContainer[int]
    zero: _containers.RepeatedCompositeFieldContainer[GroupIds]
    garbage: _containers.RepeatedCompositeFieldContainer[GroupIds]
    def __init__(self, number: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[SequenceStep, _Mapping]]] = ..., ended: _Optional[_Iterable[int]] = ..., zero: _Optional[_Iterable[_Union[GroupIds, _Mapping]]] = ..., garbage: _Optional[_Iterable[_Union[GroupIds, _Mapping]]] = ...) -> None: ...

class GroupIds(_message.Message):
    __slots__ = ("group", "ids")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    group: str
    ids: bytes
    def __init__(self, group: _Optional[str] = ..., ids: _Optional[bytes] = ...) -> None: ...

class SequenceStep(_message.Message):
    __slots__ = ("sequence", "start", "token_ids", "ngram_context", "new_pages", "freed_pages", "state_read", "state_writes", "begin", "sample_from", "prompt_logprobs", "prompt_targets")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NGRAM_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    NEW_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREED_PAGES_FIELD_NUMBER: _ClassVar[int]
    STATE_READ_FIELD_NUMBER: _ClassVar[int]
    STATE_WRITES_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FROM_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TARGETS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    start: int
    token_ids: bytes
    ngram_context: bytes
    new_pages: _containers.RepeatedCompositeFieldContainer[GroupIds]
    freed_pages: _containers.RepeatedCompositeFieldContainer[FreedPages]
    state_read: _containers.RepeatedCompositeFieldContainer[StateRead]
    state_writes: _containers.RepeatedCompositeFieldContainer[StateWrites]
    begin: SequenceBegin
    sample_from: int
    prompt_logprobs: int
    prompt_targets: bytes
    def __init__(self, sequence: _Optional[int] = ..., start: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., ngram_context: _Optional[bytes] = ..., new_pages: _Optional[_Iterable[_Union[GroupIds, _Mapping]]] = ..., freed_pages: _Optional[_Iterable[_Union[FreedPages, _Mapping]]] = ..., state_read: _Optional[_Iterable[_Union[StateRead, _Mapping]]] = ..., state_writes: _Optional[_Iterable[_Union[StateWrites, _Mapping]]] = ..., begin: _Optional[_Union[SequenceBegin, _Mapping]] = ..., sample_from: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., prompt_targets: _Optional[bytes] = ...) -> None: ...

class FreedPages(_message.Message):
    __slots__ = ("group", "count")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    group: str
    count: int
    def __init__(self, group: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class StateRead(_message.Message):
    __slots__ = ("group", "slot")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    group: str
    slot: int
    def __init__(self, group: _Optional[str] = ..., slot: _Optional[int] = ...) -> None: ...

class StateWrites(_message.Message):
    __slots__ = ("group", "writes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    group: str
    writes: _containers.RepeatedCompositeFieldContainer[StateWrite]
    def __init__(self, group: _Optional[str] = ..., writes: _Optional[_Iterable[_Union[StateWrite, _Mapping]]] = ...) -> None: ...

class StateWrite(_message.Message):
    __slots__ = ("token", "slot")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    token: int
    slot: int
    def __init__(self, token: _Optional[int] = ..., slot: _Optional[int] = ...) -> None: ...

class SequenceBegin(_message.Message):
    __slots__ = ("sampling", "prompt_token_ids", "output_token_ids", "output_tokens", "images")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    sampling: SequenceSampling
    prompt_token_ids: bytes
    output_token_ids: bytes
    output_tokens: int
    images: _containers.RepeatedCompositeFieldContainer[ImagePlace]
    def __init__(self, sampling: _Optional[_Union[SequenceSampling, _Mapping]] = ..., prompt_token_ids: _Optional[bytes] = ..., output_token_ids: _Optional[bytes] = ..., output_tokens: _Optional[int] = ..., images: _Optional[_Iterable[_Union[ImagePlace, _Mapping]]] = ...) -> None: ...

class ImagePlace(_message.Message):
    __slots__ = ("offset", "length", "digest", "height", "width")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    digest: bytes
    height: int
    width: int
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ..., digest: _Optional[bytes] = ..., height: _Optional[int] = ..., width: _Optional[int] = ...) -> None: ...

class SequenceSampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "stop_token_ids", "min_tokens", "logprobs", "grammar", "bad_words", "thinking_budget", "logprob_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
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
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    THINKING_BUDGET_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    logprobs: int
    grammar: SequenceGrammar
    bad_words: _containers.RepeatedCompositeFieldContainer[_engine_pb2.TokenSequence]
    thinking_budget: _engine_pb2.ThinkingBudget
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[_Union[SequenceGrammar, _Mapping]] = ..., bad_words: _Optional[_Iterable[_Union[_engine_pb2.TokenSequence, _Mapping]]] = ..., thinking_budget: _Optional[_Union[_engine_pb2.ThinkingBudget, _Mapping]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceGrammar(_message.Message):
    __slots__ = ("compiled", "after_token_id")
    COMPILED_FIELD_NUMBER: _ClassVar[int]
    AFTER_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    compiled: bytes
    after_token_id: int
    def __init__(self, compiled: _Optional[bytes] = ..., after_token_id: _Optional[int] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("number", "sequences")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    number: int
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceResult]
    def __init__(self, number: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[SequenceResult, _Mapping]]] = ...) -> None: ...

class SequenceResult(_message.Message):
    __slots__ = ("sequence", "token_ids", "logprobs", "prompt_logprobs", "finite")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[StepLogprob]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[StepLogprob]
    finite: bool
    def __init__(self, sequence: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[StepLogprob, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[StepLogprob, _Mapping]]] = ..., finite: _Optional[bool] = ...) -> None: ...

class StepLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top: _containers.RepeatedCompositeFieldContainer[StepTopLogprob]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top: _Optional[_Iterable[_Union[StepTopLogprob, _Mapping]]] = ...) -> None: ...

class StepTopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class OpenChannelRequest(_message.Message):
    __slots__ = ("from_stage", "to_stage", "width", "dtype", "max_tokens", "ring", "target")
    FROM_STAGE_FIELD_NUMBER: _ClassVar[int]
    TO_STAGE_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    from_stage: int
    to_stage: int
    width: int
    dtype: _tensor_pb2.Dtype
    max_tokens: int
    ring: _tensor_pb2.Region
    target: str
    def __init__(self, from_stage: _Optional[int] = ..., to_stage: _Optional[int] = ..., width: _Optional[int] = ..., dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ..., max_tokens: _Optional[int] = ..., ring: _Optional[_Union[_tensor_pb2.Region, _Mapping]] = ..., target: _Optional[str] = ...) -> None: ...

class OpenChannelResponse(_message.Message):
    __slots__ = ("channel_id",)
    CHANNEL_ID_FIELD_NUMBER: _ClassVar[int]
    channel_id: str
    def __init__(self, channel_id: _Optional[str] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("steps", "folder")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    steps: int
    folder: str
    def __init__(self, steps: _Optional[int] = ..., folder: _Optional[str] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, files: _Optional[_Iterable[str]] = ...) -> None: ...

class CoreCommand(_message.Message):
    __slots__ = ("submit", "abort", "reset", "describe", "stop", "profile")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    DESCRIBE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    submit: CoreSubmit
    abort: CoreAbort
    reset: CoreReset
    describe: CoreDescribe
    stop: CoreStop
    profile: CoreProfile
    def __init__(self, submit: _Optional[_Union[CoreSubmit, _Mapping]] = ..., abort: _Optional[_Union[CoreAbort, _Mapping]] = ..., reset: _Optional[_Union[CoreReset, _Mapping]] = ..., describe: _Optional[_Union[CoreDescribe, _Mapping]] = ..., stop: _Optional[_Union[CoreStop, _Mapping]] = ..., profile: _Optional[_Union[CoreProfile, _Mapping]] = ...) -> None: ...

class CoreSubmit(_message.Message):
    __slots__ = ("handle", "request_id", "request", "deadline_ns")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_NS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    request: _engine_pb2.GenerateRequest
    deadline_ns: int
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., request: _Optional[_Union[_engine_pb2.GenerateRequest, _Mapping]] = ..., deadline_ns: _Optional[int] = ...) -> None: ...

class CoreAbort(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class CoreReset(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    def __init__(self, ticket: _Optional[int] = ...) -> None: ...

class CoreDescribe(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    def __init__(self, ticket: _Optional[int] = ...) -> None: ...

class CoreProfile(_message.Message):
    __slots__ = ("ticket", "start")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    start: bool
    def __init__(self, ticket: _Optional[int] = ..., start: _Optional[bool] = ...) -> None: ...

class CoreStop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CoreEvent(_message.Message):
    __slots__ = ("ready", "step", "reset_done", "description", "profile_done")
    READY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESET_DONE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PROFILE_DONE_FIELD_NUMBER: _ClassVar[int]
    ready: CoreReady
    step: CoreStep
    reset_done: CoreResetDone
    description: CoreDescription
    profile_done: CoreProfileDone
    def __init__(self, ready: _Optional[_Union[CoreReady, _Mapping]] = ..., step: _Optional[_Union[CoreStep, _Mapping]] = ..., reset_done: _Optional[_Union[CoreResetDone, _Mapping]] = ..., description: _Optional[_Union[CoreDescription, _Mapping]] = ..., profile_done: _Optional[_Union[CoreProfileDone, _Mapping]] = ...) -> None: ...

class CoreReady(_message.Message):
    __slots__ = ("model", "description")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelInfo
    description: CoreDescription
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., description: _Optional[_Union[CoreDescription, _Mapping]] = ...) -> None: ...

class CoreStep(_message.Message):
    __slots__ = ("updates", "load", "stats")
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    updates: _containers.RepeatedCompositeFieldContainer[RequestUpdate]
    load: _engine_pb2.LoadResponse
    stats: CoreStats
    def __init__(self, updates: _Optional[_Iterable[_Union[RequestUpdate, _Mapping]]] = ..., load: _Optional[_Union[_engine_pb2.LoadResponse, _Mapping]] = ..., stats: _Optional[_Union[CoreStats, _Mapping]] = ...) -> None: ...

class CoreStats(_message.Message):
    __slots__ = ("cache_groups", "steps", "step_seconds", "gathered_rows", "gather_seconds", "store_jobs", "kvcache_connected", "open_regions", "region_bytes", "resident_bytes")
    CACHE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GATHERED_ROWS_FIELD_NUMBER: _ClassVar[int]
    GATHER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STORE_JOBS_FIELD_NUMBER: _ClassVar[int]
    KVCACHE_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    OPEN_REGIONS_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    cache_groups: _containers.RepeatedCompositeFieldContainer[_engine_pb2.CacheGroupInfo]
    steps: int
    step_seconds: float
    gathered_rows: int
    gather_seconds: float
    store_jobs: int
    kvcache_connected: bool
    open_regions: int
    region_bytes: int
    resident_bytes: int
    def __init__(self, cache_groups: _Optional[_Iterable[_Union[_engine_pb2.CacheGroupInfo, _Mapping]]] = ..., steps: _Optional[int] = ..., step_seconds: _Optional[float] = ..., gathered_rows: _Optional[int] = ..., gather_seconds: _Optional[float] = ..., store_jobs: _Optional[int] = ..., kvcache_connected: _Optional[bool] = ..., open_regions: _Optional[int] = ..., region_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ...) -> None: ...

class RequestUpdate(_message.Message):
    __slots__ = ("handle", "events", "refusal")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    handle: int
    events: _containers.RepeatedCompositeFieldContainer[_engine_pb2.GenerateResponse]
    refusal: CoreRefusal
    def __init__(self, handle: _Optional[int] = ..., events: _Optional[_Iterable[_Union[_engine_pb2.GenerateResponse, _Mapping]]] = ..., refusal: _Optional[_Union[CoreRefusal, _Mapping]] = ...) -> None: ...

class CoreRefusal(_message.Message):
    __slots__ = ("reason", "field", "message", "retry_after_seconds")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.ErrorReason
    field: str
    message: str
    retry_after_seconds: float
    def __init__(self, reason: _Optional[_Union[_common_pb2.ErrorReason, str]] = ..., field: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_seconds: _Optional[float] = ...) -> None: ...

class CoreResetDone(_message.Message):
    __slots__ = ("ticket", "pages_dropped")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PAGES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    pages_dropped: int
    def __init__(self, ticket: _Optional[int] = ..., pages_dropped: _Optional[int] = ...) -> None: ...

class CoreProfileDone(_message.Message):
    __slots__ = ("ticket", "file", "refusal")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    file: str
    refusal: CoreRefusal
    def __init__(self, ticket: _Optional[int] = ..., file: _Optional[str] = ..., refusal: _Optional[_Union[CoreRefusal, _Mapping]] = ...) -> None: ...

class CoreDescription(_message.Message):
    __slots__ = ("ticket", "engine")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    engine: _engine_pb2.DescribeEngineResponse
    def __init__(self, ticket: _Optional[int] = ..., engine: _Optional[_Union[_engine_pb2.DescribeEngineResponse, _Mapping]] = ...) -> None: ...
