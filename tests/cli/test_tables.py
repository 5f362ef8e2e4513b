"""Tables keep names and addresses whole on narrow screens."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from trtmesh.cli.rates import Sample, measure
from trtmesh.cli.requests import split_line
from trtmesh.cli.tables import (
    adapter_versions_table,
    adapters_table,
    add_row,
    candidates_table,
    fitted,
    handoffs_table,
    items_table,
    load_columns,
    new_table,
    requests_table,
    residencies_table,
    tokenizers_table,
    workers_table,
)
from trtmesh.cli.top import page
from trtmesh.v1 import router_admin_pb2 as pb
from trtmesh.v1.engine_pb2 import (
    ADAPTER_PLACE_DEVICE,
    ADAPTER_PLACE_HOST,
    WORKER_ROLE_DECODE,
    WORKER_ROLE_MIXED,
    Load,
)
from trtmesh.v1.generation_pb2 import Error
from trtmesh.v1.kv_transfer_pb2 import HandoffCounts

PROBLEM = (
    "cannot connect: failed to connect to all addresses; the last of them refused the connection"
)
NAMES = [f"engine-of-a-long-name-{number}" for number in range(2)]
ADDRESSES = [f"engine-{number}.engines.default.svc.cluster.local:9000" for number in range(2)]
REQUEST = "d3b07384-d9a0-4c1e-8f3c-5f0f6f3ad8a2"

LOAD = Load(
    step_count=5,
    computed_prompt_tokens=15_000,
    reused_prompt_tokens=5_000,
    running_sequences=12,
    waiting_sequences=3,
    used_blocks=200,
    total_blocks=400,
)


def looked_at(seen: pb.ListWorkersResponse) -> str:
    """A page of `trtmesh top` in a pipe."""
    sample = Sample(1.0, seen, pb.ListRequestsResponse())
    screen = StringIO()
    console = Console(file=screen, width=200, color_system=None)
    console.print(page(console, "router", sample, measure(None, sample)), soft_wrap=True)
    return screen.getvalue()


def fleet(problem: str) -> pb.ListWorkersResponse:
    seen = pb.ListWorkersResponse(policy="auto")
    for name, address in zip(NAMES, ADDRESSES, strict=True):
        state = pb.WORKER_STATE_CONNECTING if problem else pb.WORKER_STATE_READY
        seen.workers.add(worker=name, address=address, state=state, problem=problem)
        seen.tokenizers.add(address=address, state=state, problem=problem)
    return seen


def live() -> pb.ListRequestsResponse:
    seen = pb.ListRequestsResponse(live_requests=1)
    request = seen.requests.add(request_id=REQUEST, model="demo")
    for batch_index, name in enumerate(NAMES):
        item = request.items.add(batch_index=batch_index, stage="generate", worker=name)
        item.sequences.add(worker=name, generated_tokens=5)
    return seen


def shown(table: Table, *, terminal: bool, width: int) -> str:
    screen = StringIO()
    console = Console(file=screen, force_terminal=terminal, width=width, color_system=None)
    console.print(fitted(table, console), soft_wrap=True)
    return screen.getvalue()


@pytest.mark.parametrize("problem", ["", PROBLEM], ids=["well", "unwell"])
@pytest.mark.parametrize("width", [20, 80, 200])
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_names_and_addresses_are_whole(*, terminal: bool, width: int, problem: str) -> None:
    seen = fleet(problem)
    candidates = [pb.PlacementCandidate(worker=name, excluded_by=problem) for name in NAMES]
    for table, words in (
        (workers_table(seen.workers), (*NAMES, *ADDRESSES)),
        (tokenizers_table(seen.tokenizers), ADDRESSES),
        (requests_table(live().requests), (REQUEST, ", ".join(NAMES))),
        (items_table(live().requests[0]), NAMES),
        (candidates_table(pb.Placement(candidates=candidates)), NAMES),
        (candidates_table(pb.Placement(candidates=candidates, adapter="a")), NAMES),
    ):
        text = shown(table, terminal=terminal, width=width)
        assert [word for word in words if word not in text] == []
        assert "…" not in text


def test_placement_shows_the_adapter_of_its_item() -> None:
    candidate = pb.PlacementCandidate(
        worker="a", adapter_place=ADAPTER_PLACE_HOST, adapter_seconds=0.25
    )
    with_adapter = candidates_table(pb.Placement(candidates=[candidate], adapter="tests"))
    row = shown(with_adapter, terminal=False, width=80).splitlines()[-1].split()
    assert row[-2:] == ["host", "250"]
    without = shown(
        candidates_table(pb.Placement(candidates=[candidate])), terminal=False, width=80
    )
    assert "adapter" not in without


def test_workers_show_their_present_role() -> None:
    seen = fleet("")
    for worker in seen.workers:
        worker.engine.role = WORKER_ROLE_MIXED
    seen.workers[0].load.role = WORKER_ROLE_DECODE
    for text in (looked_at(seen), shown(workers_table(seen.workers), terminal=False, width=200)):
        lines = [line.split() for line in text.splitlines() if NAMES[0][:-1] in line]
        assert ["decode" in line for line in lines] == [True, False]
        assert "mixed" in lines[1]


def test_handoffs_and_adapters_have_columns_where_there_are_some() -> None:
    seen = fleet("")
    assert load_columns(seen.workers) == []
    load = seen.workers[0].load
    load.adapter_slots, load.free_adapter_slots = 4, 1
    load.sent_handoffs.MergeFrom(HandoffCounts(granted=9, consumed=7, released=1, held=1))
    load.received_handoffs.MergeFrom(HandoffCounts(granted=3, consumed=3))
    load.quarantined_blocks = 12
    for text in (looked_at(seen), shown(workers_table(seen.workers), terminal=False, width=200)):
        first, second = [line.split() for line in text.splitlines() if NAMES[0][:-1] in line]
        assert first[-5:] == ["3/4", "7", "3", "1", "12"]
        assert second[-5:] == ["-", "0", "0", "0", "0"]


def test_drafts_have_columns_where_there_are_some() -> None:
    seen = fleet("")
    seen.workers[0].load.draft_tokens, seen.workers[0].load.accepted_draft_tokens = 40, 30
    assert "75%" in looked_at(seen)
    for tokens, text in ((1.75, "1.75"), (1.0, "")):
        candidate = pb.PlacementCandidate(worker="a", tokens_per_step=tokens)
        table = candidates_table(pb.Placement(candidates=[candidate]))
        found = shown(table, terminal=False, width=200)
        assert ("/step" in found) == bool(text)
        assert text in found


def test_handoff_is_a_row() -> None:
    handoff = pb.Handoff(
        lease_id="0123456789abcdef" * 2,
        request_id=REQUEST,
        sender=NAMES[0],
        receiver=NAMES[1],
        stage="transferring",
        cause="drain",
        tokens=640,
        present_tokens=128,
        transport="backend",
        age_ms=42,
        expires_in_ms=2000,
    )
    row = shown(handoffs_table([handoff]), terminal=True, width=20).splitlines()[-1].split()
    assert row == [
        "0123456789ab", REQUEST, "0", "0", "drain", "transferring", *NAMES, "backend", "640", "128", "42", "2000",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, []),
        (
            {"prefill_worker": "p", "split_seconds": 0.25, "whole_seconds": 1.5},
            ["prefill on p, decode on d: chosen", "250 ms on two, 1500 ms on one worker"],
        ),
        (
            {"prefill_worker": "p", "handoff_kind": "vllm-nixl"},
            ["prefill on p, decode on d, KV moved by their backends (vllm-nixl): chosen"],
        ),
        ({"whole_seconds": 0.1}, ["prefill and decode on d: chosen", "100 ms on one worker"]),
    ],
)
def test_explanation_shows_both_legs_and_predictions(
    fields: dict[str, Any], words: list[str]
) -> None:
    reason = "chosen" if fields else ""
    line = split_line(pb.Placement(worker="d", split_reason=reason, **fields))
    assert bool(line) is bool(words)
    assert [word for word in words if word not in line] == []


def test_adapter_has_a_row_per_version_and_one_per_place() -> None:
    versions = [
        pb.AdapterVersion(
            version="1234567890abcdef",
            size_bytes=3 << 20,
            rank=16,
            share=0.9,
            residencies=[
                pb.AdapterResidency(worker=name, place=ADAPTER_PLACE_DEVICE) for name in NAMES
            ],
        ),
        pb.AdapterVersion(version="fedcba", share=0.1, error=Error(message=PROBLEM)),
    ]
    adapter = pb.Adapter(id=7, name="tests", versions=versions)
    rows = shown(adapters_table([adapter]), terminal=False, width=80).splitlines()[-2:]
    assert [row.split() for row in rows] == [
        ["tests", "7", "1234567890ab", "3.0", "MiB", "16", str(len(NAMES)), "90%"],
        ["tests", "7", "fedcba", "0.0", "MiB", "?", "0", "10%", *PROBLEM.split()],
    ]
    status = shown(adapter_versions_table(adapter), terminal=False, width=80)
    assert PROBLEM in status
    places = shown(residencies_table(adapter), terminal=False, width=80)
    assert [name for name in NAMES if name not in places] == []


def test_row_is_a_line_in_a_pipe() -> None:
    lines = shown(workers_table(fleet(PROBLEM).workers), terminal=False, width=80).splitlines()
    for words in zip(NAMES, ADDRESSES, strict=True):
        (line,) = [line for line in lines if words[0] in line]
        assert words[1] in line
        assert PROBLEM in line


def test_common_fleet_fits_80_columns() -> None:
    seen = pb.ListWorkersResponse()
    for number in range(2):
        worker = seen.workers.add(
            worker=f"engine-{number}", address="127.0.0.1:45211", state=pb.WORKER_STATE_READY
        )
        worker.engine.model, worker.engine.backend = "demo", "simulated"
        worker.engine.role, worker.load.adapter_slots = WORKER_ROLE_MIXED, 4
    text = shown(workers_table(seen.workers), terminal=True, width=80)
    assert max(map(len, text.splitlines())) <= 80


def test_look_at_a_common_fleet_fits_80_columns() -> None:
    fleet = pb.ListWorkersResponse(policy="auto", live_requests=9)
    for number in range(2):
        worker = fleet.workers.add(worker=f"engine-{number}", state=pb.WORKER_STATE_READY, items=12)
        worker.load.MergeFrom(LOAD)
    sample = Sample(1.0, fleet, pb.ListRequestsResponse())
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    console.print(page(console, "127.0.0.1:8003", sample, measure(None, sample)), soft_wrap=True)
    headline, *lines = screen.getvalue().splitlines()
    assert "KV reuse 25%, now -" in headline
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_look_at_a_busy_fleet_fits_the_terminal(width: int) -> None:
    """Columns that matter least are left out; a pipe has all."""
    fleet = pb.ListWorkersResponse(policy="auto", live_requests=9)
    for number, role in enumerate((WORKER_ROLE_MIXED, WORKER_ROLE_DECODE)):
        worker = fleet.workers.add(worker=f"engine-{number}", state=pb.WORKER_STATE_READY, items=12)
        worker.load.MergeFrom(LOAD)
        worker.load.role, worker.load.adapter_slots = role, 4
        worker.load.sent_handoffs.granted = 3
    sample = Sample(1.0, fleet, live())
    for terminal in (True, False):
        screen = StringIO()
        console = Console(file=screen, force_terminal=terminal, width=width, color_system=None)
        console.print(
            page(console, "127.0.0.1:8003", sample, measure(None, sample)), soft_wrap=True
        )
        _, *lines = screen.getvalue().splitlines()
        if terminal:
            assert max(map(len, lines)) <= width
        words = set(" ".join(lines).split())
        assert {"worker", "state", "running", "waiting", "request", REQUEST} <= words
        assert terminal or {"leases", "items", "stages", "unread"} <= words


def test_remarks_fold_before_lines_run_on() -> None:
    table = new_table("name", remark="problem")
    add_row(table, "a", PROBLEM)
    lines = shown(table, terminal=True, width=80).splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) <= 80


def test_names_are_no_markup() -> None:
    table = new_table("name")
    add_row(table, "[bold]x[/bold]")
    assert "[bold]x[/bold]" in shown(table, terminal=False, width=80)


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_top_keeps_names_whole(*, terminal: bool) -> None:
    screen = StringIO()
    console = Console(file=screen, force_terminal=terminal, width=80, color_system=None)
    sample = Sample(1.0, fleet(PROBLEM), live())
    shown = page(console, "127.0.0.1:8003", sample, measure(None, sample))
    console.print(shown, soft_wrap=True)
    assert [word for word in (*NAMES, REQUEST) if word not in screen.getvalue()] == []
