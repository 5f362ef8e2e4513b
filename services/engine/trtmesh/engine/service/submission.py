"""Parses a SubmitCommand into a valid Submission."""

from __future__ import annotations

from trtmesh.chassis.errors import Draining, InvalidField, UnsupportedField
from trtmesh.chassis.parsing import ELEMENT_BYTES, parse_config, refuse_unsupported
from trtmesh.chassis.revisions import SCHEMA_REVISION, refuse_unknown
from trtmesh.chassis.stopping import StopVocabulary
from trtmesh.chassis.vocabulary import Adapter, GenerationConfig
from trtmesh.engine.backend import Submission
from trtmesh.engine.handoff.lease import check_lease_id, lease_seconds
from trtmesh.engine.service.streams import LoadedEngine
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1.generation_fields import LIMITS

MAX_SEQUENCES = int(LIMITS["sampling.num_return_sequences"][1])
MAX_HANDLES = 16384
"""Most sequences of one router, unread ends included, and of all calls of gateways."""
LEASE_IDS = ("sender_lease_id", "receiver_lease_id")
ROUTERS_SEED = "sampling.seed"
"""Routers send a seed with every item, drawn unless named by the client. An item with a named seed is only placed on
workers with support for the field."""
LEASE_FIELDS = ("sender_lease_id", "receiver_lease_id", "lease_expires_in_ms")


def handles_of(command: epb.SubmitCommand) -> range:
    """The item's handles, even for an invalid config."""
    sampling, beam_width = command.config.sampling, command.config.beam_search.beam_width
    asked = max(1, sampling.num_return_sequences)
    if beam_width > 1 and not sampling.HasField("num_return_sequences"):
        asked = beam_width
    return range(command.handle, command.handle + min(asked, MAX_SEQUENCES))


def never_fits(sequences: int, most: int) -> InvalidField:
    """The error of an item with more sequences than its stream, or all calls, may ever have."""
    limit = f"at most {most}"
    return InvalidField.of("sampling.num_return_sequences", sequences, limit)


def adapter_of(config: GenerationConfig) -> Adapter | None:
    """The adapter of an item, by id and version."""
    lora = config.lora
    if lora is None or lora.id is None:
        return None
    return Adapter(lora.id, version=lora.version or "")


def parse_submit(
    command: epb.SubmitCommand,
    keys: tuple[int, ...],
    engine: LoadedEngine,
    revision: int = SCHEMA_REVISION,
) -> Submission:
    """`revision` is that of the sender. Raises InvalidField, UnsupportedField, NotUnderstood or Draining."""
    if engine.draining:
        raise Draining(f"worker {engine.name} is draining; use another worker")
    if revision > SCHEMA_REVISION:
        refuse_unknown(command, "submit", f"worker {engine.name}")
    who = f"the {engine.info.backend} backend of worker {engine.name}"
    config = parse_config(command.config)
    refuse_unsupported(config, engine.info.supported_fields | {ROUTERS_SEED}, who)
    _check_leases(command, config, engine, who)
    state = _parse_state(command, config, engine, who)
    _check(command, config, engine)
    own_draws = command.HasField("draw_index")
    return Submission(
        keys=keys,
        request_id=command.request_id,
        batch_index=command.draw_index if own_draws else command.batch_index,
        sequence_index=command.sequence_index,
        token_ids=list(command.token_ids),
        emitted_tokens=command.emitted_tokens,
        config=config,
        stop_vocabulary=_stop_vocabulary(command),
        sender_lease_id=command.sender_lease_id,
        receiver_lease_id=command.receiver_lease_id,
        handoff_state=state,
        end_ids=tuple(command.end_ids),
        is_prefill=engine.role == epb.WORKER_ROLE_PREFILL,
    )


def _check_leases(
    command: epb.SubmitCommand, config: GenerationConfig, engine: LoadedEngine, who: str
) -> None:
    leases = tuple(f"submit.{name}" for name in LEASE_FIELDS if getattr(command, name))
    if leases and engine.handoffs is None:
        raise UnsupportedField(f"not supported by {who}, which hands nothing over", fields=leases)
    if command.receiver_lease_id and engine.states:
        raise UnsupportedField(
            f"not supported by {who}, which hands over by states",
            fields=("submit.receiver_lease_id",),
        )
    if command.sender_lease_id and engine.states:
        _check_single(config, "submit.sender_lease_id")
    if command.sender_lease_id and command.receiver_lease_id:
        raise InvalidField(
            "are both set, but an item that has just been received stays; hand it over later",
            fields=leases[:2],
        )
    for name in LEASE_IDS:
        if value := getattr(command, name):
            check_lease_id(f"submit.{name}", value)
    if command.sender_lease_id:
        most = engine.description.max_lease_ms
        lease_seconds("submit.lease_expires_in_ms", command.lease_expires_in_ms, most)
    elif command.lease_expires_in_ms:
        raise InvalidField(
            "is set without the lease", field=leases[-1], limit_field="submit.sender_lease_id"
        )
    asked = config.handoff
    if asked and asked.phase == pb.GENERATION_PHASE_CONTEXT_ONLY and engine.states:
        raise InvalidField(
            f"is GENERATION_PHASE_CONTEXT_ONLY, but no client may bring a state to {who}",
            field="handoff.phase",
        )
    if asked and asked.phase == pb.GENERATION_PHASE_CONTEXT_ONLY and not command.sender_lease_id:
        raise InvalidField(
            "is GENERATION_PHASE_CONTEXT_ONLY without the lease for the other phase",
            field="handoff.phase",
            limit_field="submit.sender_lease_id",
        )


def _parse_state(
    command: epb.SubmitCommand, config: GenerationConfig, engine: LoadedEngine, who: str
) -> bytes:
    """The state of another worker's backend; empty without `handoff`."""
    if not command.HasField("handoff"):
        return b""
    field = "submit.handoff"
    if engine.states is None:
        raise UnsupportedField(f"not supported by {who}, which takes no states", fields=(field,))
    if command.sender_lease_id:
        raise InvalidField(
            "is set with a lease, but an item that has just been received stays",
            field=field,
            limit_field="submit.sender_lease_id",
        )
    if not command.emitted_tokens:
        raise InvalidField(
            "is set without the token that its sender chose last",
            field=field,
            limit_field="emitted_tokens",
        )
    _check_single(config, field)
    check_lease_id(f"{field}.lease_id", command.handoff.lease_id)
    return engine.states.own.state_of(command.handoff, adapter_of(config))


def _check_single(config: GenerationConfig, field: str) -> None:
    """Raises InvalidField for several sequences: a state belongs to a single sequence."""
    if config.sequences > 1:
        raise InvalidField(
            f"is set for an item of {config.sequences} sequences, but a state is that of one",
            field=field,
        )


def _check(command: epb.SubmitCommand, config: GenerationConfig, engine: LoadedEngine) -> None:
    if config.sampling.seed is None and not config.sampling.greedy:
        raise InvalidField(
            "is not set, but sampling needs one; draw one and send it", field="sampling.seed"
        )
    _check_logits(config, engine)
    most = engine.info.max_sequences_per_item
    for name, count in (
        ("beam_search.beam_width", config.beam_search.beam_width),
        ("sampling.num_return_sequences", config.sampling.num_return_sequences),
    ):
        if count > most:
            raise InvalidField.of(name, count, f"at most {most}, the worker's limit")
    if command.emitted_tokens > len(command.token_ids):
        limit = f"at most {len(command.token_ids)}, the number of token_ids"
        raise InvalidField.of("emitted_tokens", command.emitted_tokens, limit)
    if command.emitted_tokens and config.beam_search.beam_width > 1:
        raise InvalidField(
            f"is {command.emitted_tokens} for a beam search, but beams depend on each other; submit the prompt alone,"
            " and the search will find the same beams",
            field="emitted_tokens",
            limit_field="beam_search.beam_width",
        )
    if command.emitted_tokens and config.sequences > 1:
        raise InvalidField(
            f"is {command.emitted_tokens} for an item of {config.sequences} sequences, but each sequence has tokens of"
            " its own; submit them one by one",
            field="emitted_tokens",
            limit_field="sampling.num_return_sequences",
        )


def _check_logits(config: GenerationConfig, engine: LoadedEngine) -> None:
    """Refuses logits with rows too large for a message to the router."""
    for name in ("context_logits", "generation_logits"):
        if getattr(config.output, name):
            size = ELEMENT_BYTES[config.output.logits_data_type or pb.DATA_TYPE_FP32]
            row, most = engine.info.vocabulary_size * size, engine.settings.max_message_bytes // 2
            if row > most:
                raise InvalidField(
                    f"takes {row} bytes a token, but a message of worker {engine.name} has room for {most} (half of"
                    " max_message_bytes); leave it out or raise the limit",
                    field=f"output.{name}",
                    value=str(row),
                    limit=f"at most {most} bytes a token",
                )


def _stop_vocabulary(command: epb.SubmitCommand) -> StopVocabulary | None:
    if not command.HasField("stop_vocabulary"):
        return None
    given = command.stop_vocabulary
    if command.config.beam_search.beam_width <= 1:
        raise InvalidField(
            "is set without a beam search; send a stop command when a sequence reaches a stop text",
            field="stop_vocabulary",
            limit_field="beam_search.beam_width",
        )
    if len(given.token_ids) != len(given.token_texts):
        raise InvalidField(
            f"has {len(given.token_ids)} token_ids but {len(given.token_texts)} token_texts; they must be equally many",
            field="stop_vocabulary",
        )
    tokens = dict(zip(given.token_ids, given.token_texts, strict=True))
    texts = [text for text in given.stop_texts if text]
    return StopVocabulary(texts, tokens, given.textless_from) if texts else None
