"""A sampled item: which are, and what another worker needs to compute one again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from trtmesh.router.adapters.adapters import ItemAdapter
from trtmesh.router.canary.verdict import Difference, Generated
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.placement import AdapterNeed
from trtmesh.router.receipts import Taker
from trtmesh.router.values.request import ItemRequest
from trtmesh.v1 import engine_pb2 as engine_pb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import receipt_pb2 as receipt_pb


@dataclass(frozen=True, slots=True)
class SampledItem:
    """An item that ended without an error, computed by workers that promise equal tokens."""

    item: ItemRequest
    command: engine_pb.SubmitCommand
    """The item as a worker gets it, from its start."""
    adapter: ItemAdapter | None
    need: AdapterNeed | None
    outputs: Sequence[Generated]
    receipt: receipt_pb.Receipt
    signed: receipt_pb.SignedReceipt
    takers: Sequence[Taker]
    """The workers of the receipt."""

    @property
    def name(self) -> str:
        return f"{self.receipt.request_id}[{self.receipt.batch_index}]"

    @property
    def kind(self) -> Mapping[str, str]:
        """That of its workers."""
        return self.takers[0].worker.capabilities.kind

    @property
    def tokens(self) -> int:
        """Tokens that it keeps in memory."""
        generated = sum(len(output.token_ids) for output in self.outputs)
        return len(self.command.token_ids) + generated

    @property
    def facts(self) -> str:
        """Where the item's tokens and KV came from, in words."""
        spans = self.receipt.workers
        made = (
            f"{span.worker} from {', '.join(map(str, span.from_tokens)) or 0}"
            f"{' by handoff' if span.by_handoff else ''}"
            for span in spans
        )
        reused = self.receipt.cached_prompt_tokens
        return f"made by {', then '.join(made)}, {reused} prompt tokens reused"

    def worker_at(self, where: Difference) -> Worker | None:
        """The worker that generated a token; None if it was another router's."""
        for taker in reversed(self.takers):
            first = taker.from_tokens.get(where.sequence_index)
            if first is not None and first <= where.offset:
                return taker.worker
        return None


def is_chosen(share: float, request_id: str, batch_index: int) -> bool:
    """Whether an item is sampled: by a hash of its name, so that nobody needs to remember."""
    name = f"{batch_index} {request_id}".encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest()) < share * 2**64


def repeatable(
    command: engine_pb.SubmitCommand, outputs: Sequence[Generated]
) -> engine_pb.SubmitCommand:
    """Changes a command to have the item computed anew: up to the tokens there are, without cached KV, after others."""
    config = command.config
    most = max(len(output.token_ids) for output in outputs)
    config.stopping.max_tokens = max(most, config.stopping.min_tokens)
    config.kv_cache.Clear()
    config.kv_cache.reuse = False
    config.ClearField("handoff")
    config.priority = -(2**31)
    asked = config.output
    told = pb.OutputConfig(log_probs=True) if asked.log_probs else pb.OutputConfig()
    config.output.CopyFrom(told)
    command.ClearField("timeout_ms")
    return command


def has_room(command: engine_pb.SubmitCommand, max_sequence_tokens: int) -> bool:
    """Whether a worker has room for a repetition: with less it would end it earlier."""
    return len(command.token_ids) + command.config.stopping.max_tokens <= max_sequence_tokens
