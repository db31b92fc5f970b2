from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[Dtype]
    DTYPE_F32: _ClassVar[Dtype]
    DTYPE_F16: _ClassVar[Dtype]
    DTYPE_BF16: _ClassVar[Dtype]
    DTYPE_F8_E4M3: _ClassVar[Dtype]
    DTYPE_F8_E8M0: _ClassVar[Dtype]
    DTYPE_U8: _ClassVar[Dtype]
    DTYPE_I8: _ClassVar[Dtype]
    DTYPE_I32: _ClassVar[Dtype]
    DTYPE_I64: _ClassVar[Dtype]
DTYPE_UNSPECIFIED: Dtype
DTYPE_F32: Dtype
DTYPE_F16: Dtype
DTYPE_BF16: Dtype
DTYPE_F8_E4M3: Dtype
DTYPE_F8_E8M0: Dtype
DTYPE_U8: Dtype
DTYPE_I8: Dtype
DTYPE_I32: Dtype
DTYPE_I64: Dtype

class ShmRef(_message.Message):
    __slots__ = ("region_id", "generation", "offset", "nbytes")
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    region_id: str
    generation: int
    offset: int
    nbytes: int
    def __init__(self, region_id: _Optional[str] = ..., generation: _Optional[int] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "inline", "shm", "digest")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    dtype: Dtype
    shape: _containers.RepeatedScalarFieldContainer[int]
    inline: bytes
    shm: ShmRef
    digest: bytes
    def __init__(self, dtype: _Optional[_Union[Dtype, str]] = ..., shape: _Optional[_Iterable[int]] = ..., inline: _Optional[bytes] = ..., shm: _Optional[_Union[ShmRef, _Mapping]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("region_id", "generation", "nbytes", "broker", "read_only")
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    BROKER_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    region_id: str
    generation: int
    nbytes: int
    broker: str
    read_only: bool
    def __init__(self, region_id: _Optional[str] = ..., generation: _Optional[int] = ..., nbytes: _Optional[int] = ..., broker: _Optional[str] = ..., read_only: _Optional[bool] = ...) -> None: ...
