from warhorse.v1 import common_pb2 as _common_pb2
from warhorse.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TableStorage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TABLE_STORAGE_UNSPECIFIED: _ClassVar[TableStorage]
    TABLE_STORAGE_MEMORY: _ClassVar[TableStorage]
    TABLE_STORAGE_FILE: _ClassVar[TableStorage]
TABLE_STORAGE_UNSPECIFIED: TableStorage
TABLE_STORAGE_MEMORY: TableStorage
TABLE_STORAGE_FILE: TableStorage

class Table(_message.Message):
    __slots__ = ("name", "region", "offset", "rows", "row_bytes", "dtype", "row_values", "scale", "row_scale_bytes", "fingerprint", "hash", "engram_hash", "storage")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROW_VALUES_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    ROW_SCALE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    ENGRAM_HASH_FIELD_NUMBER: _ClassVar[int]
    STORAGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    region: _tensor_pb2.Region
    offset: int
    rows: int
    row_bytes: int
    dtype: _tensor_pb2.Dtype
    row_values: int
    scale: float
    row_scale_bytes: int
    fingerprint: str
    hash: HashParameters
    engram_hash: EngramParameters
    storage: TableStorage
    def __init__(self, name: _Optional[str] = ..., region: _Optional[_Union[_tensor_pb2.Region, _Mapping]] = ..., offset: _Optional[int] = ..., rows: _Optional[int] = ..., row_bytes: _Optional[int] = ..., dtype: _Optional[_Union[_tensor_pb2.Dtype, str]] = ..., row_values: _Optional[int] = ..., scale: _Optional[float] = ..., row_scale_bytes: _Optional[int] = ..., fingerprint: _Optional[str] = ..., hash: _Optional[_Union[HashParameters, _Mapping]] = ..., engram_hash: _Optional[_Union[EngramParameters, _Mapping]] = ..., storage: _Optional[_Union[TableStorage, str]] = ...) -> None: ...

class HashParameters(_message.Message):
    __slots__ = ("multipliers", "head_sizes", "head_offsets", "ngram_size", "eos_token_id")
    MULTIPLIERS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZES_FIELD_NUMBER: _ClassVar[int]
    HEAD_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    multipliers: _containers.RepeatedScalarFieldContainer[int]
    head_sizes: _containers.RepeatedScalarFieldContainer[int]
    head_offsets: _containers.RepeatedScalarFieldContainer[int]
    ngram_size: int
    eos_token_id: int
    def __init__(self, multipliers: _Optional[_Iterable[int]] = ..., head_sizes: _Optional[_Iterable[int]] = ..., head_offsets: _Optional[_Iterable[int]] = ..., ngram_size: _Optional[int] = ..., eos_token_id: _Optional[int] = ...) -> None: ...

class EngramParameters(_message.Message):
    __slots__ = ("multipliers", "head_sizes", "head_offsets", "ngram_size", "pad_token_id", "image_token_id", "compressed_ids")
    MULTIPLIERS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZES_FIELD_NUMBER: _ClassVar[int]
    HEAD_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    NGRAM_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAD_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_IDS_FIELD_NUMBER: _ClassVar[int]
    multipliers: _containers.RepeatedScalarFieldContainer[int]
    head_sizes: _containers.RepeatedScalarFieldContainer[int]
    head_offsets: _containers.RepeatedScalarFieldContainer[int]
    ngram_size: int
    pad_token_id: int
    image_token_id: int
    compressed_ids: int
    def __init__(self, multipliers: _Optional[_Iterable[int]] = ..., head_sizes: _Optional[_Iterable[int]] = ..., head_offsets: _Optional[_Iterable[int]] = ..., ngram_size: _Optional[int] = ..., pad_token_id: _Optional[int] = ..., image_token_id: _Optional[int] = ..., compressed_ids: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("client_id", "table", "fingerprint")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    table: str
    fingerprint: str
    def __init__(self, client_id: _Optional[str] = ..., table: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("tables",)
    TABLES_FIELD_NUMBER: _ClassVar[int]
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    def __init__(self, tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ...) -> None: ...

class GatherRequest(_message.Message):
    __slots__ = ("table", "row_ids", "fingerprint")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROW_IDS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    table: str
    row_ids: bytes
    fingerprint: str
    def __init__(self, table: _Optional[str] = ..., row_ids: _Optional[bytes] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class GatherResponse(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _tensor_pb2.Tensor
    def __init__(self, rows: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class DescribeOffloadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeOffloadResponse(_message.Message):
    __slots__ = ("service", "tables", "gathered_rows", "open_regions", "region_bytes")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    GATHERED_ROWS_FIELD_NUMBER: _ClassVar[int]
    OPEN_REGIONS_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    service: _common_pb2.ServiceInfo
    tables: _containers.RepeatedCompositeFieldContainer[Table]
    gathered_rows: int
    open_regions: int
    region_bytes: int
    def __init__(self, service: _Optional[_Union[_common_pb2.ServiceInfo, _Mapping]] = ..., tables: _Optional[_Iterable[_Union[Table, _Mapping]]] = ..., gathered_rows: _Optional[int] = ..., open_regions: _Optional[int] = ..., region_bytes: _Optional[int] = ...) -> None: ...
