"""Per-token data is split with the tokens."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st
from trtmesh.chassis.log_prob_sums import sums
from trtmesh.router.streams.details import TokenDetailBuffer, unheard
from trtmesh.v1 import generation_pb2 as pb

VOCABULARY = 3


def details_of(start: int, count: int, normalized: bool) -> pb.TokenDetails:
    """Data of `count` tokens from position `start` on; every value encodes the position."""
    positions = range(start, start + count)
    rows = [float(position) for position in positions for _ in range(VOCABULARY)]
    return pb.TokenDetails(
        log_probs=positions,
        model_log_probs=[-float(position) for position in positions] if normalized else [],
        cumulative_log_prob=(-1.0 if normalized else 1.0) * sum(range(start + count)),
        top_log_probs=[pb.TopLogProbs(token_ids=[p], log_probs=[float(p)]) for p in positions],
        generation_logits=pb.Tensor(
            data_type=pb.DATA_TYPE_FP32,
            shape=[count, VOCABULARY],
            data=struct.pack(f"{len(rows)}f", *rows),
        ),
    )


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=8),
    st.lists(st.integers(0, 5), max_size=8),
    st.booleans(),
)
def test_any_cut_gives_each_token_its_own(
    added: list[int], cuts: list[int], normalized: bool
) -> None:
    buffer = TokenDetailBuffer()
    total = 0
    for count in added:
        buffer.add(details_of(total, count, normalized))
        total += count
    taken = 0
    for cut in [*cuts, total]:
        count = min(cut, total - taken)
        details = buffer.pop(count)
        if not count:
            assert details is None
            continue
        assert details
        positions = list(range(taken, taken + count))
        assert list(details.log_probs) == positions
        assert [list(top.token_ids) for top in details.top_log_probs] == [[p] for p in positions]
        logits = details.generation_logits
        assert list(logits.shape) == [count, VOCABULARY]
        rows = struct.unpack(f"{count * VOCABULARY}f", logits.data)
        assert list(rows[::VOCABULARY]) == positions
        taken += count
        terms = [-value if normalized else value for value in range(taken)]
        assert details.cumulative_log_prob == buffer.told_sum == sum(terms)
        assert list(details.model_log_probs) == (terms[-count:] if normalized else [])


@given(
    st.lists(st.lists(st.floats(-20, 0, width=32), min_size=1, max_size=4), min_size=1, max_size=8),
    st.data(),
)
def test_sum_does_not_depend_on_messages(runs: list[list[float]], data: st.DataObject) -> None:
    """Tokens may come one by one or in runs, and from a second worker, which knows no sum."""
    log_probs = [log_prob for run in runs for log_prob in run]
    after = list(sums(log_probs))
    moved = data.draw(st.integers(0, len(runs)))
    buffer, count = TokenDetailBuffer(), 0
    for index, run in enumerate(runs):
        count += len(run)
        told = after[count - 1] if index < moved else None
        buffer.add(pb.TokenDetails(log_probs=run, cumulative_log_prob=told))
    for each in after:
        details = buffer.pop(1)
        assert details
        assert details.cumulative_log_prob == buffer.told_sum == each


def test_nothing_asked_gives_nothing() -> None:
    assert TokenDetailBuffer().pop(0) is None


def prompt_of(start: int, end: int) -> pb.PromptDetails:
    """Data of the positions [start, end) of a prompt; every value encodes the position."""
    rows = [float(position) for position in range(start, end) for _ in range(VOCABULARY)]
    return pb.PromptDetails(
        token_offset=start,
        log_probs=range(start, end),
        context_logits=pb.Tensor(
            data_type=pb.DATA_TYPE_FP32,
            shape=[end - start, VOCABULARY],
            data=struct.pack(f"{len(rows)}f", *rows),
        ),
    )


@given(st.lists(st.integers(1, 4), min_size=1), st.lists(st.integers(1, 4), min_size=1), st.data())
def test_prompt_data_of_two_workers_is_put_once(
    first: list[int], second: list[int], data: st.DataObject
) -> None:
    """The first worker is lost after some pieces; the second splits the prompt at other positions."""
    total = sum(second)
    heard, told = [], 0
    pieces: list[tuple[int, int]] = []
    for counts in (first[: data.draw(st.integers(0, len(first)))], second):
        start = 0
        for count in counts:
            pieces.append((start, min(start + count, total)))
            start += count
    for start, end in pieces:
        if start < end:
            fresh, told = unheard(prompt_of(start, end), told)
            if fresh is not None:
                heard.append(fresh)
    assert [value for piece in heard for value in piece.log_probs] == list(range(total))
    rows = b"".join(piece.context_logits.data for piece in heard)
    assert rows == prompt_of(0, total).context_logits.data
    assert sum(piece.context_logits.shape[0] for piece in heard) == total
