from warhorse.v1 import common_pb2 as _common_pb2
from warhorse.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StoreGroup(_message.Message):
    __slots__ = ("group_id", "name", "kind", "window_units", "object_bytes")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WINDOW_UNITS_FIELD_NUMBER: _ClassVar[int]
    OBJECT_BYTES_FIELD_NUMBER: _ClassVar[int]
    group_id: int
    name: str
    kind: str
    window_units: int
    object_bytes: int
    def __init__(self, group_id: _Optional[int] = ..., name: _Optional[str] = ..., kind: _Optional[str] = ..., window_units: _Optional[int] = ..., object_bytes: _Optional[int] = ...) -> None: ...

class SessionOpen(_message.Message):
    __slots__ = ("client_id", "model_fingerprint", "unit_tokens", "groups")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    UNIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    model_fingerprint: str
    unit_tokens: int
    groups: _containers.RepeatedCompositeFieldContainer[StoreGroup]
    def __init__(self, client_id: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., unit_tokens: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[StoreGroup, _Mapping]]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("open", "ping")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    open: SessionOpen
    ping: SessionPing
    def __init__(self, open: _Optional[_Union[SessionOpen, _Mapping]] = ..., ping: _Optional[_Union[SessionPing, _Mapping]] = ...) -> None: ...

class SessionPing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("session_id", "generation", "arena")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    generation: int
    arena: _tensor_pb2.Region
    def __init__(self, session_id: _Optional[str] = ..., generation: _Optional[int] = ..., arena: _Optional[_Union[_tensor_pb2.Region, _Mapping]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("session_id", "unit_hashes")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    UNIT_HASHES_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    unit_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, session_id: _Optional[str] = ..., unit_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("hit_units",)
    HIT_UNITS_FIELD_NUMBER: _ClassVar[int]
    hit_units: int
    def __init__(self, hit_units: _Optional[int] = ...) -> None: ...

class ObjectKey(_message.Message):
    __slots__ = ("unit_hash", "group_id")
    UNIT_HASH_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    unit_hash: bytes
    group_id: int
    def __init__(self, unit_hash: _Optional[bytes] = ..., group_id: _Optional[int] = ...) -> None: ...

class ObjectSlot(_message.Message):
    __slots__ = ("key", "ref", "digest")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    key: ObjectKey
    ref: _tensor_pb2.ShmRef
    digest: int
    def __init__(self, key: _Optional[_Union[ObjectKey, _Mapping]] = ..., ref: _Optional[_Union[_tensor_pb2.ShmRef, _Mapping]] = ..., digest: _Optional[int] = ...) -> None: ...

class BeginLoadRequest(_message.Message):
    __slots__ = ("session_id", "unit_hashes", "first_unit")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    UNIT_HASHES_FIELD_NUMBER: _ClassVar[int]
    FIRST_UNIT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    unit_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    first_unit: int
    def __init__(self, session_id: _Optional[str] = ..., unit_hashes: _Optional[_Iterable[bytes]] = ..., first_unit: _Optional[int] = ...) -> None: ...

class BeginLoadResponse(_message.Message):
    __slots__ = ("lease_id", "hit_units", "slots")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    HIT_UNITS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    hit_units: int
    slots: _containers.RepeatedCompositeFieldContainer[ObjectSlot]
    def __init__(self, lease_id: _Optional[str] = ..., hit_units: _Optional[int] = ..., slots: _Optional[_Iterable[_Union[ObjectSlot, _Mapping]]] = ...) -> None: ...

class EndLoadRequest(_message.Message):
    __slots__ = ("session_id", "lease_id", "corrupt")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    lease_id: str
    corrupt: _containers.RepeatedCompositeFieldContainer[ObjectKey]
    def __init__(self, session_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., corrupt: _Optional[_Iterable[_Union[ObjectKey, _Mapping]]] = ...) -> None: ...

class EndLoadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BeginStoreRequest(_message.Message):
    __slots__ = ("session_id", "keys")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    keys: _containers.RepeatedCompositeFieldContainer[ObjectKey]
    def __init__(self, session_id: _Optional[str] = ..., keys: _Optional[_Iterable[_Union[ObjectKey, _Mapping]]] = ...) -> None: ...

class BeginStoreResponse(_message.Message):
    __slots__ = ("lease_id", "slots", "unplaced")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    UNPLACED_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    slots: _containers.RepeatedCompositeFieldContainer[ObjectSlot]
    unplaced: _containers.RepeatedCompositeFieldContainer[ObjectKey]
    def __init__(self, lease_id: _Optional[str] = ..., slots: _Optional[_Iterable[_Union[ObjectSlot, _Mapping]]] = ..., unplaced: _Optional[_Iterable[_Union[ObjectKey, _Mapping]]] = ...) -> None: ...

class CommitStoreRequest(_message.Message):
    __slots__ = ("session_id", "lease_id", "digests")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    lease_id: str
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitStoreResponse(_message.Message):
    __slots__ = ("stored",)
    STORED_FIELD_NUMBER: _ClassVar[int]
    stored: int
    def __init__(self, stored: _Optional[int] = ...) -> None: ...

class AbortStoreRequest(_message.Message):
    __slots__ = ("session_id", "lease_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    lease_id: str
    def __init__(self, session_id: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class AbortStoreResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("service", "capacity_bytes", "used_bytes", "objects", "sessions", "read_leases", "write_leases", "lookups", "hit_units", "stored_objects", "evicted_objects", "corrupt_objects", "open_regions", "region_bytes")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    READ_LEASES_FIELD_NUMBER: _ClassVar[int]
    WRITE_LEASES_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    HIT_UNITS_FIELD_NUMBER: _ClassVar[int]
    STORED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    OPEN_REGIONS_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    service: _common_pb2.ServiceInfo
    capacity_bytes: int
    used_bytes: int
    objects: int
    sessions: int
    read_leases: int
    write_leases: int
    lookups: int
    hit_units: int
    stored_objects: int
    evicted_objects: int
    corrupt_objects: int
    open_regions: int
    region_bytes: int
    def __init__(self, service: _Optional[_Union[_common_pb2.ServiceInfo, _Mapping]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., objects: _Optional[int] = ..., sessions: _Optional[int] = ..., read_leases: _Optional[int] = ..., write_leases: _Optional[int] = ..., lookups: _Optional[int] = ..., hit_units: _Optional[int] = ..., stored_objects: _Optional[int] = ..., evicted_objects: _Optional[int] = ..., corrupt_objects: _Optional[int] = ..., open_regions: _Optional[int] = ..., region_bytes: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("model_fingerprint",)
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    def __init__(self, model_fingerprint: _Optional[str] = ...) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ("objects_dropped",)
    OBJECTS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    objects_dropped: int
    def __init__(self, objects_dropped: _Optional[int] = ...) -> None: ...
