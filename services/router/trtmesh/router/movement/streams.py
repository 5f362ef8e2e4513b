"""The fleet and its running streams as a plan sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.movement.planner import Site, Stream
from trtmesh.router.placement.rates import Typical
from trtmesh.router.requests.item import ItemRun
from trtmesh.router.streams.sequence import SequenceRun

LEAST_REMAINING = 16
"""Tokens that a stream is expected to have to come, however long it is already."""

MOST_STREAMS, MOST_OF_WORKER = 2048, 256
"""Streams of a model, and of a worker, that a plan looks at, so that it holds the event loop for milliseconds."""

STAY_SECONDS = 30.0
"""Time for which a stream that was moved stays where it is."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The workers of a model, and their streams by number."""

    sites: Sequence[Site]
    streams: Sequence[Stream]
    runs: Sequence[SequenceRun]

    @classmethod
    def of(cls, fleet: Fleet, model: str, only: str = "") -> Scene:
        """A model's workers with a sample of the streams of each, or of the `only` one by its address."""
        typical = fleet.typical(model)
        workers = [w for w in fleet.workers.values() if w.description.model == model and w.works]
        most = max(1, min(MOST_OF_WORKER, MOST_STREAMS // max(1, len(workers))))
        sites, streams, runs = list[Site](), list[Stream](), list[SequenceRun]()
        now = asyncio.get_running_loop().time()
        for worker in workers:
            step = -(-len(worker.sequences) // most) or 1
            sites.append(_site(worker, typical, step))
            if only in ("", worker.address):
                # Each look has others.
                for item, run in items_of(worker, int(1000 * now) % step, step):
                    streams.append(_stream(len(runs), worker, item, run, typical, now))
                    runs.append(run)
        return cls(sites, streams, runs)


def items_of(
    worker: Worker, start: int = 0, step: int = 1
) -> Iterator[tuple[ItemRun, SequenceRun]]:
    """The sequences of clients' items, or each `step`-th."""
    for run in islice(worker.sequences.values(), start, None, step):
        if isinstance(run, SequenceRun) and isinstance(run.owner, ItemRun) and not run.over:
            yield run.owner, run


def _site(worker: Worker, typical: Typical, stands_for: int) -> Site:
    guard, load, able = worker.guard, worker.load, worker.capabilities
    relative = guard.rates.relative_step(typical)
    base, one = typical.step_seconds(0), typical.step_seconds(1)
    return Site(
        address=worker.address,
        takes=worker.ready and not worker.mismatch and able.has_leases,
        sequences=guard.sequences,
        most_sequences=min(able.most_present, worker.description.max_batch_size or 2**31),
        used_blocks=guard.used_blocks,
        total_blocks=load.total_blocks,
        tokens_per_block=able.tokens_per_block,
        longest_sequence=able.longest_sequence,
        base_seconds=base * relative,
        sequence_seconds=max(0.0, one - base) * relative,
        rank_seconds=typical.rank_step_seconds * relative,
        prefill_seconds=typical.prefill_seconds * guard.rates.relative_prefill(typical),
        transfer_seconds=(able.kv.token_bytes if able.kv else 0) * guard.byte_seconds(typical),
        handoff_seconds=typical.handoff_seconds,
        kv=able.kv,
        kind=able.kind,
        held=worker.adapters.held,
        stands_for=stands_for,
    )


def _stream(
    number: int, worker: Worker, item: ItemRun, run: SequenceRun, typical: Typical, now: float
) -> Stream:
    need, generated = item.encoded.need, len(run.token_ids)
    expected = max(LEAST_REMAINING, round(typical.new_tokens) - generated)
    use = worker.adapters.in_use.get(need.key) if need else None
    return Stream(
        number=number,
        worker=worker.address,
        tokens=item.prompt_tokens + generated,
        remaining=min(expected, run.most_tokens - generated),
        adapter=need.key if need else None,
        rank=use.rank if use else 0,
        most_tokens=min(worker.capabilities.longest_sequence, item.prompt_tokens + run.most_tokens),
        item=id(item) if len(item.sequences) > 1 else None,
        shared_tokens=item.prompt_tokens,
        may_move=item.may_move(run) and now >= run.times.stays_until,
    )
