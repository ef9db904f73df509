from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("protocol_version", "min_protocol_version", "incarnation_id", "model", "method", "limits", "load", "host_id", "gpu_uuids")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MIN_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    GPU_UUIDS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    min_protocol_version: int
    incarnation_id: str
    model: ModelIdentity
    method: str
    limits: Limits
    load: Load
    host_id: str
    gpu_uuids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., min_protocol_version: _Optional[int] = ..., incarnation_id: _Optional[str] = ..., model: _Optional[_Union[ModelIdentity, _Mapping]] = ..., method: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., host_id: _Optional[str] = ..., gpu_uuids: _Optional[_Iterable[str]] = ...) -> None: ...

class ModelIdentity(_message.Message):
    __slots__ = ("model_fingerprint", "vocabulary_fingerprint", "vocab_size")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    vocabulary_fingerprint: str
    vocab_size: int
    def __init__(self, model_fingerprint: _Optional[str] = ..., vocabulary_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_rows", "max_model_len", "max_frame_tokens", "max_branch_len")
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BRANCH_LEN_FIELD_NUMBER: _ClassVar[int]
    max_rows: int
    max_model_len: int
    max_frame_tokens: int
    max_branch_len: int
    def __init__(self, max_rows: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_frame_tokens: _Optional[int] = ..., max_branch_len: _Optional[int] = ...) -> None: ...

class VerifierFrame(_message.Message):
    __slots__ = ("sequence", "hello", "closed", "opened", "committed")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    hello: VerifierHello
    closed: CloseBatch
    opened: OpenBatch
    committed: CommitBatch
    def __init__(self, sequence: _Optional[int] = ..., hello: _Optional[_Union[VerifierHello, _Mapping]] = ..., closed: _Optional[_Union[CloseBatch, _Mapping]] = ..., opened: _Optional[_Union[OpenBatch, _Mapping]] = ..., committed: _Optional[_Union[CommitBatch, _Mapping]] = ...) -> None: ...

class VerifierHello(_message.Message):
    __slots__ = ("protocol_version", "verifier_id", "model", "max_model_len", "max_rows", "branch_budget", "branch_len", "shared_memory_host")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    BRANCH_BUDGET_FIELD_NUMBER: _ClassVar[int]
    BRANCH_LEN_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_HOST_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    verifier_id: str
    model: ModelIdentity
    max_model_len: int
    max_rows: int
    branch_budget: int
    branch_len: int
    shared_memory_host: str
    def __init__(self, protocol_version: _Optional[int] = ..., verifier_id: _Optional[str] = ..., model: _Optional[_Union[ModelIdentity, _Mapping]] = ..., max_model_len: _Optional[int] = ..., max_rows: _Optional[int] = ..., branch_budget: _Optional[int] = ..., branch_len: _Optional[int] = ..., shared_memory_host: _Optional[str] = ...) -> None: ...

class CloseBatch(_message.Message):
    __slots__ = ("row", "generation")
    ROW_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    row: bytes
    generation: bytes
    def __init__(self, row: _Optional[bytes] = ..., generation: _Optional[bytes] = ...) -> None: ...

class OpenBatch(_message.Message):
    __slots__ = ("row", "generation", "num_tokens", "token_ids", "prompt_len", "max_len", "num_speculative_tokens", "seed", "temperature", "top_p", "top_k", "min_p", "request_id")
    ROW_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    row: bytes
    generation: bytes
    num_tokens: bytes
    token_ids: bytes
    prompt_len: bytes
    max_len: bytes
    num_speculative_tokens: bytes
    seed: bytes
    temperature: bytes
    top_p: bytes
    top_k: bytes
    min_p: bytes
    request_id: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, row: _Optional[bytes] = ..., generation: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., prompt_len: _Optional[bytes] = ..., max_len: _Optional[bytes] = ..., num_speculative_tokens: _Optional[bytes] = ..., seed: _Optional[bytes] = ..., temperature: _Optional[bytes] = ..., top_p: _Optional[bytes] = ..., top_k: _Optional[bytes] = ..., min_p: _Optional[bytes] = ..., request_id: _Optional[_Iterable[str]] = ...) -> None: ...

class CommitBatch(_message.Message):
    __slots__ = ("row", "generation", "base_len", "num_tokens", "token_ids")
    ROW_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    row: bytes
    generation: bytes
    base_len: bytes
    num_tokens: bytes
    token_ids: bytes
    def __init__(self, row: _Optional[bytes] = ..., generation: _Optional[bytes] = ..., base_len: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class DrafterFrame(_message.Message):
    __slots__ = ("answered_sequence", "hello_ack", "branches", "row_errors", "load")
    ANSWERED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HELLO_ACK_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    ROW_ERRORS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    answered_sequence: int
    hello_ack: DrafterHello
    branches: BranchBatch
    row_errors: _containers.RepeatedCompositeFieldContainer[RowError]
    load: Load
    def __init__(self, answered_sequence: _Optional[int] = ..., hello_ack: _Optional[_Union[DrafterHello, _Mapping]] = ..., branches: _Optional[_Union[BranchBatch, _Mapping]] = ..., row_errors: _Optional[_Iterable[_Union[RowError, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class DrafterHello(_message.Message):
    __slots__ = ("protocol_version", "incarnation_id", "model", "method", "limits", "shared_memory_name")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_NAME_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    incarnation_id: str
    model: ModelIdentity
    method: str
    limits: Limits
    shared_memory_name: str
    def __init__(self, protocol_version: _Optional[int] = ..., incarnation_id: _Optional[str] = ..., model: _Optional[_Union[ModelIdentity, _Mapping]] = ..., method: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., shared_memory_name: _Optional[str] = ...) -> None: ...

class BranchBatch(_message.Message):
    __slots__ = ("row", "generation", "base_len", "num_tokens", "token_ids")
    ROW_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    row: bytes
    generation: bytes
    base_len: bytes
    num_tokens: bytes
    token_ids: bytes
    def __init__(self, row: _Optional[bytes] = ..., generation: _Optional[bytes] = ..., base_len: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ...) -> None: ...

class RowError(_message.Message):
    __slots__ = ("row", "generation", "reason")
    ROW_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    row: int
    generation: int
    reason: str
    def __init__(self, row: _Optional[int] = ..., generation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_rows", "max_rows", "num_streams", "num_waiting_frames")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FRAMES_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    max_rows: int
    num_streams: int
    num_waiting_frames: int
    def __init__(self, num_rows: _Optional[int] = ..., max_rows: _Optional[int] = ..., num_streams: _Optional[int] = ..., num_waiting_frames: _Optional[int] = ...) -> None: ...
