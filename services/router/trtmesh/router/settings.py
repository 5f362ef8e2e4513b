"""Settings of a router process; each group is defined in the room that it configures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator
from trtmesh.chassis.grpc.compression_settings import CompressionSettings
from trtmesh.chassis.settings import CommaList, Port
from trtmesh.chassis.tls.settings import SecuredSettings
from trtmesh.router.adapters.settings import AdapterSettings
from trtmesh.router.admission import AdmissionLimits
from trtmesh.router.callers.callers import ApiKeySettings
from trtmesh.router.callers.limits import RateLimit
from trtmesh.router.doors.admin.settings import AdminSettings
from trtmesh.router.doors.openai.settings import OpenAiSettings
from trtmesh.router.doors.triton.http.door import HttpSettings
from trtmesh.router.doors.triton.settings import TritonSettings
from trtmesh.router.fleet.bridge import ForeignWorkerSettings
from trtmesh.router.links.deadlines import Deadlines, Retries
from trtmesh.router.links.local import LOCAL
from trtmesh.router.placement.settings import HandoffSettings, PlacementSettings
from trtmesh.router.receipts import ReceiptSettings
from trtmesh.router.recorder import RecordSettings
from trtmesh.router.streams.client_stream import ClientLimits


class RouterSettings(SecuredSettings):
    """Settings of a router process."""

    section: ClassVar[str] = "router"

    port: Port = 8001
    """Port of the gRPC server for clients."""
    engines: CommaList
    """Addresses of engines as host:port, or vllm://host:port, sglang://host:port or trtllm://host:port for those with a
    contract of their own. A host name with several addresses means several engines; file:PATH names a file with one
    address a line, read again every 2 s."""
    tokenizers: CommaList = ()
    """Addresses of tokenizers as host:port or file:PATH, likewise. `local` means one in this process, set up by
    `model_dir` of the section `tokenizer`, in the same file or as a variable: it saves the hop."""
    models: CommaList = ()
    """Models of the mesh by name, the default one first: requests without a model mean it, and requests of these models
    wait for the first worker, too. Each of several has Triton models of its own, such as NAME_ensemble. Empty means the
    only one."""
    min_drain_seconds: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """First part of `grace_seconds`, in which a draining router still serves who connects: as long as balancers take to
    see that its health is NOT_SERVING."""
    canary_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the items that another worker computes a second time, after their end and where there is idle capacity:
    a worker that two others contradict rests. Only of workers that promise equal tokens; 0 means none."""
    hedge_share: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Most tokens that are computed twice, as a share of the tokens delivered; those of prompts count by the time they
    take. A sequence whose next token is late then goes on at two workers that give equal tokens, until one of them is
    ahead; 0 means none, and 0.02 suits most."""
    defragment: bool = False
    """Whether running sequences move, with their KV, where that pays by the predictions of placement: to even out load
    and KV, to gather those of an adapter, and to make room for a prompt that waits for blocks. None moves twice within
    30 s."""
    http: HttpSettings = HttpSettings()
    triton: TritonSettings = TritonSettings()
    openai: OpenAiSettings = OpenAiSettings()
    admin: AdminSettings = AdminSettings()
    admission: AdmissionLimits = AdmissionLimits()
    api_keys: ApiKeySettings = ApiKeySettings()
    rate_limit: RateLimit = RateLimit()
    placement: PlacementSettings = PlacementSettings()
    handoff: HandoffSettings = HandoffSettings()
    foreign: ForeignWorkerSettings = ForeignWorkerSettings()
    adapters: AdapterSettings = AdapterSettings()
    deadlines: Deadlines = Deadlines()
    retries: Retries = Retries()
    client: ClientLimits = ClientLimits()
    compression: CompressionSettings = CompressionSettings()
    record: RecordSettings = RecordSettings()
    receipts: ReceiptSettings = ReceiptSettings()

    @property
    def other_tokenizers(self) -> Sequence[str]:
        """The tokenizers outside this process."""
        return [entry for entry in self.tokenizers if entry != LOCAL]

    @model_validator(mode="after")
    def _grace_is_longer(self) -> Self:
        if self.min_drain_seconds and self.min_drain_seconds >= self.grace_seconds:
            raise ValueError(
                f"min_drain_seconds is {self.min_drain_seconds:g} but must be below grace_seconds,"
                f" {self.grace_seconds:g}: running requests finish in what is left"
            )
        return self
