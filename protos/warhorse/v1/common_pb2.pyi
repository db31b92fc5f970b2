from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_FIELD: _ClassVar[ErrorReason]
    ERROR_REASON_CONTEXT_LENGTH_EXCEEDED: _ClassVar[ErrorReason]
    ERROR_REASON_MODEL_NOT_FOUND: _ClassVar[ErrorReason]
    ERROR_REASON_QUEUE_FULL: _ClassVar[ErrorReason]
    ERROR_REASON_POOL_EXHAUSTED: _ClassVar[ErrorReason]
    ERROR_REASON_SLOW_CONSUMER: _ClassVar[ErrorReason]
    ERROR_REASON_STALE_GENERATION: _ClassVar[ErrorReason]
    ERROR_REASON_UNKNOWN_LEASE: _ClassVar[ErrorReason]
    ERROR_REASON_LAYOUT_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_LOADING: _ClassVar[ErrorReason]
    ERROR_REASON_DRAINING: _ClassVar[ErrorReason]
    ERROR_REASON_DEADLINE: _ClassVar[ErrorReason]
    ERROR_REASON_CANCELLED: _ClassVar[ErrorReason]
    ERROR_REASON_NUMERIC: _ClassVar[ErrorReason]
    ERROR_REASON_TEMPLATE: _ClassVar[ErrorReason]
    ERROR_REASON_UNSUPPORTED: _ClassVar[ErrorReason]
    ERROR_REASON_ENGINE_LOST: _ClassVar[ErrorReason]
    ERROR_REASON_INTERNAL: _ClassVar[ErrorReason]
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_INVALID_FIELD: ErrorReason
ERROR_REASON_CONTEXT_LENGTH_EXCEEDED: ErrorReason
ERROR_REASON_MODEL_NOT_FOUND: ErrorReason
ERROR_REASON_QUEUE_FULL: ErrorReason
ERROR_REASON_POOL_EXHAUSTED: ErrorReason
ERROR_REASON_SLOW_CONSUMER: ErrorReason
ERROR_REASON_STALE_GENERATION: ErrorReason
ERROR_REASON_UNKNOWN_LEASE: ErrorReason
ERROR_REASON_LAYOUT_MISMATCH: ErrorReason
ERROR_REASON_LOADING: ErrorReason
ERROR_REASON_DRAINING: ErrorReason
ERROR_REASON_DEADLINE: ErrorReason
ERROR_REASON_CANCELLED: ErrorReason
ERROR_REASON_NUMERIC: ErrorReason
ERROR_REASON_TEMPLATE: ErrorReason
ERROR_REASON_UNSUPPORTED: ErrorReason
ERROR_REASON_ENGINE_LOST: ErrorReason
ERROR_REASON_INTERNAL: ErrorReason

class ServiceInfo(_message.Message):
    __slots__ = ("api_version", "build_version", "instance_id", "generation", "pid", "resident_bytes")
    API_VERSION_FIELD_NUMBER: _ClassVar[int]
    BUILD_VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    api_version: str
    build_version: str
    instance_id: str
    generation: int
    pid: int
    resident_bytes: int
    def __init__(self, api_version: _Optional[str] = ..., build_version: _Optional[str] = ..., instance_id: _Optional[str] = ..., generation: _Optional[int] = ..., pid: _Optional[int] = ..., resident_bytes: _Optional[int] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "family", "fingerprint", "tokenizer_sha256", "vocab_size", "max_model_len", "takes_images")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    TAKES_IMAGES_FIELD_NUMBER: _ClassVar[int]
    name: str
    family: str
    fingerprint: str
    tokenizer_sha256: str
    vocab_size: int
    max_model_len: int
    takes_images: bool
    def __init__(self, name: _Optional[str] = ..., family: _Optional[str] = ..., fingerprint: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., takes_images: _Optional[bool] = ...) -> None: ...
