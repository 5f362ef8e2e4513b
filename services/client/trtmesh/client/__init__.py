"""The client SDK: `Client` with events and options, and `AdminClient` for a router's admin address.

Calls raise the errors of `trtmesh.chassis.errors`. Messages of generation.proto for options are exported too.
"""

from trtmesh.chassis.addresses import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS
from trtmesh.chassis.bearer import AdminToken, ApiKey
from trtmesh.chassis.tls.client import ClientTls
from trtmesh.client.admin import AdminClient
from trtmesh.client.client import Client
from trtmesh.client.events import (
    Accepted,
    Event,
    FinishReason,
    ItemFailed,
    ItemFinished,
    ItemStarted,
    PromptDetails,
    SequenceFinished,
    SequenceStarted,
    Tokens,
    Usage,
)
from trtmesh.client.options import PromptLike, chat_item
from trtmesh.client.results import ItemResult, SequenceResult
from trtmesh.v1.generation_fields import Options
from trtmesh.v1.generation_pb2 import (
    DraftConfig,
    EncoderDecoderConfig,
    GenerationConfig,
    GenerationPhase,
    GuidedDecodingConfig,
    GuideType,
    HandoffConfig,
    KvCacheConfig,
    LookaheadConfig,
    LoraConfig,
    MultimodalConfig,
    Prompt,
    PromptTuningConfig,
    Tensor,
    TokenIds,
)
from trtmesh.v1.router_pb2 import GenerateItem

__all__ = [
    "DEFAULT_ADDRESS",
    "DEFAULT_ADMIN_ADDRESS",
    "Accepted",
    "AdminClient",
    "AdminToken",
    "ApiKey",
    "Client",
    "ClientTls",
    "DraftConfig",
    "EncoderDecoderConfig",
    "Event",
    "FinishReason",
    "GenerateItem",
    "GenerationConfig",
    "GenerationPhase",
    "GuideType",
    "GuidedDecodingConfig",
    "HandoffConfig",
    "ItemFailed",
    "ItemFinished",
    "ItemResult",
    "ItemStarted",
    "KvCacheConfig",
    "LookaheadConfig",
    "LoraConfig",
    "MultimodalConfig",
    "Options",
    "Prompt",
    "PromptDetails",
    "PromptLike",
    "PromptTuningConfig",
    "SequenceFinished",
    "SequenceResult",
    "SequenceStarted",
    "Tensor",
    "TokenIds",
    "Tokens",
    "Usage",
    "chat_item",
]
