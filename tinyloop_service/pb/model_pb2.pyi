from tinyloop_service.pb import input_pb2 as _input_pb2
from tinyloop_service.pb import prefix_pb2 as _prefix_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Model(_message.Message):
    __slots__ = ("model_id", "engine", "server_version", "replica", "spec", "default_loops", "max_loops", "max_seq_len", "max_rows", "cache_mode", "has_tokenizer", "eos_token_ids")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_LOOPS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOOPS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    CACHE_MODE_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    engine: str
    server_version: str
    replica: str
    spec: ModelSpec
    default_loops: int
    max_loops: int
    max_seq_len: int
    max_rows: int
    cache_mode: _prefix_pb2.CacheMode
    has_tokenizer: bool
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model_id: _Optional[str] = ..., engine: _Optional[str] = ..., server_version: _Optional[str] = ..., replica: _Optional[str] = ..., spec: _Optional[_Union[ModelSpec, _Mapping]] = ..., default_loops: _Optional[int] = ..., max_loops: _Optional[int] = ..., max_seq_len: _Optional[int] = ..., max_rows: _Optional[int] = ..., cache_mode: _Optional[_Union[_prefix_pb2.CacheMode, str]] = ..., has_tokenizer: bool = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ("vocab_size", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "pre_blocks", "loop_blocks", "post_blocks", "default_loops", "max_loops", "max_seq_len", "rope_theta", "rope_pairing", "norm_eps", "norm_placement", "loop_norm", "inject", "tie_embeddings", "bos_token_id", "eos_token_ids", "quant")
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    D_MODEL_FIELD_NUMBER: _ClassVar[int]
    N_HEADS_FIELD_NUMBER: _ClassVar[int]
    N_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    D_FF_FIELD_NUMBER: _ClassVar[int]
    PRE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOOP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    POST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_LOOPS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOOPS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    ROPE_THETA_FIELD_NUMBER: _ClassVar[int]
    ROPE_PAIRING_FIELD_NUMBER: _ClassVar[int]
    NORM_EPS_FIELD_NUMBER: _ClassVar[int]
    NORM_PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    LOOP_NORM_FIELD_NUMBER: _ClassVar[int]
    INJECT_FIELD_NUMBER: _ClassVar[int]
    TIE_EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    QUANT_FIELD_NUMBER: _ClassVar[int]
    vocab_size: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    pre_blocks: int
    loop_blocks: int
    post_blocks: int
    default_loops: int
    max_loops: int
    max_seq_len: int
    rope_theta: float
    rope_pairing: str
    norm_eps: float
    norm_placement: str
    loop_norm: bool
    inject: str
    tie_embeddings: bool
    bos_token_id: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    quant: Quant
    def __init__(self, vocab_size: _Optional[int] = ..., d_model: _Optional[int] = ..., n_heads: _Optional[int] = ..., n_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., d_ff: _Optional[int] = ..., pre_blocks: _Optional[int] = ..., loop_blocks: _Optional[int] = ..., post_blocks: _Optional[int] = ..., default_loops: _Optional[int] = ..., max_loops: _Optional[int] = ..., max_seq_len: _Optional[int] = ..., rope_theta: _Optional[float] = ..., rope_pairing: _Optional[str] = ..., norm_eps: _Optional[float] = ..., norm_placement: _Optional[str] = ..., loop_norm: bool = ..., inject: _Optional[str] = ..., tie_embeddings: bool = ..., bos_token_id: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., quant: _Optional[_Union[Quant, _Mapping]] = ...) -> None: ...

class Quant(_message.Message):
    __slots__ = ("bits", "group_size")
    BITS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    bits: int
    group_size: int
    def __init__(self, bits: _Optional[int] = ..., group_size: _Optional[int] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Load(_message.Message):
    __slots__ = ("rows_running", "requests_waiting", "pages_total", "pages_free", "pages_prefixes", "pages_requests", "pages_active", "page_bytes", "prefixes_ready", "prefixes_building", "prefixes_evicted", "accepting", "prefixes_failed", "requests_running", "prefix_evictions", "prompt_tokens", "cached_tokens", "generated_tokens")
    ROWS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    PAGES_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PAGES_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_READY_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_BUILDING_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_EVICTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTING_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FAILED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    PREFIX_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    rows_running: int
    requests_waiting: int
    pages_total: int
    pages_free: int
    pages_prefixes: int
    pages_requests: int
    pages_active: int
    page_bytes: int
    prefixes_ready: int
    prefixes_building: int
    prefixes_evicted: int
    accepting: bool
    prefixes_failed: int
    requests_running: int
    prefix_evictions: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    def __init__(self, rows_running: _Optional[int] = ..., requests_waiting: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_prefixes: _Optional[int] = ..., pages_requests: _Optional[int] = ..., pages_active: _Optional[int] = ..., page_bytes: _Optional[int] = ..., prefixes_ready: _Optional[int] = ..., prefixes_building: _Optional[int] = ..., prefixes_evicted: _Optional[int] = ..., accepting: bool = ..., prefixes_failed: _Optional[int] = ..., requests_running: _Optional[int] = ..., prefix_evictions: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "add_bos")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ADD_BOS_FIELD_NUMBER: _ClassVar[int]
    text: str
    add_bos: bool
    def __init__(self, text: _Optional[str] = ..., add_bos: bool = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _input_pb2.Tokens
    def __init__(self, tokens: _Optional[_Union[_input_pb2.Tokens, _Mapping]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _input_pb2.Tokens
    def __init__(self, tokens: _Optional[_Union[_input_pb2.Tokens, _Mapping]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...
