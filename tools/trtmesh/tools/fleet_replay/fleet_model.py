"""The simulated fleet, and the result of a trace on it."""

from __future__ import annotations

from dataclasses import dataclass

from trtmesh.router.placement import Role
from trtmesh.router.placement.rates import FALLBACK_HANDOFF_SECONDS
from trtmesh.router.placement.settings import HandoffSettings

DEFAULTS = HandoffSettings()


@dataclass(frozen=True, slots=True)
class FleetModel:
    """The simulated fleet; all workers are equal."""

    workers: int = 4
    routers: int = 1
    """Each gets its share of the items, in turn, and learns of the others' from the workers."""
    prefill_tokens_per_second: float = 8000.0
    step_seconds: float = 0.010
    step_seconds_per_sequence: float = 0.00035
    cache_tokens: int = 500_000
    max_batch_size: int = 256
    report_seconds: float = 0.1
    adapter_slots: int = 16
    """Adapters on the device of a worker."""
    host_adapters: int = 64
    """Adapters in the memory of a worker, those on the device included."""
    delivery_seconds: float = 0.5
    """Time of an adapter from the router to host memory."""
    copy_seconds: float = 0.02
    """Time of an adapter from host memory to the device."""
    step_seconds_per_rank: float = 0.00004
    prefill_tokens_per_step: int = 2048
    """Most prompt tokens beside the sequences of a step."""
    prefill_workers: int = 0
    decode_workers: int = 0
    """The other workers are mixed."""
    handoff: HandoffSettings = DEFAULTS
    kv_token_bytes: int = 131_072
    """Bytes of a token's KV: 32 layers, 8 KV heads of 128 elements, BF16."""
    kv_bytes_per_second: float = 2e9
    """Bytes of KV that a worker receives per second."""
    index_blocks: int = 10_000_000
    """Most blocks in a router's KV index."""
    handoff_seconds: float = FALLBACK_HANDOFF_SECONDS
    """Time of a handoff's messages."""

    @property
    def roles(self) -> list[Role]:
        """The role of each worker."""
        roles = [Role.PREFILL] * self.prefill_workers + [Role.DECODE] * self.decode_workers
        return roles + [Role.MIXED] * (self.workers - len(roles))


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of a trace under a policy. Times are seconds from an item's arrival."""

    policy: str
    items: int
    prompt_tokens: int
    reused_tokens: int
    reusable_tokens: int
    """Tokens reused by an unbounded cache for the whole fleet."""
    items_by_worker: tuple[int, ...]
    computed_by_worker: tuple[int, ...]
    first_token_seconds: tuple[float, ...]
    """Of each item, as `end_seconds`."""
    end_seconds: tuple[float, ...]
    gap_seconds: tuple[float, ...]
    """Mean time between the tokens of each item with several."""
    busy_by_worker: tuple[float, ...]
    """Seconds with sequences."""
    seconds: float
    """From the first arrival to the last end."""
    kv_events: int
    """Reports of blocks stored or removed, to each router."""
    kv_event_blocks: int
    """Blocks in them."""
    index_blocks: int
    """Blocks known to a router at the end, the largest index, counted once per holder; `index_bytes` is its memory."""
    index_bytes: int
    has_roles: bool
    handoffs: int
    adapter_items: int
    """Items with an adapter."""
    adapter_deliveries: int
    adapter_copies: int

    @property
    def hit_rate(self) -> float:
        """Reused share of the prompt tokens."""
        return self.reused_tokens / self.prompt_tokens

    @property
    def balance(self) -> float:
        """Prompt tokens computed by the busiest worker, relative to the mean; 1 is even."""
        return (
            max(self.computed_by_worker)
            * len(self.computed_by_worker)
            / max(1, sum(self.computed_by_worker))
        )
