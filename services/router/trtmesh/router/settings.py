"""Settings of a router process; each group is defined in the room that it configures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator
from trtmesh.chassis.grpc.compression_settings import CompressionSettings
from trtmesh.chassis.settings import CommaList, Port
from trtmesh.chassis.tls.settings import SecuredSettings
from trtmesh.router.adapters.settings import AdapterSettings
from trtmesh.router.admission import AdmissionLimits
from trtmesh.router.callers.callers import ApiKeySettings
from trtmesh.router.callers.limits import RateLimit
from trtmesh.router.doors.admin.door import AdminSettings
from trtmesh.router.doors.triton.http.door import HttpSettings
from trtmesh.router.doors.triton.settings import TritonSettings
from trtmesh.router.fleet.bridge import ForeignWorkerSettings
from trtmesh.router.links.deadlines import Deadlines, Retries
from trtmesh.router.placement.settings import HandoffSettings, PlacementSettings
from trtmesh.router.replay import RecordSettings
from trtmesh.router.requests.siblings import SiblingRules
from trtmesh.router.streams.pace import ClientLimits
from trtmesh.router.tokenizers.pool import EncodeLimits


class RouterSettings(SecuredSettings):
    """Settings of a router process."""

    section: ClassVar[str] = "router"
    renamed: ClassVar[Mapping[str, str]] = {
        "http_port": "http.port",
        "http_receive_seconds": "http.receive_seconds",
        "admin_host": "admin.host",
        "admin_port": "admin.port",
        "admin_token_file": "admin.token_file",
        "policy": "placement.policy",
        "explained_decisions": "placement.explained_decisions",
        "kv_index_blocks": "placement.kv_index_blocks",
        "siblings_together": "siblings.max_together",
        "sibling_wait_seconds": "siblings.wait_seconds",
        "record_file": "record.file",
        "record_max_bytes": "record.max_bytes",
        "max_items": "admission.max_items",
        "max_running_items": "admission.max_running_items",
        "max_queued_items": "admission.max_queued_items",
        "max_items_per_request": "admission.max_items_per_request",
        "queue_seconds": "admission.queue_seconds encoding.queue_seconds",
        "encodes_per_tokenizer": "encoding.max_per_tokenizer",
        "max_queued_encodes": "encoding.max_queued",
        "key_tokens_per_second": "rate_limit.tokens_per_second",
        "key_burst_tokens": "rate_limit.burst_tokens",
        "client_buffer_tokens": "client.buffer_tokens",
        "client_buffer_bytes": "client.buffer_bytes",
        "client_at_limit": "client.at_limit",
        "client_stall_seconds": "client.stall_seconds",
        "silence_seconds": "deadlines.silence_seconds",
        "decode_seconds": "deadlines.decode_seconds",
        "stall_seconds": "deadlines.stall_seconds",
        "accepted_seconds": "deadlines.accepted_seconds",
        "started_seconds": "deadlines.started_seconds",
        "first_token_seconds": "deadlines.first_token_seconds",
        "next_token_seconds": "deadlines.next_token_seconds",
        "max_attempts": "retries.max_attempts",
        "worker_recovery_seconds": "retries.worker_wait_seconds",
        "tokenizer_recovery_seconds": "retries.tokenizer_wait_seconds",
    }

    port: Port = 8001
    """Port of the gRPC server for clients."""
    engines: CommaList
    """Addresses of engines as host:port, or vllm://host:port, sglang://host:port or trtllm://host:port for those with a
    contract of their own. A host name with several addresses means several engines; file:PATH names a file with one
    address a line, read again every `resolve_seconds`."""
    tokenizers: CommaList = ()
    """Addresses of tokenizers as host:port or file:PATH, likewise."""
    models: CommaList = ()
    """Models of the mesh by name, the default one first: requests without a model mean it. Each of several has Triton
    models of its own, such as NAME_ensemble. Empty means the only one."""
    resolve_seconds: Annotated[float, Field(gt=0, le=3600)] = 2.0
    """Interval at which host names are resolved and files of addresses read again."""
    min_drain_seconds: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """First part of `grace_seconds`, in which a draining router still serves who connects: as long as balancers take to
    see that its health is NOT_SERVING."""
    http: HttpSettings = HttpSettings()
    triton: TritonSettings = TritonSettings()
    admin: AdminSettings = AdminSettings()
    admission: AdmissionLimits = AdmissionLimits()
    api_keys: ApiKeySettings = ApiKeySettings()
    rate_limit: RateLimit = RateLimit()
    encoding: EncodeLimits = EncodeLimits()
    placement: PlacementSettings = PlacementSettings()
    handoff: HandoffSettings = HandoffSettings()
    foreign: ForeignWorkerSettings = ForeignWorkerSettings()
    adapters: AdapterSettings = AdapterSettings()
    siblings: SiblingRules = SiblingRules()
    deadlines: Deadlines = Deadlines()
    retries: Retries = Retries()
    client: ClientLimits = ClientLimits()
    compression: CompressionSettings = CompressionSettings()
    record: RecordSettings = RecordSettings()

    @model_validator(mode="after")
    def _grace_is_longer(self) -> Self:
        if self.min_drain_seconds and self.min_drain_seconds >= self.grace_seconds:
            raise ValueError(
                f"min_drain_seconds is {self.min_drain_seconds:g} but must be below grace_seconds,"
                f" {self.grace_seconds:g}: running requests finish in what is left"
            )
        return self
