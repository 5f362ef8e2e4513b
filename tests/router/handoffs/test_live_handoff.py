"""A handoff with its workers: what it says of a stage that took too long."""

from __future__ import annotations

from trtmesh.router.handoffs.live_handoff import PREFILL_SECONDS, HandoffItem, LiveHandoff
from trtmesh.router.kv_index import PromptBlocks
from trtmesh.router.requests.encoding import EncodedItem


class Owner:
    """Is told of the end."""

    def start_prefill(self, handoff: object, leg: object) -> None:
        raise AssertionError

    submit_rest = start_prefill

    def on_handoff_over(self, handoff: object) -> None: ...


async def test_late_handoff_tells_the_time_that_it_had() -> None:
    item = HandoffItem("r", 0, EncodedItem([1], [], [], PromptBlocks(None, [1])))
    handoff = LiveHandoff(Owner(), item, "paused", lambda _: None)
    handoff.be_late()
    assert handoff.error is not None
    assert f"was prefilling for longer than {PREFILL_SECONDS:g} s" in handoff.error.message
