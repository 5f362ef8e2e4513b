"""What a router tells its admins, as tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table
from trtmesh.cli.output import printable
from trtmesh.v1 import router_admin_pb2 as pb
from trtmesh.v1.engine_pb2 import WorkerRole


def workers_table(workers: Iterable[pb.Worker]) -> Table:
    table = Table("worker", "address", "state", "model", "backend", "role", "items", "blocks used")
    table.add_column("problem", overflow="fold")
    for worker in workers:
        engine, load = worker.engine, worker.load
        add_row(
            table,
            worker.worker or "?",
            worker.address,
            state_word(worker.state),
            engine.model,
            engine.backend,
            enum_word(WorkerRole, engine.role),
            worker.items,
            f"{load.used_blocks}/{load.total_blocks}",
            worker.problem,
        )
    return table


def tokenizers_table(tokenizers: Iterable[pb.TokenizerReplica]) -> Table:
    table = Table("tokenizer", "state", "model", "sequences")
    table.add_column("problem", overflow="fold")
    for replica in tokenizers:
        add_row(
            table,
            replica.address,
            state_word(replica.state),
            replica.model,
            replica.sequences,
            replica.problem,
        )
    return table


def add_row(table: Table, *cells: object) -> None:
    """A row; names come from clients and workers, so nothing in them may command the terminal."""
    table.add_row(*(printable(str(cell)) for cell in cells))


def state_word(state: int) -> str:
    return enum_word(pb.WorkerState, state)


def enum_word(enum: Any, value: int) -> str:
    """WORKER_STATE_READY is `ready`; a value of a later version is its number."""
    if value not in enum.values():
        return str(value)
    return str(enum.Name(value)).rpartition("_")[2].lower()
