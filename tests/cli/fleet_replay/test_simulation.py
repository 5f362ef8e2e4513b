"""Policies over a simulated fleet."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from router.traces import shared_prefixes
from trtmesh.engine.scheduling import scheduler
from trtmesh.router.placement import POLICIES
from trtmesh.router.placement.settings import HandoffSettings
from trtmesh.tools.fleet_replay.fleet_model import FleetModel
from trtmesh.tools.fleet_replay.simulation import replay
from trtmesh.tools.fleet_replay.trace import Arrival


@pytest.mark.parametrize("policy", POLICIES)
def test_every_item_finishes_and_every_token_is_counted(policy: str) -> None:
    arrivals = shared_prefixes(50)
    outcome = replay(arrivals, policy, FleetModel(workers=6))
    assert outcome.items == sum(outcome.items_by_worker) == len(outcome.end_seconds) == 50
    assert len(outcome.first_token_seconds) == 50
    computed = sum(outcome.computed_by_worker)
    assert computed + outcome.reused_tokens == outcome.prompt_tokens
    assert outcome.reused_tokens <= outcome.reusable_tokens
    assert outcome == replay(arrivals, policy, FleetModel(workers=6))


def test_prefix_policies_reuse_more() -> None:
    fleet = FleetModel(workers=6, prefill_tokens_per_second=4000)
    arrivals = shared_prefixes(300)
    outcomes = {
        policy: replay(arrivals, policy, fleet)
        for policy in ("prefix_aware", "auto", "round_robin")
    }
    best = outcomes["prefix_aware"].reusable_tokens
    for policy in ("prefix_aware", "auto"):
        assert outcomes[policy].reused_tokens > 0.8 * best
        assert outcomes[policy].reused_tokens > 1.1 * outcomes["round_robin"].reused_tokens
        assert outcomes[policy].balance < 2
        assert sum(outcomes[policy].first_token_seconds) < sum(
            outcomes["round_robin"].first_token_seconds
        )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.soak), 8])
def test_unrelated_prompts_spread_evenly(policy: str, workers: int) -> None:
    dice = Random(1)
    seconds, arrivals = 0.0, []
    for number in range(120):
        seconds += dice.expovariate(3.0 * workers)
        tokens, new_tokens = dice.randint(50, 2000), dice.randint(1, 300)
        blocks = tuple(number * 100 + block for block in range(tokens // 64))
        arrivals.append(Arrival(seconds, tokens, new_tokens, 64, blocks))
    shares = replay(arrivals, policy, FleetModel(workers=workers)).items_by_worker
    assert max(shares) < 1.3 * 120 / workers
    assert min(shares) > 0.7 * 120 / workers


def test_load_policies_handle_long_prompts_among_short_ones() -> None:
    dice = Random(1)
    seconds, arrivals = 0.0, []
    for number in range(300):
        seconds += dice.expovariate(96)
        tokens = min(16_000, max(32, int(600 * dice.lognormvariate(0, 1))))
        blocks = tuple(number * 1000 + block for block in range(tokens // 32))
        arrivals.append(Arrival(seconds, tokens, dice.randint(32, 256), 32, blocks))
    fleet = FleetModel(workers=16)
    worst = {
        policy: sorted(replay(arrivals, policy, fleet).first_token_seconds)[-6]
        for policy in ("round_robin", "prefix_aware", "auto")
    }
    assert worst["auto"] < 0.75 * worst["round_robin"]
    assert worst["prefix_aware"] < 0.85 * worst["round_robin"]


def test_caches_are_bounded() -> None:
    small = FleetModel(workers=2, cache_tokens=1024)
    large = FleetModel(workers=2)
    arrivals = shared_prefixes(80)
    for policy in ("prefix_aware", "round_robin"):
        assert (
            replay(arrivals, policy, small).reused_tokens
            < replay(arrivals, policy, large).reused_tokens
        )


def with_adapters(
    items: int, ranks: tuple[int, ...] = (16,), rate: float = 40.0, adapters: int = 200
) -> list[Arrival]:
    """Items of several adapters with Zipf's popularity."""
    dice, now, arrivals = Random(3), 0.0, []
    weights = [1 / number for number in range(1, adapters + 1)]
    rank_of = [dice.choice(ranks) for _ in weights]
    for number in dice.choices(range(adapters), weights, k=items):
        now += dice.expovariate(rate)
        tokens, new_tokens = dice.randint(100, 300), dice.randint(32, 96)
        arrivals.append(
            Arrival(
                now,
                tokens,
                new_tokens,
                32,
                (),
                adapter=f"adapter-{number}",
                adapter_rank=rank_of[number],
            )
        )
    return arrivals


@pytest.mark.parametrize("policy", POLICIES)
def test_every_item_with_an_adapter_finishes(policy: str) -> None:
    arrivals = with_adapters(60)
    fleet = FleetModel(workers=4, adapter_slots=2, host_adapters=4)
    outcome = replay(arrivals, policy, fleet)
    assert outcome.adapter_items == 60
    assert len(outcome.end_seconds) == len(outcome.first_token_seconds) == 60
    assert len({a.adapter for a in arrivals}) <= outcome.adapter_deliveries
    assert outcome.adapter_deliveries <= outcome.adapter_copies


def test_adapters_are_loaded_where_they_live() -> None:
    arrivals, fleet = with_adapters(300, adapters=30), FleetModel(workers=8, delivery_seconds=0.3)
    blind = replay(arrivals, "round_robin", fleet)
    for policy in ("lora_aware", "auto"):
        aware = replay(arrivals, policy, fleet)
        assert aware.adapter_deliveries < 0.35 * blind.adapter_deliveries
        assert sum(aware.first_token_seconds) < 0.8 * sum(blind.first_token_seconds)


def test_low_ranks_do_not_wait_for_high_ones() -> None:
    arrivals = with_adapters(300, ranks=(8, 16, 32, 64, 128), rate=60.0)
    fleet = FleetModel(
        workers=8,
        adapter_slots=32,
        host_adapters=200,
        delivery_seconds=0.1,
        max_batch_size=32,
        step_seconds_per_rank=0.0002,
    )
    aware, blind = (replay(arrivals, name, fleet) for name in ("lora_aware", "least_loaded"))
    assert sum(aware.end_seconds) < 0.8 * sum(blind.end_seconds)


def long_prompts(items: int = 80, rate: float = 5.0, tokens: int = 2048) -> list[Arrival]:
    dice, now, arrivals = Random(4), 0.0, []
    for number in range(items):
        now += dice.expovariate(rate)
        arrivals.append(Arrival(now, tokens, dice.randint(50, 150), 32, (number,)))
    return arrivals


ROLES = FleetModel(workers=3, prefill_workers=1, decode_workers=2)


def choosing(how: str, fleet: FleetModel = ROLES) -> FleetModel:
    return replace(fleet, handoff=HandoffSettings.model_validate({"enabled": how}))


@pytest.mark.parametrize(
    ("how", "policy"),
    [*(("auto", policy) for policy in POLICIES), ("always", "auto"), ("never", "auto")],
)
def test_every_item_finishes_in_a_fleet_with_roles(policy: str, how: str) -> None:
    arrivals = [*long_prompts(30), *with_adapters(30)]
    arrivals.sort(key=lambda arrival: arrival.seconds)
    outcome = replay(arrivals, policy, choosing(how))
    assert outcome.items == len(outcome.end_seconds) == len(outcome.first_token_seconds) == 60
    assert sum(outcome.items_by_worker) == 60
    computed = sum(outcome.computed_by_worker)
    assert computed + outcome.reused_tokens == outcome.prompt_tokens
    prefill, *_ = outcome.items_by_worker
    assert prefill == 0
    if how == "never":
        assert outcome.handoffs == 0
        assert outcome.computed_by_worker[0] == 0
    if how == "always":
        assert outcome.handoffs == 60
        assert outcome.computed_by_worker[0] == computed


def test_fleet_without_roles_never_hands_over() -> None:
    assert replay(long_prompts(), "auto", FleetModel(workers=3)).handoffs == 0


def test_prompts_beside_sequences_make_steps_longer() -> None:
    arrivals = long_prompts()
    split, whole = (replay(arrivals, "auto", choosing(how)) for how in ("always", "never"))
    assert sum(split.gap_seconds) < 0.8 * sum(whole.gap_seconds)
    assert sum(whole.first_token_seconds) < sum(split.first_token_seconds)


def test_slow_transfer_delays_the_second_token() -> None:
    arrivals = [Arrival(0.0, 8000, 2, 32, (1,))]
    fast = replace(choosing("always"), kv_bytes_per_second=1e12)
    slow = replace(fast, kv_bytes_per_second=1e8)
    (early,), (late,) = (replay(arrivals, "auto", fleet).gap_seconds for fleet in (fast, slow))
    transfer = 8000 * fast.kv_token_bytes / 1e8
    # Half of the transfer is over when the prompt is computed, and no less than its last part follows.
    assert late - early == pytest.approx(transfer - 8000 / fast.prefill_tokens_per_second, rel=0.01)
    assert early < 2 * (fast.handoff_seconds + fast.step_seconds)


def test_shorter_prompts_overtake_on_a_prefill_worker_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrivals = [Arrival(0.01 * number, 8000, 2, 32, (number,)) for number in range(2)]
    arrivals += [Arrival(0.02 + 0.05 * n, 400, 2, 32, (10 + n,)) for n in range(200)]
    fleet = choosing("always")
    ordered = replay(arrivals, "auto", fleet)
    monkeypatch.setattr(scheduler, "PATIENCE", 0)
    arriving = replay(arrivals, "auto", fleet)
    assert sum(ordered.first_token_seconds) < 0.9 * sum(arriving.first_token_seconds)
    # Those that come within four durations of the second long prompt, and no later ones.
    assert max(arriving.first_token_seconds) < 4 < max(ordered.first_token_seconds) < 8


def test_conditional_choice_minds_the_prompts_that_follow() -> None:
    arrivals = long_prompts(120, 23.4, 512)
    auto, never = (
        sum(replay(arrivals, "auto", choosing(how)).first_token_seconds)
        for how in ("auto", "never")
    )
    assert auto < 4 * never


def test_conditional_choice_is_close_to_the_best_fixed_one() -> None:
    for tokens, rate in ((128, 40.0), (2048, 1.0), (2048, 5.0), (8192, 0.7)):
        arrivals = long_prompts(40, rate, tokens)
        auto, always, never = (
            sum(replay(arrivals, "auto", choosing(how)).end_seconds)
            for how in ("auto", "always", "never")
        )
        assert auto < 1.05 * min(always, never)


def test_routers_that_learn_from_workers_alone_reuse_nearly_as_much_as_one() -> None:
    arrivals = shared_prefixes(150)
    one, eight = (
        replay(arrivals, "prefix_aware", FleetModel(workers=12, routers=routers))
        for routers in (1, 8)
    )
    assert sum(eight.items_by_worker) == eight.items == 150
    assert 0.9 * one.reused_tokens < eight.reused_tokens
    assert 0 < eight.index_blocks <= eight.kv_event_blocks
    assert max(eight.busy_by_worker) <= eight.seconds


def test_times_are_of_each_item_in_its_order() -> None:
    arrivals = shared_prefixes(100)
    slow = replace(arrivals[50], new_tokens=2000)
    outcome = replay([*arrivals[:50], slow, *arrivals[51:]], "auto", FleetModel(workers=6))
    assert max(outcome.end_seconds) == outcome.end_seconds[50]
    pairs = zip(outcome.first_token_seconds, outcome.end_seconds, strict=True)
    assert all(first <= end for first, end in pairs)
