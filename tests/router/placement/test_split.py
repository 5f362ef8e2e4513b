"""Two workers share an item where that is predicted to cost less."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from router.placement.test_place import worker
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.placement import (
    POLICIES,
    AdapterNeed,
    Decision,
    KvFacts,
    PlacementQuery,
    Residency,
    Role,
    WorkerSnapshot,
    place_split,
)
from trtmesh.router.placement.policies import predicted_seconds
from trtmesh.router.placement.residency import NO_ADAPTERS
from trtmesh.router.placement.settings import HandoffSettings
from trtmesh.router.placement.split import (
    ALWAYS,
    BOUND,
    FASTER,
    INCOMPATIBLE,
    MIN_PROMPT_TOKENS,
    NEVER,
    NO_DECODE,
    NO_PREFILL,
    SLOWER,
    Pair,
    pair_seconds,
    whole_seconds,
)

AUTO, ALL, NONE = (HandoffSettings(enabled=how) for how in ("auto", "always", "never"))
KV = KvFacts(b"kv", frozenset({1}), 1000, frozenset({1}))
PREDICTING = sorted(name for name, policy in POLICIES.items() if policy.costs is predicted_seconds)


def of_role(role: Role, name: str, **changes: Any) -> WorkerSnapshot:
    values = {
        "role": role,
        "kv": KV,
        "prefill_seconds": 1e-4,
        "step_seconds": 0.01,
        "transfer_seconds": 1e-6,
    }
    return worker(name, **values | changes)


def prefill(name: str = "p", **changes: Any) -> WorkerSnapshot:
    return of_role(Role.PREFILL, name, **changes)


def decode(name: str = "d", **changes: Any) -> WorkerSnapshot:
    return of_role(Role.DECODE, name, **changes)


def mixed(name: str = "m", **changes: Any) -> WorkerSnapshot:
    return of_role(Role.MIXED, name, **changes)


def query(prompt_tokens: int = 2000, **changes: Any) -> PlacementQuery:
    values: dict[str, Any] = {
        "new_tokens": 100,
        "has_roles": True,
        "handoff_seconds": 0.01,
        **changes,
    }
    return PlacementQuery("m", prompt_tokens=prompt_tokens, **values)


def chosen(decision: Decision) -> tuple[str, str]:
    return decision.prefill.worker, decision.chosen.worker


def reason(decision: Decision) -> str:
    assert decision.split is not None
    return decision.split.reason


BUSY: dict[str, Any] = {"sequences": 8, "decoding_sequences": 8}


@pytest.mark.parametrize("policy", POLICIES)
def test_long_prompt_leaves_a_busy_decode_worker(policy: str) -> None:
    decision = place_split(policy, [prefill(), decode(**BUSY)], query(), AUTO)
    assert (chosen(decision), reason(decision)) == (("p", "d"), FASTER)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("fleet", "asked"),
    [
        pytest.param([prefill(), decode()], query(), id="idle decode worker"),
        pytest.param(
            [prefill(), decode(sequences=1, decoding_sequences=1)], query(70), id="short prompt"
        ),
        pytest.param([prefill(wait_seconds=9.0), decode(**BUSY)], query(), id="busy prefill pool"),
        pytest.param([prefill(sequences=5), decode(**BUSY)], query(), id="prompts that follow"),
        pytest.param(
            [prefill(), decode(**BUSY)], query(cached_tokens={"d:1": 1930}), id="cached prompt"
        ),
        pytest.param([prefill(), decode(transfer_seconds=0.01, **BUSY)], query(), id="slow link"),
        pytest.param(
            [prefill(), decode(transfer_seconds=1e-4, receiving_tokens=50_000, **BUSY)],
            query(),
            id="busy link",
        ),
        pytest.param([prefill(), decode(**BUSY)], query(handoff_seconds=2.0), id="slow handoff"),
    ],
)
def test_item_stays_whole_where_that_is_faster(
    policy: str, fleet: list[WorkerSnapshot], asked: PlacementQuery
) -> None:
    decision = place_split(policy, fleet, asked, AUTO)
    assert (chosen(decision), reason(decision)) == (("d", "d"), SLOWER)
    assert decision.split is not None
    assert 0 < decision.split.whole_seconds <= decision.split.split_seconds


def test_few_uncached_tokens_are_not_compared() -> None:
    asked = query(cached_tokens={"d:1": 1985})
    decision = place_split("auto", [prefill(), decode(**BUSY)], asked, AUTO)
    assert chosen(decision) == ("d", "d")
    assert "15 prompt tokens" in reason(decision)
    assert decision.split is not None
    assert decision.split.split_seconds == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_worker_that_refused_takes_a_whole_item_but_no_decode_leg(policy: str) -> None:
    asked = query(refused_by={"d:1": "full"})
    decision = place_split(policy, [prefill(), decode(), decode("e")], asked, ALL)
    assert (chosen(decision), reason(decision)) == (("p", "e"), ALWAYS)
    decision = place_split(policy, [prefill(), decode()], asked, ALL)
    assert (chosen(decision), reason(decision)) == (("d", "d"), NO_DECODE)


@pytest.mark.parametrize(
    ("rules", "asked", "legs", "why"),
    [
        (ALL, query(3), ("p", "d"), ALWAYS),
        (NONE, query(), ("d", "d"), NEVER),
        (ALL, query(may_split=False), ("d", "d"), BOUND),
    ],
)
def test_setting_and_item_come_before_the_prediction(
    rules: HandoffSettings, asked: PlacementQuery, legs: tuple[str, str], why: str
) -> None:
    decision = place_split("auto", [prefill(), decode(**BUSY)], asked, rules)
    assert (chosen(decision), reason(decision)) == (legs, why)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("fleet", "legs", "why"),
    [
        ([prefill("a"), prefill("b")], ("a", "a"), NO_DECODE),
        ([decode("a"), decode("b")], ("a", "a"), NO_PREFILL),
        ([prefill("a"), mixed("b")], ("a", "b"), ALWAYS),
        ([mixed("a"), decode("b")], ("a", "b"), ALWAYS),
        ([prefill("a"), decode("b", kv=None)], ("b", "b"), NO_DECODE),
        ([prefill("a", kv=None), decode("b")], ("b", "b"), NO_PREFILL),
        ([prefill("a"), decode("b", refuses_handoffs=True)], ("b", "b"), NO_DECODE),
        ([prefill("a", breaker_open=True), decode("b")], ("b", "b"), NO_PREFILL),
        ([prefill("a"), decode("b", breaker_open=True)], ("a", "a"), NO_DECODE),
        ([prefill("a", problem="lost"), decode("b")], ("b", "b"), NO_PREFILL),
        ([prefill("a", supported_fields=frozenset()), decode("b")], ("b", "b"), NO_PREFILL),
        ([prefill("a", max_sequence_tokens=100), decode("b")], ("b", "b"), NO_PREFILL),
        ([prefill("a", model="other"), decode("b")], ("b", "b"), NO_PREFILL),
        (
            [prefill("a", kv=KV._replace(compatibility_hash=b"x")), decode("b")],
            ("b", "b"),
            INCOMPATIBLE,
        ),
        (
            [prefill("a", kv=KV._replace(data_types=frozenset({2}))), decode("b")],
            ("b", "b"),
            INCOMPATIBLE,
        ),
        (
            [prefill("a", kv=KV._replace(transports=frozenset({3}))), decode("b")],
            ("b", "b"),
            INCOMPATIBLE,
        ),
    ],
)
def test_legs_are_fit_for_their_phase(
    policy: str, fleet: list[WorkerSnapshot], legs: tuple[str, str], why: str
) -> None:
    asked = query(fields=frozenset({"sampling.top_k"}))
    decision = place_split(policy, fleet, asked, ALL)
    assert (chosen(decision), reason(decision)) == (legs, why)


@pytest.mark.parametrize("policy", POLICIES)
def test_prefill_worker_takes_whole_items_only_if_no_other_can(policy: str) -> None:
    fleet = [prefill("a"), decode("b", sequences=99, wait_seconds=99.0, last_turn=9)]
    decision = place_split(policy, fleet, query(), NONE)
    assert decision.chosen.worker == "b"
    assert [c.excluded_by for c in decision.candidates] == ["its role is prefill", ""]
    left = [fleet[0], fleet[1]._replace(problem="draining")]
    assert place_split(policy, left, query(), NONE).chosen.worker == "a"
    assert place_split(policy, fleet, query(exclude={"b:1": "x"}), NONE).chosen.worker == "a"


def test_excluded_worker_takes_no_leg() -> None:
    fleet = [prefill("a"), prefill("b", wait_seconds=1), decode("c"), decode("d", wait_seconds=9)]
    for left_out in product(["", "a:1"], ["", "c:1"]):
        asked = query(exclude={address: "it failed" for address in left_out if address})
        expected = ("b" if left_out[0] else "a", "d" if left_out[1] else "c")
        assert chosen(place_split("auto", fleet, asked, ALL)) == expected


def test_siblings_share_the_prefill_worker() -> None:
    fleet = [prefill("a"), prefill("b", wait_seconds=0.1), decode("c"), decode("d")]
    assert chosen(place_split("auto", fleet, query(prefer="b:1"), ALL))[0] == "b"
    assert chosen(place_split("auto", fleet, query(avoid=frozenset({"a:1"})), ALL))[0] == "b"


def test_pair_reuses_the_prefixes_of_both_sides() -> None:
    fleet = [prefill("a"), prefill("b"), decode("c"), decode("d", transfer_seconds=1e-4)]
    cached = {"b:1": 1900, "d:1": 1999}
    assert chosen(place_split("auto", fleet, query(cached_tokens=cached), ALL)) == ("b", "d")


def test_decode_leg_prefers_exact_resumption() -> None:
    fleet = [
        prefill("a"),
        decode("b", is_exact=False),
        decode("c", wait_seconds=5.0),
    ]
    assert chosen(place_split("auto", fleet, query(), ALL)) == ("a", "c")


@pytest.mark.parametrize("policy", ["auto", "lora_aware"])
def test_both_legs_have_the_adapter(policy: str) -> None:
    adapter = Adapter(7, "", "v")
    held = NO_ADAPTERS.moved({(7, "v"): Residency(adapter)}).reported(4, 0, 4)
    fleet = [prefill("a"), prefill("b", adapters=held), decode("c"), decode("d", adapters=held)]
    asked = query(adapter=AdapterNeed(adapter))
    assert chosen(place_split(policy, fleet, asked, ALL)) == ("b", "d")
    nowhere = [fleet[0], fleet[3]]
    assert reason(place_split(policy, nowhere, asked, ALL)) == NO_PREFILL


def test_policies_without_prediction_choose_each_leg_by_their_rule() -> None:
    fleet = [
        prefill("a", sequences=2, last_turn=1),
        prefill("b", sequences=1, last_turn=2),
        decode("c", sequences=4, last_turn=3),
        decode("d", sequences=3, last_turn=4),
    ]
    assert chosen(place_split("round_robin", fleet, query(), ALL)) == ("a", "c")
    assert chosen(place_split("least_loaded", fleet, query(), ALL)) == ("b", "d")


def test_mixed_workers_compute_prompts_for_others_only_without_prefill_workers() -> None:
    fleet = [prefill("a", wait_seconds=5.0), mixed("b"), decode("c")]
    assert chosen(place_split("auto", fleet, query(), ALL))[0] == "a"
    assert chosen(place_split("auto", fleet[1:], query(), ALL)) == ("b", "c")


def test_transfer_is_hidden_behind_the_computation() -> None:
    seconds = {
        transfer: pair_seconds(Pair(prefill(), decode(transfer_seconds=transfer)), query())
        for transfer in (0.0, 1e-4, 2e-4)
    }
    computing = 2000 * 1e-4
    assert seconds[1e-4] - seconds[0.0] == pytest.approx(computing / 32)
    assert seconds[2e-4] - seconds[0.0] == pytest.approx(computing)


WORKERS = st.lists(
    st.builds(
        of_role,
        st.sampled_from(Role),
        st.sampled_from("abcdefghij"),
        wait_seconds=st.floats(0, 2),
        decoding_sequences=st.integers(0, 30),
        sequences=st.integers(0, 40),
        prefill_seconds=st.floats(1e-6, 1e-2),
        step_seconds=st.floats(1e-3, 0.1),
        transfer_seconds=st.floats(0, 1e-2),
        pressure_seconds=st.floats(0, 1),
        problem=st.sampled_from(["", "", "lost"]),
        breaker_open=st.sampled_from([False, False, True]),
        refuses_handoffs=st.sampled_from([False, False, True]),
        warmth=st.sampled_from([1.0, 1.0, 0.5]),
        kv=st.sampled_from([KV, KV, None, KV._replace(compatibility_hash=b"x")]),
        last_turn=st.integers(0, 9),
    ),
    min_size=1,
    max_size=10,
    unique_by=lambda each: each.address,
).filter(lambda fleet: any(not each.problem for each in fleet))


@given(
    WORKERS,
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 10_000),
    st.integers(0, 2**32 - 1),
    st.sampled_from([AUTO, ALL, NONE]),
    st.sets(st.sampled_from("abcdefghij"), max_size=5),
)
def test_legs_are_healthy_and_compatible(
    fleet: list[WorkerSnapshot],
    policy: str,
    tokens: int,
    draw: int,
    rules: HandoffSettings,
    failed: set[str],
) -> None:
    exclude = {f"{name}:1": "it failed" for name in failed}
    assume(any(not each.problem and each.address not in exclude for each in fleet))
    decision = place_split(policy, fleet, query(tokens, draw=draw, exclude=exclude), rules)
    pair = decision.split.pair if decision.split else None
    for leg in (decision.prefill, decision.chosen):
        assert not leg.problem
        assert leg.address not in exclude
    if pair is None:
        assert decision.prefill is decision.chosen
        return
    assert pair.prefill.address != pair.decode.address
    assert pair.prefill.role is not Role.DECODE
    assert pair.decode.role is not Role.PREFILL
    assert not (pair.prefill.role is Role.MIXED is pair.decode.role)
    assert not any(leg.problem or leg.breaker_open for leg in (pair.prefill, pair.decode))
    assert not pair.decode.refuses_handoffs
    assert pair.prefill.kv is not None
    assert pair.prefill.kv == pair.decode.kv


@given(
    WORKERS,
    st.sampled_from(PREDICTING),
    st.integers(MIN_PROMPT_TOKENS, 10_000),
    st.integers(0, 2**32 - 1),
)
def test_prediction_is_never_above_that_of_a_fixed_choice(
    fleet: list[WorkerSnapshot], policy: str, tokens: int, draw: int
) -> None:
    asked = query(tokens, draw=draw)
    auto, always, never = (place_split(policy, fleet, asked, rules) for rules in (AUTO, ALL, NONE))

    def predicted(decision: Decision) -> float:
        pair = decision.split.pair if decision.split else None
        if pair:
            return pair_seconds(pair, asked)
        return whole_seconds(decision.chosen, asked)

    assert predicted(auto) <= min(predicted(always), predicted(never))


@given(WORKERS, st.integers(1, 10_000), st.randoms())
def test_order_of_the_fleet_does_not_matter(
    fleet: list[WorkerSnapshot], tokens: int, dice: Any
) -> None:
    # Without sampling, and without ties.
    fleet = [each._replace(last_turn=turn) for turn, each in enumerate(fleet)]
    shuffled = list(fleet)
    dice.shuffle(shuffled)
    one, other = (place_split("least_loaded", f, query(tokens), ALL) for f in (fleet, shuffled))
    assert chosen(one) == chosen(other)


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_pairs_take_turns(policy: str) -> None:
    fleet = [prefill("a"), prefill("b"), decode("c"), decode("d")]
    seen = []
    for turn in range(1, 5):
        legs = chosen(place_split(policy, fleet, query(), ALL))
        seen.append(legs)
        fleet = [w._replace(last_turn=turn) if w.worker in legs else w for w in fleet]
    assert seen == [("a", "c"), ("b", "d")] * 2


def test_slow_start_does_not_count_against_a_pair() -> None:
    cold, warm = prefill("a", warmth=0.0), prefill("b", wait_seconds=1.0, last_turn=5)
    busy = decode(**BUSY)
    decision = place_split("auto", [cold, warm, busy], query(), AUTO)
    assert decision.split is not None
    # Chosen as if it had the load of the other, but compared with its own.
    assert decision.split.pair == Pair(cold, busy)
    assert decision.split.split_seconds == pair_seconds(Pair(cold, busy), query())


def by_state(compatibility: bytes, kind: str = "vllm-nixl") -> KvFacts:
    return KvFacts(compatibility, frozenset(), 0, frozenset({4}), kind)


@pytest.mark.parametrize("policy", POLICIES)
def test_workers_with_states_pair_with_their_kind_alone(policy: str) -> None:
    kinds = {"a": by_state(b"a"), "b": by_state(b"b"), "lease": KV}
    fleet = [
        *(prefill(f"p-{name}", kv=kv) for name, kv in kinds.items()),
        *(decode(f"d-{name}", kv=kv) for name, kv in kinds.items()),
    ]
    for draw in range(16):
        computes, continues = chosen(place_split(policy, fleet, query(draw=draw << 24), ALL))
        assert computes.removeprefix("p-") == continues.removeprefix("d-")
    other = place_split(policy, [fleet[0], fleet[4]], query(), ALL)
    assert (chosen(other), reason(other)) == (("d-b", "d-b"), INCOMPATIBLE)


@pytest.mark.parametrize(
    "changes", [{"sequences": 2, "item_sequences": 2}, {"beams": 2, "sequences": 2}]
)
def test_several_sequences_have_no_state(changes: dict[str, int]) -> None:
    fleet = [prefill("p-state", kv=by_state(b"a")), decode("d-state", kv=by_state(b"a"))]
    alone = place_split("auto", fleet, query(**changes), ALL)
    assert (chosen(alone), reason(alone)) == (("d-state", "d-state"), NO_PREFILL)
    beside = [*fleet, prefill("p-lease"), decode("d-lease")]
    assert chosen(place_split("auto", beside, query(**changes), ALL)) == ("p-lease", "d-lease")
