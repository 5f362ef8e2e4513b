"""Tables of workers, tokenizers, requests, handoffs, placements and adapters."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from trtmesh.chassis.quoting import cut, escaped
from trtmesh.v1 import router_admin_pb2 as pb
from trtmesh.v1.engine_pb2 import AdapterPlace, Load, WorkerRole
from trtmesh.v1.generation_pb2 import AdapterFormat, FinishReason

R = TypeVar("R")

Columns = Mapping[str, Callable[[R], object]]
"""Columns of a table: the cell of a row by heading."""

LEAST_REMARK_WIDTH = 20
"""Least width of a remark, in characters."""

MAX_CELL_CHARACTERS = 1024
"""Longest cell; the router's own names and problems are shorter."""

LEASE_DIGITS = 12
"""Digits of a lease id in a table."""


def workers_table(workers: Sequence[pb.Worker]) -> Table:
    columns: Columns[pb.Worker] = {
        "worker": lambda worker: worker.worker or "?",
        "address": lambda worker: worker.address,
        "state": worker_state,
        "model": lambda worker: worker.engine.model,
        "backend": lambda worker: worker.engine.backend,
        "role": role_word,
        "items": lambda worker: worker.items,
        "KV\nblocks": lambda worker: f"{worker.load.used_blocks}/{worker.load.total_blocks}",
    }
    extra = {column.heading: column.of_worker for column in load_columns(workers)}
    problem: Columns[pb.Worker] = {"problem": lambda worker: worker.problem}
    return table_of(workers, {**columns, **extra, **problem}, remark="problem")


def moves_table(moves: Sequence[pb.StreamMove]) -> Table:
    columns: Columns[pb.StreamMove] = {
        "request": lambda move: f"{move.request_id}[{move.batch_index}]",
        "sequence": lambda move: move.sequence_index,
        "from": lambda move: move.sender,
        "to": lambda move: move.receiver,
        "tokens": lambda move: move.tokens,
        "cost s": lambda move: f"{move.cost_seconds:.3f}",
        "gain s": lambda move: f"{move.gain_seconds:.3f}",
        "reason": lambda move: move.reason,
    }
    return table_of(moves, columns, remark="reason")


@dataclass(frozen=True, slots=True)
class LoadColumn:
    """A column of workers' loads, left out unless some worker has the figure."""

    heading: str
    is_used: Callable[[Load], object]
    cell: Callable[[Load], object]

    def of_worker(self, worker: pb.Worker) -> object:
        return self.cell(worker.load)


LOAD_COLUMNS = (
    LoadColumn(
        "LoRA\nslots",
        lambda load: load.adapter_slots,
        lambda load: (
            f"{load.adapter_slots - load.free_adapter_slots}/{load.adapter_slots}"
            if load.adapter_slots
            else "-"
        ),
    ),
    LoadColumn(
        "drafts\nheld",
        lambda load: load.draft_tokens,
        lambda load: (
            f"{load.accepted_draft_tokens / load.draft_tokens:.0%}" if load.draft_tokens else "-"
        ),
    ),
    LoadColumn(
        "KV\nsent",
        lambda load: load.sent_handoffs.granted,
        lambda load: load.sent_handoffs.consumed,
    ),
    LoadColumn(
        "KV\nreceived",
        lambda load: load.received_handoffs.granted,
        lambda load: load.received_handoffs.consumed,
    ),
    LoadColumn(
        "leases",
        lambda load: load.sent_handoffs.granted or load.received_handoffs.granted,
        lambda load: load.sent_handoffs.held + load.received_handoffs.held,
    ),
    LoadColumn(
        "quarantined\nblocks",
        lambda load: load.quarantined_blocks,
        lambda load: load.quarantined_blocks,
    ),
)


def load_columns(workers: Iterable[pb.Worker]) -> Sequence[LoadColumn]:
    """Returns the columns with a figure for some worker."""
    loads = [worker.load for worker in workers]
    return [column for column in LOAD_COLUMNS if any(map(column.is_used, loads))]


def has_roles(workers: Iterable[pb.Worker]) -> bool:
    """Returns whether some worker is for a single phase."""
    return any(role_word(worker) in ("prefill", "decode") for worker in workers)


def role_word(worker: pb.Worker) -> str:
    """Returns the present role; before the first report, the configured role."""
    return enum_word(WorkerRole, worker.load.role or worker.engine.role)


def tokenizers_table(tokenizers: Iterable[pb.TokenizerReplica]) -> Table:
    columns: Columns[pb.TokenizerReplica] = {
        "tokenizer": lambda replica: replica.address,
        "state": lambda replica: state_word(replica.state),
        "model": lambda replica: replica.model,
        "sequences": lambda replica: replica.sequences,
        "problem": lambda replica: replica.problem,
    }
    return table_of(tokenizers, columns, remark="problem")


def requests_table(requests: Iterable[pb.LiveRequest]) -> Table:
    columns: Columns[pb.LiveRequest] = {
        "request": lambda request: request.request_id,
        "owner": lambda request: request.owner,
        "model": lambda request: request.model,
        "age s": lambda request: f"{request.age_ms / 1000:.1f}",
        "items": lambda request: len(request.items),
        "stages": stage_words,
        "workers": lambda request: ", ".join(sorted({i.worker for i in request.items if i.worker})),
        "new\ntokens": generated_tokens,
        "unread": lambda request: request.waiting_tokens,
    }
    return table_of(requests, columns)


def generated_tokens(request: pb.LiveRequest) -> int:
    return sum(item.generated_tokens for item in request.items)


def stage_words(request: pb.LiveRequest) -> str:
    """Counts the items by stage: `1 encode, 3 generate`."""
    stages = Counter(item.stage for item in request.items)
    return ", ".join(f"{count} {stage}" for stage, count in stages.items())


def items_table(request: pb.LiveRequest) -> Table:
    """Has a row per sequence, and a row per item without sequences."""
    table = new_table(
        "item", "stage", "prompt\ntokens", "sequence", "worker", "new\ntokens", "sent", "state"
    )
    for item in request.items:
        known = (item.batch_index, item.stage, item.prompt_tokens)
        if not item.sequences:
            add_row(table, *known, "", item.worker, item.generated_tokens, "", "")
        for sequence in item.sequences:
            add_row(
                table,
                *known,
                sequence.sequence_index,
                sequence.worker,
                sequence.generated_tokens,
                sequence.next_token_offset,
                _sequence_state(sequence),
            )
    return table


def _sequence_state(sequence: pb.LiveSequence) -> str:
    if sequence.reason:
        return f"ended: {enum_word(FinishReason, sequence.reason)}"
    state = "running" if sequence.worker else "waits for a worker"
    if sequence.queued:
        state = "waits at its worker"
    return f"{state}, moved" if sequence.moved else state


def handoffs_table(handoffs: Iterable[pb.Handoff]) -> Table:
    columns: Columns[pb.Handoff] = {
        "lease": lambda handoff: handoff.lease_id[:LEASE_DIGITS],
        "request": lambda handoff: handoff.request_id,
        "item": lambda handoff: handoff.batch_index,
        "sequence": lambda handoff: handoff.sequence_index,
        "cause": lambda handoff: handoff.cause,
        "stage": lambda handoff: handoff.stage,
        "sender": lambda handoff: handoff.sender,
        "receiver": lambda handoff: handoff.receiver,
        "transport": lambda handoff: handoff.transport,
        "tokens": lambda handoff: handoff.tokens,
        "present": lambda handoff: handoff.present_tokens,
        "age ms": lambda handoff: handoff.age_ms,
        "expires\nin ms": lambda handoff: handoff.expires_in_ms,
    }
    return table_of(handoffs, columns)


def candidates_table(placement: pb.Placement) -> Table:
    """Has the workers of a placement, for an item with an adapter also place and loading time of the adapter."""
    columns: Columns[pb.PlacementCandidate] = {
        "worker": lambda each: each.worker,
        "score": lambda each: "" if each.excluded_by else f"{each.score:.4g}",
        "cached\ntokens": lambda each: each.cached_tokens,
        "sequences": lambda each: each.sequences,
        "wait ms": lambda each: f"{each.wait_seconds * 1000:.1f}",
        "prefill\nms/token": lambda each: f"{each.prefill_seconds * 1000:.3g}",
        "step ms": lambda each: f"{each.step_seconds * 1000:.3g}",
    }
    adapter: Columns[pb.PlacementCandidate] = {
        "adapter": lambda each: enum_word(AdapterPlace, each.adapter_place),
        "adapter\nms": lambda each: f"{each.adapter_seconds * 1000:.3g}",
    }
    excluded: Columns[pb.PlacementCandidate] = {"excluded by": lambda each: each.excluded_by}
    drafts: Columns[pb.PlacementCandidate] = {
        "tokens\n/step": lambda each: f"{each.tokens_per_step:.2f}"
    }
    drafting = any(each.tokens_per_step > 1 for each in placement.candidates)
    shown = {
        **columns,
        **(drafts if drafting else {}),
        **(adapter if placement.adapter else {}),
        **excluded,
    }
    return table_of(placement.candidates, shown, remark="excluded by")


def adapters_table(adapters: Iterable[pb.Adapter]) -> Table:
    """Has a row per version, the current version first."""
    table = new_table(
        "adapter", "number", "version", "size", "rank", "workers", "share", "pinned", remark="error"
    )
    for adapter in adapters:
        for version in adapter.versions:
            is_current = version.version == adapter.version
            add_row(
                table,
                adapter.name,
                adapter.id,
                short_version(version.version),
                size_word(version.size_bytes),
                version.rank or "?",
                len({each.worker for each in version.residencies}),
                f"{version.share:.0%}",
                "yes" if adapter.pinned else "",
                version.error.message or (_refusal(adapter) if is_current else ""),
            )
    return table


def _refusal(adapter: pb.Adapter) -> str:
    """Why the latest version is not current, or ''."""
    if not adapter.refused_version:
        return ""
    version = short_version(adapter.refused_version)
    return f"version {version} was refused: {adapter.refusal.message}"


def adapter_versions_table(adapter: pb.Adapter) -> Table:
    columns: Columns[pb.AdapterVersion] = {
        "version": lambda version: version.version,
        "format": lambda version: enum_word(AdapterFormat, version.format),
        "size": lambda version: size_word(version.size_bytes),
        "rank": lambda version: version.rank or "?",
        "share": lambda version: f"{version.share:.0%}",
        "items": lambda version: version.items,
        "hits": lambda version: version.hits,
        "loads": lambda version: version.loads,
        "evictions": lambda version: version.evictions,
        "source": lambda version: version.source or "uploaded",
        "error": lambda version: version.error.message,
    }
    return table_of(adapter.versions, columns, remark="error")


def residencies_table(adapter: pb.Adapter) -> Table:
    """Has a row per worker and version."""
    table = new_table("version", "worker", "place", "sequences", "pinned")
    for version in adapter.versions:
        for each in version.residencies:
            add_row(
                table,
                short_version(version.version),
                each.worker,
                enum_word(AdapterPlace, each.place),
                each.sequences,
                "yes" if each.pinned else "",
            )
    return table


def short_version(version: str) -> str:
    """Returns the first digits, unique enough, as for commits."""
    return version[:12]


def size_word(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def table_of(rows: Iterable[R], columns: Columns[R], remark: str = "") -> Table:
    """Makes a table with a row for each of `rows`; `remark` names the last column if foldable."""
    table = new_table(*(heading for heading in columns if heading != remark), remark=remark)
    for row in rows:
        add_row(table, *(cell(row) for cell in columns.values()))
    return table


def new_table(*headings: str, remark: str = "") -> Table:
    """A table for `fitted`. Names and addresses are there to be copied: no cell is shortened, and only a `remark`, the
    last column, folds."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    if remark:
        table.add_column(remark, overflow="fold")
    return table


def add_row(table: Table, *cells: object) -> None:
    """Adds a row. Names come from clients and workers: cells are cut and escaped, and show markup verbatim."""
    table.add_row(*(Text(escaped(cut(str(cell), MAX_CELL_CHARACTERS))) for cell in cells))


def fitted(table: Table, console: Console, spare: Sequence[str] = ()) -> Table:
    """Makes the table as wide as the cells, without an empty column of remarks. On a narrow terminal remarks fold
    first, then the columns `spare` are left out in turn, then lines run on; in a pipe a row is a line."""
    remarks = table.columns[-1]
    folds = not remarks.no_wrap
    widest = max((cell_len(str(cell)) for cell in remarks.cells), default=0)
    if folds and not widest:
        table.columns.pop()
    folding = max(0, widest - LEAST_REMARK_WIDTH) if folds else 0
    for heading in spare if console.is_terminal else ():
        if _whole_width(table, console) - folding <= console.width:
            break
        table.columns = [each for each in table.columns if each.header != heading]
    table.width = _whole_width(table, console)
    if console.is_terminal:
        table.width = min(table.width, max(console.width, table.width - folding))
    return table


def _whole_width(table: Table, console: Console) -> int:
    """Returns the greatest width of a line."""
    unbound = console.options.update(max_width=sys.maxsize)
    return Measurement.get(console, unbound, table).maximum


def print_tables(*tables: Table) -> None:
    console = Console()
    for table in tables:
        console.print(fitted(table, console), soft_wrap=True)


def worker_state(worker: pb.Worker) -> str:
    """Describes the state of a worker, and of the breaker unless closed."""
    state = state_word(worker.state)
    if worker.breaker in (pb.BREAKER_STATE_UNSPECIFIED, pb.BREAKER_STATE_CLOSED):
        return state
    return f"{state}, breaker {enum_word(pb.BreakerState, worker.breaker)}"


def state_word(state: int) -> str:
    return enum_word(pb.WorkerState, state)


def enum_word(enum: Any, value: int) -> str:
    """Shortens WORKER_STATE_READY to `ready`; returns an unknown value as a number."""
    if value not in enum.values():
        return str(value)
    prefix = "".join(f"_{char}" if char.isupper() else char for char in enum.DESCRIPTOR.name)
    return str(enum.Name(value)).removeprefix(f"{prefix.lstrip('_').upper()}_").lower()
