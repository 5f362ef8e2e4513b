"""What a client has of a request that goes on here."""

from __future__ import annotations

import pytest
from trtmesh.router.request import parse_request
from trtmesh.router.resumption import parse_received
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb


@pytest.mark.parametrize("finished", [1, 2, 3])
def test_beams_of_which_not_all_are_over_begin_again_together(finished: int) -> None:
    config = pb.GenerationConfig()
    config.beam_search.beam_width = 3
    prompt = pb.Prompt(token_ids=pb.TokenIds(ids=[1]))
    request = router_pb.GenerateRequest(
        request_id="r", items=[router_pb.GenerateItem(prompt=prompt)], config=config
    )
    received = [
        router_pb.SequenceOffset(
            sequence_index=index, token_ids=[5], finished=True, reason=pb.FINISH_REASON_LENGTH
        )
        for index in range(finished)
    ]
    message = router_pb.ResumeRequest(request=request, received=received)
    known = parse_received(message, parse_request(request, "", 10)).sequences
    assert len(known) == (3 if finished == 3 else 0)
