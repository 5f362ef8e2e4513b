"""Runs of tokens of a simulated sequence."""

from __future__ import annotations

from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.vocabulary import GenerationConfig, Stopping
from trtmesh.engine.backend import Submission
from trtmesh.engine.backends.simulated.sequence import sequences_of
from trtmesh.engine.backends.simulated.tokens import TokenSource
from trtmesh.v1 import generation_pb2 as pb

END_ID = 2
ONLY_END_IDS = TokenSource(5, 9, END_ID, end_probability=1.0)


def test_end_ids_are_replaced_below_min_tokens() -> None:
    stopping = Stopping(min_tokens=3)
    item = Submission((1,), "", 0, 0, [40, 41], 0, GenerationConfig(stopping=stopping))
    (sequence,) = sequences_of(item, EndRule(stopping, (END_ID,), 2, 100), None)
    run: list[int] = []
    while not sequence.ending:
        sequence.make_run(ONLY_END_IDS)
        run += sequence.run
        sequence.take_run(len(run))
    assert run == [5, 5, 5, END_ID]
    assert sequence.ending == (pb.FINISH_REASON_END_ID, (END_ID,))
