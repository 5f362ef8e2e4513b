from __future__ import annotations

from trtmesh.cli.rates import Sample, measure
from trtmesh.v1 import router_admin_pb2 as pb
from trtmesh.v1.engine_pb2 import Load


def load(steps: int, computed: int, reused: int, generated: int) -> Load:
    return Load(
        step_count=steps,
        computed_prompt_tokens=computed,
        reused_prompt_tokens=reused,
        generated_tokens=generated,
    )


def sample(time: float, loads: dict[str, Load], tokens: dict[str, int] | None = None) -> Sample:
    workers = [pb.Worker(worker=name, address=name, load=load) for name, load in loads.items()]
    requests = [
        pb.LiveRequest(request_id=name, items=[pb.LiveItem(generated_tokens=count)])
        for name, count in (tokens or {}).items()
    ]
    return Sample(
        time, pb.ListWorkersResponse(workers=workers), pb.ListRequestsResponse(requests=requests)
    )


def test_rates_span_the_time_between_samples() -> None:
    before = sample(10, {"a": load(5, 100, 0, 50), "b": load(5, 10, 30, 0)}, {"r": 20})
    after = sample(12, {"a": load(9, 150, 50, 70), "b": load(6, 10, 30, 4)}, {"r": 30, "new": 7})
    rates = measure(before, after)
    a, b = rates.workers
    assert (a.prompt_tokens_per_second, a.generated_tokens_per_second) == (25, 10)
    assert (a.hit_rate, a.recent_hit_rate) == (0.25, 0.5)
    assert (b.hit_rate, b.recent_hit_rate) == (0.75, None)
    assert rates.generated_tokens_per_second == 12
    assert (rates.hit_rate, rates.recent_hit_rate) == (80 / 240, 0.5)
    assert [(r.request_id, r.tokens_per_second) for r in rates.requests] == [
        ("r", 5),
        ("new", None),
    ]


def test_first_look_has_no_rates() -> None:
    rates = measure(None, sample(10, {"a": load(5, 100, 100, 50)}, {"r": 20}))
    assert rates.workers[0].generated_tokens_per_second is None
    assert rates.workers[0].hit_rate == 0.5
    assert rates.generated_tokens_per_second is None
    assert rates.requests[0].tokens_per_second is None


def test_restarted_or_lost_worker_has_no_rate() -> None:
    told, again, lost = load(90, 900, 900, 900), load(2, 5, 5, 5), Load()
    for before, after in ((told, again), (told, lost), (lost, told)):
        rates = measure(sample(1, {"a": before}), sample(2, {"a": after}))
        assert rates.workers[0].generated_tokens_per_second is None
        assert rates.workers[0].recent_hit_rate is None
        assert rates.recent_hit_rate is None


def test_shorter_beam_does_not_make_the_rate_negative() -> None:
    rates = measure(sample(1, {}, {"r": 9}), sample(2, {}, {"r": 5}))
    assert rates.requests[0].tokens_per_second == 0
