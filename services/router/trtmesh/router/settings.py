"""Settings of a router process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field
from trtmesh.chassis.settings import (
    CommaList,
    OptionalPort,
    Policy,
    Port,
    ServiceSettings,
    Settings,
    split_commas,
)
from trtmesh.router.doors.triton.model_settings import LogitsDataType, MaxBatchSize, TritonModels
from trtmesh.router.streams.pace import AtLimit

DecoupledTemplate = Literal[
    "ensemble", "tensorrt_llm", "tensorrt_llm_bls", "disaggregated_serving_bls"
]


class TritonSettings(Settings):
    """What the Triton door serves, in the words of Triton's model configurations."""

    enabled: bool = True
    """Whether KServe v2 requests are served beside the native API."""
    model: str = ""
    """Model of the mesh behind the Triton models; empty means the only one."""
    models: TritonModels = Field(default_factory=dict)
    """The models by name: for each its `template` and what is different for it; empty means the five of TensorRT-LLM's
    template. A flag gives them as JSON."""
    decoupled: Annotated[tuple[DecoupledTemplate, ...], BeforeValidator(split_commas)] = (
        "ensemble",
        "tensorrt_llm",
        "tensorrt_llm_bls",
        "disaggregated_serving_bls",
    )
    """Templates whose models answer with a stream of responses; the others give one response to each request."""
    max_batch_size: MaxBatchSize = 128
    """Most rows of a request."""
    exclude_input_in_output: bool = False
    """Whether the prompt is left out of the output where a request does not say."""
    accumulate_tokens: bool = False
    """Whether each response of a tensorrt_llm_bls stream holds the whole text so far."""
    logits_data_type: LogitsDataType = "FP32"
    """Element type of logits outputs."""
    add_special_tokens: bool = True
    """Whether prompts are encoded with the special tokens that the tokenizer adds."""
    skip_special_tokens: bool = True
    """Whether texts leave special tokens out."""


class RouterSettings(ServiceSettings):
    """What a router can be told."""

    section: ClassVar[str] = "router"

    port: Port = 8001
    """Port of the gRPC server for clients."""
    http_port: OptionalPort = 8000
    """Port of the Triton door over HTTP; `none` serves none."""
    http_receive_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """How long an HTTP client may take to send the body of a request."""
    admin_host: str = "127.0.0.1"
    """Address to listen on for admins."""
    admin_port: Port = 8003
    """Port for admins."""
    admin_token_file: Path | None = None
    """File with the token that admins must show; unset means the variable TRTMESH_ADMIN_TOKEN, and without it none."""
    tokenizers: CommaList = ()
    """Addresses of tokenizers as host:port. A host name that resolves to several addresses means several tokenizers;
    file:PATH means the addresses in a file, one a line, that is read again every `resolve_seconds`."""
    engines: CommaList
    """Addresses of engines, likewise."""
    policy: Policy = "auto"
    """How a worker is chosen for an item."""
    explained_decisions: Annotated[int, Field(ge=0, le=1_000_000)] = 4096
    """Latest placement decisions that are kept to be explained."""
    siblings_together: Annotated[int, Field(ge=1, le=65536)] = 8
    """Most items of one request that begin alike and go to one worker together; 1 lets each go its own way."""
    sibling_wait_seconds: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """How long an item waits until what it shares with another item of its request is computed."""
    record_file: Path | None = None
    """File that a line is appended to for each item that is over, for `trtmesh replay`; unset records nothing. Prompts
    are not written; hashes of their blocks are."""
    record_max_bytes: Annotated[int, Field(ge=4096)] = 256 * 2**20
    """Size at which `record_file` is moved to `<record_file>.1`, which is replaced."""
    kv_index_blocks: Annotated[int, Field(ge=0, le=100_000_000)] = 1_000_000
    """Most KV blocks of workers that are remembered, about 250 bytes each; what was used longest ago goes first."""
    resolve_seconds: Annotated[float, Field(gt=0, le=3600)] = 2.0
    """How often host names are resolved and files of addresses read again."""
    max_items: Annotated[int, Field(ge=1, le=1_000_000)] = 8192
    """Most live items; a request that would exceed it is refused with QUEUE_FULL, one that alone has more with
    INVALID_FIELD."""
    max_running_items: Annotated[int, Field(ge=1, le=1_000_000)] = 8192
    """Most items of one model that are worked on at once; more wait in its queue, by priority and arrival."""
    max_queued_items: Annotated[int, Field(ge=0, le=1_000_000)] = 8192
    """Most items of one model that wait; a request that would exceed it is refused with QUEUE_FULL."""
    queue_seconds: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """How long an item may wait in its model's queue before it ends with QUEUE_TIMEOUT."""
    encodes_per_tokenizer: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Most texts that one tokenizer has to encode for this router at once; more wait for a place, by arrival,
    `queue_seconds` at most."""
    max_queued_encodes: Annotated[int, Field(ge=1, le=1_000_000)] = 8192
    """Most texts of one model that wait; one more ends its item with QUEUE_FULL."""
    key_tokens_per_second: Annotated[float, Field(gt=0)] | None = None
    """Tokens, of prompts and generated, that each API key may use a second at this router; unset limits nothing."""
    key_burst_tokens: Annotated[int, Field(ge=1)] = 100_000
    """Tokens that an API key may use at once, likewise, after it used none for a while."""
    max_items_per_request: Annotated[int, Field(ge=1, le=65536)] = 1024
    """Most prompts of one request."""
    client_buffer_tokens: Annotated[int, Field(ge=1)] = 65_536
    """Tokens that may wait for one client to read them before `client_at_limit` is done."""
    client_buffer_bytes: Annotated[int, Field(ge=1)] = 64 * 2**20
    """Bytes, of tokens, texts, log-probabilities and logits, that may wait for one client, likewise."""
    client_at_limit: AtLimit = "pause"
    """What is done when a client's buffer is full: `pause` takes the request's sequences off their workers until the
    client has read, and then goes on with them on any worker; `cancel` ends the request with SLOW_CLIENT."""
    client_stall_seconds: Annotated[float, Field(gt=0, le=86400)] = 30.0
    """How long a client may leave a message unread, paused or not, before its request is ended with SLOW_CLIENT."""
    silence_seconds: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """How long a worker or tokenizer that owes a message may be silent before it counts as lost."""
    decode_seconds: Annotated[float, Field(gt=0, le=3600)] = 1.5
    """How long a tokenizer may leave tokens unanswered before another one, if one answers, has all it had."""
    stall_seconds: Annotated[float, Field(gt=0, le=3600)] = 1.0
    """How long a worker may be silent before its items go on elsewhere; at least five of its load reports."""
    accepted_seconds: Annotated[float, Field(gt=0, le=3600)] = 1.0
    """How long a worker that is not silent may leave an item unread before its items go on elsewhere."""
    started_seconds: Annotated[float, Field(gt=0, le=86400)] = 30.0
    """How long an item may wait in a worker's queue before it is tried elsewhere."""
    first_token_seconds: Annotated[float, Field(gt=0, le=86400)] = 30.0
    """How long a sequence that started may be without a token, its first or one more, while its worker makes steps."""
    next_token_seconds: Annotated[float, Field(gt=0, le=86400)] = 1.5
    """How long a worker that has sequences may make no step before they go on elsewhere; longer where its steps took
    longer of late."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 4
    """How many workers, or tokenizers, may be lost with an item that gains nothing in between before it ends with
    WORKER_LOST or TOKENIZER_LOST."""
    worker_recovery_seconds: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """How long an item waits for a worker when none takes it, before its first token or in the middle of its stream."""
    triton: TritonSettings = TritonSettings()
    """The Triton door."""
    tokenizer_recovery_seconds: Annotated[float, Field(ge=0, le=3600)] = 10.0
    """How long sequences wait for another tokenizer when the last one was lost."""
