"""Placement is a pure function of a snapshot."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from random import Random
from typing import Any

import pytest
from trtmesh.chassis.errors import InvalidField, NoWorker, PromptTooLong, UnsupportedField
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.placement import (
    POLICIES,
    AdapterNeed,
    PlacementQuery,
    Residency,
    WorkerAdapters,
    WorkerSnapshot,
    check_length,
    longest_sequence,
    place,
)
from trtmesh.router.placement.filters import ADAPTER_ABSENT, BREAKER_OPEN, SIBLINGS_ELSEWHERE
from trtmesh.router.placement.rates import Rates, Report
from trtmesh.router.placement.residency import NO_ADAPTERS


def holding(adapter: Adapter) -> WorkerAdapters:
    return NO_ADAPTERS.moved({(adapter.id, adapter.version): Residency(adapter)})


QUERY = PlacementQuery("m", frozenset({"sampling.top_k"}))


def worker(name: str, **changes: Any) -> WorkerSnapshot:
    values: dict[str, Any] = {
        "address": f"{name}:1",
        "worker": name,
        "model": "m",
        "problem": "",
        "sequences": 0,
        "supported_fields": frozenset({"sampling.top_k"}),
        "last_turn": 0,
    }
    return WorkerSnapshot(**values | changes)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "unfit",
    [{"problem": "draining"}, {"model": "other"}, {"supported_fields": frozenset()}],
)
def test_unfit_worker_is_never_chosen(policy: str, unfit: dict[str, Any]) -> None:
    decision = place(policy, [worker("a", **unfit), worker("b", sequences=99, last_turn=9)], QUERY)
    assert decision.chosen.worker == "b"
    assert [bool(candidate.excluded_by) for candidate in decision.candidates] == [True, False]
    assert decision.query is QUERY


def test_least_loaded_takes_the_worker_with_the_least_to_do() -> None:
    fleet = [worker("a", sequences=3), worker("b", sequences=1), worker("c", sequences=2)]
    assert place("least_loaded", fleet, QUERY).chosen.worker == "b"


def test_equals_take_turns() -> None:
    for policy in POLICIES:
        fleet = [worker("a", last_turn=2), worker("b", last_turn=1), worker("c", last_turn=3)]
        assert place(policy, fleet, QUERY).chosen.worker == "b"


def test_round_robin_does_not_look_at_the_load() -> None:
    fleet = [worker("a", sequences=100, last_turn=1), worker("b", last_turn=2)]
    assert place("round_robin", fleet, QUERY).chosen.worker == "a"


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "round_robin"])
def test_of_equal_workers_one_whose_drafts_hold_is_chosen(policy: str) -> None:
    rates = Rates()
    before, after = Report(0.0), Report(1.0, generated_tokens=180, accepted_draft_tokens=80)
    rates.learn(before, after)
    assert rates.tokens_per_step == 1.8
    drafting = worker("b", last_turn=9, tokens_per_step=rates.tokens_per_step)
    fleet = [worker("a", tokens_per_step=1.1), drafting]
    assert place(policy, fleet, QUERY).chosen.worker == "b"
    fleet[1] = drafting._replace(sequences=1, wait_seconds=0.001)
    assert place(policy, fleet, QUERY).chosen.worker == "a"


def test_no_worker_error_names_every_worker_and_problem() -> None:
    fleet = [worker("a", problem="it is draining"), worker("b", model="other")]
    with pytest.raises(NoWorker) as told:
        place("least_loaded", fleet, QUERY)
    assert "a: it is draining; b: serves model other" in told.value.message
    assert told.value.retry_after_ms
    with pytest.raises(NoWorker):
        place("least_loaded", [], QUERY)


def test_unsupported_field_is_named() -> None:
    fleet = [worker("a", supported_fields=frozenset({"priority"}))]
    with pytest.raises(UnsupportedField) as refused:
        place("least_loaded", fleet, QUERY)
    assert refused.value.fields == ("sampling.top_k",)
    assert "adapters" not in refused.value.message


def test_adapter_without_room_on_any_worker_is_told_the_remedy() -> None:
    fields = frozenset({"lora.name"})
    with pytest.raises(UnsupportedField, match="give a worker room for adapters") as refused:
        place("least_loaded", [worker("a", supported_fields=frozenset())], query(fields=fields))
    assert refused.value.fields == ("lora.name",)


@pytest.mark.parametrize("policy", POLICIES)
def test_long_prompt_needs_a_worker_with_enough_length(policy: str) -> None:
    fleet = [worker("short", max_sequence_tokens=100), worker("long", max_sequence_tokens=1000)]
    for prompt_tokens, able in ((99, {"short", "long"}), (100, {"long"}), (999, {"long"})):
        decision = place(policy, fleet, query(prompt_tokens=prompt_tokens))
        assert decision.chosen.worker in able
    with pytest.raises(PromptTooLong) as refused:
        place(policy, fleet, query(prompt_tokens=1000))
    error = refused.value
    assert (error.field, error.value, error.limit) == ("prompt", "1000", "below 1000")


def test_length_that_no_usable_worker_takes_is_refused_without_blocks() -> None:
    fleet = [
        worker("short", max_sequence_tokens=100),
        worker("long", max_sequence_tokens=1000),
        worker("lost", max_sequence_tokens=9999, problem="lost"),
        worker("other", max_sequence_tokens=9999, model="other"),
    ]
    model = fleet[0].model
    longest = longest_sequence(fleet, model)
    check_length(longest, model, 999)
    with pytest.raises(PromptTooLong) as refused:
        check_length(longest, model, 1000)
    assert (refused.value.value, refused.value.limit) == ("1000", "below 1000")
    # The wait for a worker decides.
    check_length(longest_sequence(fleet[2:], model), model, 1000)


@pytest.mark.parametrize("policy", POLICIES)
def test_item_of_many_sequences_needs_a_worker_that_takes_them(policy: str) -> None:
    small = worker("small", max_sequences=1, max_beams=1)
    fleet = [small, worker("big", max_sequences=8, max_beams=4, sequences=99, last_turn=9)]
    for many, limit in (({"item_sequences": 8}, "1 sequences"), ({"beams": 4}, "1 beams")):
        decision = place(policy, fleet, query(**many))
        assert decision.chosen.worker == "big"
        assert limit in decision.excluded_by[0]
    # A breaker opens for a time; the limit stays.
    resting = [small, worker("big", max_sequences=8, breaker_open=True)]
    assert place(policy, resting, query(item_sequences=8)).chosen.worker == "big"


@pytest.mark.parametrize(
    ("many", "field", "limit"),
    [
        ({"item_sequences": 9}, "sampling.num_return_sequences", "at most 8"),
        ({"beams": 9, "item_sequences": 9}, "beam_search.beam_width", "at most 4"),
    ],
)
def test_too_many_sequences_for_all_workers_are_refused(
    many: dict[str, int], field: str, limit: str
) -> None:
    fleet = [
        worker("a", max_sequences=1, max_beams=1),
        worker("b", max_sequences=8, max_beams=4),
        worker("gone", problem="gone"),
    ]
    with pytest.raises(InvalidField) as refused:
        place("least_loaded", fleet, query(**many))
    error = refused.value
    assert (error.field, error.value) == (field, "9")
    assert error.limit
    assert error.limit.startswith(limit)


def query(**changes: Any) -> PlacementQuery:
    return QUERY._replace(**changes)


PREFIX_POLICIES = [name for name, policy in POLICIES.items() if policy.looks_at_prefixes]


@pytest.mark.parametrize("policy", POLICIES)
def test_open_breaker_is_passed_over_unless_all_are_open(policy: str) -> None:
    resting = [worker("a", breaker_open=True), worker("b", breaker_open=True)]
    decision = place(policy, [*resting, worker("c", sequences=50, wait_seconds=9)], QUERY)
    assert decision.chosen.worker == "c"
    assert list(decision.excluded_by) == [BREAKER_OPEN, BREAKER_OPEN, ""]
    assert place(policy, resting, QUERY).chosen.worker in "ab"


@pytest.mark.parametrize("policy", POLICIES)
def test_excluded_worker_is_never_chosen(policy: str) -> None:
    fleet = [worker("a"), worker("b", breaker_open=True, sequences=9)]
    decision = place(policy, fleet, query(exclude={"a:1": "it just failed"}))
    assert decision.chosen.worker == "b"
    assert list(decision.excluded_by) == ["it just failed", ""]
    with pytest.raises(NoWorker):
        place(policy, fleet[:1], query(exclude={"a:1": "it just failed"}))


@pytest.mark.parametrize("policy", POLICIES)
def test_siblings_go_together_unless_their_worker_has_enough(policy: str) -> None:
    fleet = [worker("a", sequences=5), worker("b"), worker("c", last_turn=1)]
    decision = place(policy, fleet, query(prefer="a:1"))
    assert decision.chosen.worker == "a"
    assert list(decision.excluded_by) == ["", SIBLINGS_ELSEWHERE, SIBLINGS_ELSEWHERE]
    avoiding = query(avoid=frozenset({"a:1", "b:1"}))
    assert place(policy, fleet, avoiding).chosen.worker == "c"
    gone = [worker("a", problem="gone"), *fleet[1:]]
    assert place(policy, gone, query(prefer="a:1")).chosen.worker in "bc"


@pytest.mark.parametrize("policy", PREFIX_POLICIES)
def test_longest_prefix_wins_among_equals(policy: str) -> None:
    fleet = [worker(name, prefill_seconds=0.001) for name in "abcdef"]
    cached = {"c:1": 64, "e:1": 128}
    for draw in range(0, 2**32, 2**27):
        asked = query(prompt_tokens=200, cached_tokens=cached, draw=draw)
        decision = place(policy, fleet, asked)
        assert decision.chosen.worker == "e"
        assert decision.cached_tokens == 128
        assert decision.regret_tokens == 0


@pytest.mark.parametrize("policy", PREFIX_POLICIES)
def test_hot_prefix_spreads(policy: str) -> None:
    fleet = [
        worker("a", sequences=40, wait_seconds=3.0, prefill_seconds=0.001),
        worker("b", prefill_seconds=0.001),
        worker("c", prefill_seconds=0.001),
    ]
    decision = place(policy, fleet, query(prompt_tokens=200, cached_tokens={"a:1": 192}))
    assert decision.chosen.worker != "a"
    assert decision.regret_tokens == 192


@pytest.mark.parametrize("policy", [*PREFIX_POLICIES, "power_of_two", "least_loaded"])
def test_miss_goes_to_the_shortest_wait(policy: str) -> None:
    """Choosing the smallest cache would send every miss to the same worker."""
    fleet = [worker("a", wait_seconds=2.0, sequences=9), worker("b", wait_seconds=0.1, sequences=1)]
    assert place(policy, fleet, query(prompt_tokens=100)).chosen.worker == "b"


@pytest.mark.parametrize("policy", POLICIES)
def test_new_worker_gets_a_share_of_the_items(policy: str) -> None:
    old = {name: worker(name, sequences=20, wait_seconds=1.0, step_seconds=0.02) for name in "abc"}
    fleet = {**old, "new": worker("new", warmth=0.0)}
    taken: list[str] = []
    generator = Random(3)
    for turn in range(1, 41):
        asked = query(prompt_tokens=100, new_tokens=10, draw=generator.getrandbits(32))
        name = place(policy, list(fleet.values()), asked).chosen.worker
        taken.append(name)
        seen = fleet[name]
        fleet[name] = seen._replace(
            sequences=seen.sequences + 1,
            wait_seconds=seen.wait_seconds + 0.05,
            last_turn=turn,
        )
    assert 5 <= taken.count("new") <= 25
    assert max(len(list(run)) for key, run in groupby(taken) if key == "new") <= 4


def test_power_of_two_looks_at_two_and_takes_the_better() -> None:
    fleet = [worker(str(number), wait_seconds=float(number)) for number in range(8)]
    generator = Random(1)
    chosen = Counter(
        place("power_of_two", fleet, query(draw=generator.getrandbits(32))).chosen.worker
        for _ in range(2000)
    )
    assert "7" not in chosen
    assert len(chosen) == 7
    assert chosen.most_common(1)[0][0] == "0"


def test_routers_with_equal_views_spread_their_choices() -> None:
    fleet = [worker(str(number)) for number in range(16)]
    generator = Random(1)
    chosen = Counter(
        place("auto", fleet, query(prompt_tokens=9, draw=generator.getrandbits(32))).chosen.worker
        for _ in range(400)
    )
    assert len(chosen) == 16
    assert max(chosen.values()) < 80


@pytest.mark.parametrize("policy", POLICIES)
def test_decision_can_be_repeated(policy: str) -> None:
    fleet = [worker(str(n), wait_seconds=n % 3, sequences=n % 4, last_turn=n) for n in range(9)]
    asked = query(prompt_tokens=50, cached_tokens={"4:1": 32}, draw=123456789)
    decision = place(policy, fleet, asked)
    again = place(policy, decision.fleet, decision.query)
    assert (again.chosen, list(again.scores)) == (decision.chosen, list(decision.scores))


def test_item_goes_to_a_holder_unless_its_adapter_can_be_delivered() -> None:
    old, new = Adapter(7, "", "v1"), Adapter(7, "", "v2")
    fleet = [
        worker("a"),
        worker("b", adapters=holding(old)),
        worker("c", adapters=holding(new), sequences=9, wait_seconds=9.0),
    ]
    decision = place("least_loaded", fleet, query(adapter=AdapterNeed(new)))
    assert decision.chosen.worker == "c"
    assert list(decision.excluded_by) == [ADAPTER_ABSENT, ADAPTER_ABSENT, ""]
    deliverable = query(adapter=AdapterNeed(new, deliverable=True))
    assert place("least_loaded", fleet, deliverable).chosen.worker in "ab"
