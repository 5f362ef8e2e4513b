"""`trtmesh advise`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli.advising.loads import shared_prefixes, steady_chat
from prometheus_client import CollectorRegistry, generate_latest
from router.traces import write_trace
from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.app import app
from trtmesh.router.metrics import RouterMetrics
from trtmesh.tools.advising.forecast import Counts
from trtmesh.tools.advising.mesh import load_between, page_of, rates_of
from trtmesh.tools.bench.record import Answer, AnswerOutcome, Header, Line, Load
from trtmesh.tools.bench.run_file import as_line
from typer.testing import CliRunner, Result

RATES = ("--prefill-tokens-per-second", "8000", "--step-ms", "20", "--step-ms-per-sequence", "0.5")
ITEMS = 100
GOAL = ("--slo", "ttft:1000 tpot:60", "--attainment", "0.95")


def advise(file: Path, *flags: str) -> Result:
    return CliRunner().invoke(app, ["advise", str(file), *GOAL, *flags])


def advice_of(run: Result) -> dict[str, Any]:
    advice: dict[str, Any] = json.loads(run.stdout)
    return advice


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("trace") / "trace.jsonl", shared_prefixes(ITEMS))


def test_mixed_and_disaggregated_fleets_are_compared(trace: Path) -> None:
    run = advise(trace, *RATES, "--json")
    assert run.exit_code == 0, run.output
    advice = advice_of(run)
    best, *others = advice["fleets"]
    assert best["shares"]["good"] >= 0.95
    assert best["shares"]["reused"] > 0.5
    assert best["ms"]["TTFT p50"] < best["ms"]["TTFT p90"] < 1000
    assert all(sum(best["counts"].values()) <= sum(each["counts"].values()) for each in others)
    assert advice["load"]["items"] == ITEMS
    assert advice["routers"] == advice["tokenizers"] == 1
    assert any("8000 prompt tokens/s" in text for text in advice["assumptions"])
    table = advise(trace, *RATES, "--engines", "3+4")
    assert "needed: engines 3 prefill + 4 decode, routers 1, tokenizers 1" in table.output


def test_what_the_load_cannot_show_is_said(tmp_path: Path) -> None:
    few = write_trace(tmp_path / "few.jsonl", steady_chat(40))
    doubts = advice_of(advise(few, *RATES, "--engines", "9", "--json"))["doubts"]
    said = " ".join(doubts)
    assert "40 items are too few for a share of 0.95: 200 show it" in said
    assert "simulated fleets start empty" in said
    assert "no prefixes are known" in said


def test_busiest_items_of_a_long_trace_are_taken(trace: Path) -> None:
    advice = advice_of(advise(trace, *RATES, "--engines", "8", "--items", "60", "--json"))
    assert advice["load"]["items"] == 60
    assert any(f"the busiest 60 of {ITEMS} items" in text for text in advice["assumptions"])
    twice = advice["load"]["items_per_second"] * 2
    faster = ("--rate", str(twice), "--items", "60", "--engines", "8", "--json")
    load = advice_of(advise(trace, *RATES, *faster))["load"]
    assert load["items_per_second"] == pytest.approx(twice, rel=0.05)


def test_rate_of_items_that_come_at_once_is_refused(tmp_path: Path) -> None:
    burst = [replace(each, seconds=0.0) for each in steady_chat(20)]
    run = advise(write_trace(tmp_path / "burst.jsonl", burst), *RATES, "--rate", "20")
    assert run.exit_code == 2, run.output
    assert "--rate" in run.stderr
    assert "all items come at once" in run.stderr


def test_no_number_of_engines_is_a_failure(trace: Path) -> None:
    # Below a step's time.
    impossible = ("--slo", "ttft:5", "--most-engines", "16", "--items", "20")
    run = CliRunner().invoke(app, ["advise", str(trace), *impossible, *RATES, "--json"])
    assert run.exit_code == 1
    assert advice_of(run)["fleets"] == []
    assert any("idle ones fail too" in text for text in advice_of(run)["doubts"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--step-ms", "20"), "--prefill-tokens-per-second is unknown"),
        (RATES[:4], "--step-ms-per-sequence is unknown"),
        ((*RATES, "--engines", "0"), "--engines"),
        ((*RATES, "--engines", "1+2+3"), "--engines"),
        ((*RATES, "--slo", "gap:5"), "gap"),
        ((*RATES, "--check", "none.jsonl"), "none.jsonl"),
    ],
)
def test_wrong_usage_and_unknown_rates_have_status_2(
    trace: Path, flags: tuple[str, ...], words: str
) -> None:
    run = advise(trace, *flags)
    assert run.exit_code == 2, run.output
    assert words in run.stderr


def test_advice_without_any_load_is_wrong_usage() -> None:
    run = CliRunner().invoke(app, ["advise", *GOAL, *RATES])
    assert run.exit_code == 2
    assert "give a trace, or the metrics" in run.stderr


def test_forecast_is_compared_with_a_record(trace: Path, tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    header = Header("grpc://x", "grpc", Load("trace"), "w", 0)
    answers = [
        Answer(n, 0, f"{n}", n, n, n + 3.0, AnswerOutcome.OK, "", "", (n + 1.0, n + 3.0), (1, 9))
        for n in range(20)
    ]
    lines: list[Line] = [header, *answers]
    record.write_bytes(b"".join(as_line(line) for line in lines))
    advice = advice_of(advise(trace, *RATES, "--engines", "3", "--check", str(record), "--json"))
    checks = {each["ms"]: each for each in advice["checks"]}
    first = checks["TTFT p50"]
    assert first["measured"] == 1000
    assert first["forecast"] == advice["fleets"][0]["ms"]["TTFT p50"]
    assert first["error"] == pytest.approx(first["forecast"] / 1000 - 1, abs=1e-3)
    assert checks["E2E p50"]["measured"] == 3000


def test_counts_are_read() -> None:
    assert Counts.parse("3", "--engines") == Counts(3)
    assert Counts.parse("1+2", "--engines") == Counts(0, 1, 2)
    for wrong in ("", "0", "-1", "1+0", "1+2+3", "x", "10000", "9" * 5000):
        with pytest.raises(SettingsError, match="at most 4 digits"):
            Counts.parse(wrong, "--engines")


LEARNED = """
trtmesh_router_learned_prompt_token_seconds{model="m"} 0.0002
trtmesh_router_learned_step_seconds{model="m"} 0.02
trtmesh_router_learned_step_sequence_seconds{model="m"} 0.0004
trtmesh_router_learned_step_sequences{model="m"} 6
"""


def text_of(metrics: RouterMetrics) -> str:
    registry = CollectorRegistry()
    registry.register(metrics)
    return generate_latest(registry).decode()


def test_load_and_rates_of_a_mesh_are_read_from_its_metrics() -> None:
    metrics = RouterMetrics()
    metrics.models["m"].prompt_tokens.observe(8, 1000)
    metrics.models["m"].generated_tokens.observe(1, 1000)
    before = page_of(text_of(metrics))
    metrics.models["m"].prompt_tokens.observe(700, 300)
    metrics.models["m"].prompt_tokens.observe(3000, 100)
    metrics.models["m"].generated_tokens.observe(64, 400)
    after = page_of(text_of(metrics) + LEARNED)
    rates = rates_of([after], "")
    assert (rates.prefill_tokens_per_second, rates.step_ms, rates.sequences) == (5000, 20, 6)
    assert rates.step_ms_per_sequence == pytest.approx(0.4)
    arrivals = load_between([before], [after], 20, "").arrivals(2000, seed=1)
    assert arrivals[-1].seconds == pytest.approx(100, rel=0.1)
    prompts = [each.prompt_tokens for each in arrivals]
    assert sum(prompts) / 2000 == pytest.approx(1275, rel=0.01)
    assert sum(each > 2048 * 0.8 for each in prompts) == pytest.approx(500, rel=0.3)
    assert sum(each.new_tokens for each in arrivals) / 2000 == pytest.approx(64, rel=0.02)


def test_mesh_without_items_or_with_several_models_is_refused() -> None:
    metrics = RouterMetrics()
    metrics.models["m"].generated_tokens.observe(5)
    page = page_of(text_of(metrics))
    with pytest.raises(SettingsError, match="no item that ended in 60 s; watch longer"):
        load_between([page], [page], 60, "")
    metrics.models["m"].generated_tokens.observe(5)
    metrics.models["n"].generated_tokens.observe(5)
    with pytest.raises(SettingsError, match="--model must be one of m, n"):
        load_between([page], [page_of(text_of(metrics))], 60, "")
    with pytest.raises(SettingsError, match="is no page of a router"):
        page_of("trtmesh_engine_steps_total 5\n")
    assert rates_of([page], "").step_ms is None


def test_router_that_restarted_between_two_looks_is_told() -> None:
    former, metrics = RouterMetrics(), RouterMetrics()
    for one, times in ((former, 9), (metrics, 3)):
        one.models["m"].prompt_tokens.observe(5, times)
        one.models["m"].generated_tokens.observe(5, times)
    with pytest.raises(SettingsError, match="restarted within 60 s; look again"):
        load_between([page_of(text_of(former))], [page_of(text_of(metrics))], 60, "")


def test_answers_without_any_prompt_between_two_looks_are_too_few() -> None:
    metrics = RouterMetrics()
    metrics.models["m"].prompt_tokens.observe(700)
    before = page_of(text_of(metrics))
    metrics.models["m"].generated_tokens.observe(64)
    with pytest.raises(SettingsError, match="no item that began in 60 s; watch longer"):
        load_between([before], [page_of(text_of(metrics))], 60, "")
