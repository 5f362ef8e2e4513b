"""`min_tokens` means the same to every backend: so many tokens come before an end id or the end of a stop word."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from trtmesh.chassis.vocabulary import Stopping
from trtmesh.engine.backends.simulated.endings import EndRule as SimulatedRule
from trtmesh.engine.backends.torch.stopping import EndRule as TorchRule
from trtmesh.v1 import generation_pb2 as pb

END_ID = 0
WORD = (7, 8)


def torch_end(stopping: Stopping, tokens: Sequence[int], limit: int) -> tuple[int, int] | None:
    """How many tokens there are in the end, and why."""
    prompt = [5]
    rule = TorchRule(stopping, (END_ID,), len(prompt), len(prompt) + limit)
    for count in range(1, len(tokens) + 1):
        end = rule.end_after([*prompt, *tokens[:count]])
        if end:
            return count, end[0]
    return None


def simulated_end(stopping: Stopping, tokens: Sequence[int], limit: int) -> tuple[int, int] | None:
    ending = SimulatedRule(stopping, (END_ID,), limit).find([], tokens)
    return (ending.tokens, ending.reason) if ending else None


@given(st.lists(st.sampled_from([END_ID, 7, 8, 9]), min_size=1, max_size=12), st.integers(0, 12))
def test_the_backends_agree(tokens: list[int], min_tokens: int) -> None:
    stopping = Stopping(min_tokens=min_tokens, stop_token_ids=(WORD,))
    for limit in (5, 100):
        assert torch_end(stopping, tokens, limit) == simulated_end(stopping, tokens, limit)


def test_the_first_end_id_that_counts_follows_min_tokens_others() -> None:
    for end in (torch_end, simulated_end):
        assert end(Stopping(min_tokens=2), [9, END_ID, END_ID], 9) == (3, pb.FINISH_REASON_END_ID)
        stopping = Stopping(min_tokens=2, stop_token_ids=(WORD,))
        assert end(stopping, [7, 8, 7, 8], 9) == (4, pb.FINISH_REASON_STOP_WORD)
        assert end(Stopping(min_tokens=3), [9, END_ID, END_ID], 3) == (3, pb.FINISH_REASON_LENGTH)
    held_back = SimulatedRule(Stopping(min_tokens=2), (END_ID,), 9)
    assert held_back.without_early_ends(0, [END_ID] * 3, 5) == [5, 5, END_ID]
    rule = TorchRule(Stopping(min_tokens=2), (END_ID,), 1, 9)
    assert [rule.bans_end_ids(1 + generated) for generated in range(3)] == [True, True, False]
