"""Runs of tokens of a simulated sequence."""

from __future__ import annotations

from trtmesh.chassis.vocabulary import GenerationConfig, Stopping
from trtmesh.engine.backend import Submission
from trtmesh.engine.backends.simulated.sequence import Sequence
from trtmesh.engine.backends.simulated.tokens import TokenSource
from trtmesh.engine.stopping import EndRule
from trtmesh.v1 import generation_pb2 as pb

END_ID = 2
ONLY_END_IDS = TokenSource(5, 9, END_ID, end_probability=1.0)


def test_end_ids_are_replaced_below_min_tokens() -> None:
    stopping = Stopping(min_tokens=3)
    item = Submission((1,), "", 0, 0, [40, 41], 0, GenerationConfig(stopping=stopping))
    sequence = Sequence(item, 0, EndRule(stopping, (END_ID,), 2, 100), ONLY_END_IDS, 4)
    run = sequence.next_run()
    while not sequence.ending:
        run += sequence.next_run()
    assert run == [5, 5, 5, END_ID]
    assert sequence.ending == (pb.FINISH_REASON_END_ID, (END_ID,))
