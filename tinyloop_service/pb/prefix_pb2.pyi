from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import empty_pb2 as _empty_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from tinyloop_service.pb import input_pb2 as _input_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefixState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFIX_STATE_UNSPECIFIED: _ClassVar[PrefixState]
    PREFIX_STATE_BUILDING: _ClassVar[PrefixState]
    PREFIX_STATE_READY: _ClassVar[PrefixState]
    PREFIX_STATE_EVICTED: _ClassVar[PrefixState]
    PREFIX_STATE_FAILED: _ClassVar[PrefixState]

class CacheMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_MODE_UNSPECIFIED: _ClassVar[CacheMode]
    CACHE_MODE_FP16: _ClassVar[CacheMode]
    CACHE_MODE_INT8: _ClassVar[CacheMode]
    CACHE_MODE_H_FP16: _ClassVar[CacheMode]
    CACHE_MODE_H_INT8: _ClassVar[CacheMode]
    CACHE_MODE_H_INT4: _ClassVar[CacheMode]

class PrefixView(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFIX_VIEW_UNSPECIFIED: _ClassVar[PrefixView]
    PREFIX_VIEW_BASIC: _ClassVar[PrefixView]
    PREFIX_VIEW_FULL: _ClassVar[PrefixView]
PREFIX_STATE_UNSPECIFIED: PrefixState
PREFIX_STATE_BUILDING: PrefixState
PREFIX_STATE_READY: PrefixState
PREFIX_STATE_EVICTED: PrefixState
PREFIX_STATE_FAILED: PrefixState
CACHE_MODE_UNSPECIFIED: CacheMode
CACHE_MODE_FP16: CacheMode
CACHE_MODE_INT8: CacheMode
CACHE_MODE_H_FP16: CacheMode
CACHE_MODE_H_INT8: CacheMode
CACHE_MODE_H_INT4: CacheMode
PREFIX_VIEW_UNSPECIFIED: PrefixView
PREFIX_VIEW_BASIC: PrefixView
PREFIX_VIEW_FULL: PrefixView

class Prefix(_message.Message):
    __slots__ = ("name", "uid", "etag", "state", "error", "token_count", "loops", "cache_window", "cache_mode", "size_bytes", "shared_bytes", "content_sha256", "parent", "pinned", "create_time", "expire_time", "ttl", "last_use_time", "use_count", "build_duration", "tokens_built", "input")
    NAME_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOOPS_FIELD_NUMBER: _ClassVar[int]
    CACHE_WINDOW_FIELD_NUMBER: _ClassVar[int]
    CACHE_MODE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTENT_SHA256_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    LAST_USE_TIME_FIELD_NUMBER: _ClassVar[int]
    USE_COUNT_FIELD_NUMBER: _ClassVar[int]
    BUILD_DURATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_BUILT_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    name: str
    uid: str
    etag: str
    state: PrefixState
    error: str
    token_count: int
    loops: int
    cache_window: int
    cache_mode: CacheMode
    size_bytes: int
    shared_bytes: int
    content_sha256: str
    parent: str
    pinned: bool
    create_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    ttl: _duration_pb2.Duration
    last_use_time: _timestamp_pb2.Timestamp
    use_count: int
    build_duration: _duration_pb2.Duration
    tokens_built: int
    input: _input_pb2.Input
    def __init__(self, name: _Optional[str] = ..., uid: _Optional[str] = ..., etag: _Optional[str] = ..., state: _Optional[_Union[PrefixState, str]] = ..., error: _Optional[str] = ..., token_count: _Optional[int] = ..., loops: _Optional[int] = ..., cache_window: _Optional[int] = ..., cache_mode: _Optional[_Union[CacheMode, str]] = ..., size_bytes: _Optional[int] = ..., shared_bytes: _Optional[int] = ..., content_sha256: _Optional[str] = ..., parent: _Optional[str] = ..., pinned: bool = ..., create_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., last_use_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., use_count: _Optional[int] = ..., build_duration: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., tokens_built: _Optional[int] = ..., input: _Optional[_Union[_input_pb2.Input, _Mapping]] = ...) -> None: ...

class CreatePrefixRequest(_message.Message):
    __slots__ = ("prefix_id", "input", "loops", "cache_window", "expire_time", "ttl", "pinned", "parent", "build_async", "request_id", "validate_only")
    PREFIX_ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    LOOPS_FIELD_NUMBER: _ClassVar[int]
    CACHE_WINDOW_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    BUILD_ASYNC_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_ONLY_FIELD_NUMBER: _ClassVar[int]
    prefix_id: str
    input: _input_pb2.Input
    loops: int
    cache_window: int
    expire_time: _timestamp_pb2.Timestamp
    ttl: _duration_pb2.Duration
    pinned: bool
    parent: str
    build_async: bool
    request_id: str
    validate_only: bool
    def __init__(self, prefix_id: _Optional[str] = ..., input: _Optional[_Union[_input_pb2.Input, _Mapping]] = ..., loops: _Optional[int] = ..., cache_window: _Optional[int] = ..., expire_time: _Optional[_Union[_timestamp_pb2.Timestamp, _Mapping]] = ..., ttl: _Optional[_Union[_duration_pb2.Duration, _Mapping]] = ..., pinned: bool = ..., parent: _Optional[str] = ..., build_async: bool = ..., request_id: _Optional[str] = ..., validate_only: bool = ...) -> None: ...

class GetPrefixRequest(_message.Message):
    __slots__ = ("name", "view")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    name: str
    view: PrefixView
    def __init__(self, name: _Optional[str] = ..., view: _Optional[_Union[PrefixView, str]] = ...) -> None: ...

class ListPrefixesRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "view")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    view: PrefixView
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., view: _Optional[_Union[PrefixView, str]] = ...) -> None: ...

class ListPrefixesResponse(_message.Message):
    __slots__ = ("prefixes", "next_page_token")
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[Prefix]
    next_page_token: str
    def __init__(self, prefixes: _Optional[_Iterable[_Union[Prefix, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class UpdatePrefixRequest(_message.Message):
    __slots__ = ("prefix", "update_mask")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    UPDATE_MASK_FIELD_NUMBER: _ClassVar[int]
    prefix: Prefix
    update_mask: _field_mask_pb2.FieldMask
    def __init__(self, prefix: _Optional[_Union[Prefix, _Mapping]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask, _Mapping]] = ...) -> None: ...

class DeletePrefixRequest(_message.Message):
    __slots__ = ("name", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ...) -> None: ...

class WatchPrefixRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...
