"""Random walks through worlds too large to explore: several handoffs, many parts, any number of lost messages."""

from __future__ import annotations

from handoff.lane import ANY, FAULT, LOSS, TIMER, Bounds
from handoff.model import Edge, Model, World
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from searches import examples

STARTS = "a local sequence starts"


class RandomWalk(RuleBasedStateMachine):
    """Takes any step at any time; once faults cease, every stream and lease must end."""

    @initialize(
        kind=st.sampled_from(["prefill", "move", "park", "halves", "state"]),
        one_sided=st.booleans(),
        lanes=st.integers(1, 4),
        parts=st.integers(1, 6),
        blocks=st.integers(1, 4),
    )
    def begin(self, kind: str, one_sided: bool, lanes: int, parts: int, blocks: int) -> None:
        bounds = Bounds(
            kind=kind,
            one_sided=one_sided,
            lanes=lanes,
            parts=parts,
            blocks=blocks,
            losses=ANY,
        )
        self.model = Model(bounds)
        self.world: World = self.model.start()

    def take(self, data: st.DataObject, *kinds: str) -> None:
        edges = [edge for edge in self.model.edges(self.world) if edge.kind in kinds]
        if edges:
            self.go(data.draw(st.sampled_from(edges)))

    def go(self, edge: Edge) -> None:
        self.world = edge.world
        self.model.check(self.world)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self.take(data, "")

    @rule(data=st.data())
    def another_step(self, data: st.DataObject) -> None:
        self.take(data, "")

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.take(data, LOSS)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.take(data, FAULT)

    @precondition(lambda self: not self.model.is_over(self.world))
    @rule(data=st.data())
    def time_out(self, data: st.DataObject) -> None:
        self.take(data, TIMER)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        while not self.model.is_over(self.world):
            self.go(self.next_without_faults())

    def next_without_faults(self) -> Edge:
        """Timers fire only when nothing else can happen."""
        edges = [edge for edge in self.model.edges(self.world) if edge.label != STARTS]
        for kind in ("", TIMER):
            for edge in edges:
                if edge.kind == kind:
                    return edge
        raise AssertionError(f"nothing can happen in {self.world}")


TestRandomWalk = RandomWalk.TestCase
TestRandomWalk.settings = settings(
    max_examples=examples(40, soak=300), stateful_step_count=60, deadline=None
)
