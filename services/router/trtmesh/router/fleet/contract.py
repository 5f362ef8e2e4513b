"""The contract of a worker's reports. That of its steps is with the sequences, which know what may come next."""

from __future__ import annotations

from collections.abc import Mapping, Sized

from trtmesh.router.links.contract import ContractBroken, check_names, check_numbers
from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.v1 import engine_pb2 as pb

MOST_COUNTED = 2**53
"""Largest counter, and bytes: exact as a metric."""
MOST_SEQUENCES, MOST_BLOCKS, MOST_TOKENS = 2**20, 2**31, 2**40
MOST_LISTED = 4096
"""Most names in a description."""
MOST_ADAPTERS = 2**16
"""Most adapters in a worker's memory."""
LARGE_STEP_TOKENS = 2**14
"""Tokens of a step beyond which its counts are added up before they are read."""
MOST_UNASKED_TOKENS = 2**12
"""Most tokens of a sequence in a large step, if this router does not wait for it any more."""


def check_engine(engine: pb.GetEngineResponse) -> None:
    """Raises ContractBroken."""
    check_names(
        name=engine.worker,
        backend=engine.backend,
        model=engine.model,
        model_fingerprint=engine.model_fingerprint,
        tokenizer_fingerprint=engine.tokenizer_fingerprint,
        handoff_kind=engine.handoff_kind,
        instance=engine.instance,
    )
    lists: dict[str, Sized] = {
        "supported_fields": engine.supported_fields,
        "end_ids": engine.end_ids,
        "draft_methods": engine.draft_methods,
        "kv_shapes": engine.kv_shapes,
        "kv_transports": engine.kv_transports,
    }
    for field, listed in lists.items():
        if len(listed) > MOST_LISTED:
            raise ContractBroken(f"its {field} has {len(listed)} entries, more than {MOST_LISTED}")
    for name in (*engine.supported_fields, *engine.draft_methods):
        check_names(field=name)
    check_numbers(engine, MOST_SEQUENCES, "max_batch_size", "max_sequences_per_item")
    check_numbers(engine, MOST_BLOCKS, "tokens_per_block", "total_blocks")


def check_load(load: pb.Load) -> None:
    """Raises ContractBroken."""
    check_numbers(
        load,
        MOST_SEQUENCES,
        *("running_sequences", "waiting_sequences", "paused_sequences"),
        *("adapter_slots", "free_adapter_slots", "evictable_adapter_slots"),
    )
    check_numbers(
        load,
        MOST_BLOCKS,
        *("total_blocks", "used_blocks", "free_blocks", "host_blocks", "used_host_blocks"),
        "quarantined_blocks",
    )
    check_numbers(load, MOST_TOKENS, "pending_prompt_tokens", "receiving_tokens")
    check_numbers(
        load,
        MOST_COUNTED,
        *("step_count", "computed_prompt_tokens", "reused_prompt_tokens", "generated_tokens"),
        *("received_items", "preemptions", "new_blocks", "reused_blocks", "busy_seconds"),
        *("host_memory_bytes", "device_memory_bytes", "pinned_memory_bytes"),
        *("adapter_host_bytes", "used_adapter_host_bytes"),
        *("adapter_loads", "adapter_evictions", "adapter_hits"),
    )
    for counts in (load.sent_handoffs, load.received_handoffs):
        check_numbers(counts, MOST_COUNTED, *(f.name for f in counts.DESCRIPTOR.fields))


def check_states(states: pb.AdapterStates) -> None:
    """Raises ContractBroken."""
    if len(states.adapters) > MOST_ADAPTERS:
        raise ContractBroken(
            f"it reports {len(states.adapters)} adapters, more than {MOST_ADAPTERS}"
        )
    for state in states.adapters:
        check_names(adapter=state.name, version=state.version)


def check_step(step: pb.Step, sequences: Mapping[int, SequenceRun], most_tokens: int) -> None:
    """Raises ContractBroken unless the lists of a step fit each other, and a large one the sequences of a worker, which
    have at most `most_tokens`."""
    tokens = len(step.token_ids)
    lengths = {len(step.handles), len(step.token_offsets), len(step.token_counts)}
    if len(lengths) > 1 or sum(step.token_counts) != tokens:
        raise ContractBroken(
            f"a step has {len(step.handles)} handles, {len(step.token_offsets)} offsets,"
            f" {len(step.token_counts)} counts and {tokens} tokens"
        )
    if tokens > LARGE_STEP_TOKENS:
        for handle, count in zip(step.handles, step.token_counts, strict=True):
            run = sequences.get(handle)
            most = min(run.most_tokens, most_tokens) if run is not None else MOST_UNASKED_TOKENS
            if count > most:
                raise ContractBroken(f"a step has {count} tokens of a sequence of at most {most}")
