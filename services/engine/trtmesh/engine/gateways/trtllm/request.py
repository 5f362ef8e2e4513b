"""Parses a GenerateRequest of TrtllmService into a SubmitCommand and the required content of answers.

Every field has an effect or is refused by name; a test walks the message. Limits of values stay in `parsing` and
`admission`; `contract_name` gives the contract's names to errors.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from smg_grpc_proto.generated import trtllm_service_pb2 as tpb
from trtmesh.chassis.errors import AdapterNotFound, InvalidField, UnsupportedField
from trtmesh.chassis.parsing import MAX_STOP_TEXT_CHARACTERS, MAX_WORD_LENGTH, MAX_WORDS
from trtmesh.engine.backend import BackendInfo
from trtmesh.engine.gateways.trtllm.texts import Texts
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1.generation_fields import LIMITS, NEGATIVE_IS_UNSET

MAX_REQUEST_ID_CHARACTERS = 256
MOST_LOGPROBS = int(LIMITS["output.top_log_probs"][1])
LOGPROB_BYTES = 24
"""Most bytes of a log-probability in an answer."""

SAMPLING = {
    **{
        name: f"sampling.{name}"
        for name in tpb.SamplingConfig.DESCRIPTOR.fields_by_name
        if name in pb.SamplingConfig.DESCRIPTOR.fields_by_name and name != "num_return_sequences"
    },
    "top_p_reset_ids": "sampling.top_p_reset_id",
    "min_tokens": "stopping.min_tokens",
    "beam_search_diversity_rate": "beam_search.diversity_rate",
    "length_penalty": "beam_search.length_penalty",
}
"""Fields of SamplingConfig with a single counterpart, most of the same name."""

EARLY_STOPPING = {
    0: pb.EARLY_STOPPING_HEURISTIC,
    1: pb.EARLY_STOPPING_FIRST_COMPLETE,
    2: pb.EARLY_STOPPING_EXHAUSTIVE,
}
"""As in TensorRT-LLM's runtime."""

LOOKAHEAD = {
    "max_window_size": "lookahead.window_size",
    "max_ngram_size": "lookahead.ngram_size",
    "max_verification_set_size": "lookahead.verification_set_size",
}

_CONTRACT_NAMES = {
    **{path: f"sampling_config.{name}" for name, path in SAMPLING.items()},
    **{path: f"lookahead_config.{name}" for name, path in LOOKAHEAD.items()},
    "sampling.num_return_sequences": "sampling_config.num_return_sequences",
    "beam_search.beam_width": "sampling_config.beam_width",
    "beam_search.early_stopping": "sampling_config.early_stopping",
    "sampling.embedding_bias": "embedding_bias",
    "prompt": "tokenized.input_token_ids",
    "prompt.token_ids": "tokenized.input_token_ids",
    "stopping.max_tokens": "max_tokens",
    "stopping.stop_token_ids": "stop_token_ids",
    "stopping.bad_token_ids": "bad_token_ids",
    "stopping.ignore_end_id": "ignore_eos",
    "output.log_probs": "output_config.logprobs",
    "output.prompt_log_probs": "output_config.prompt_logprobs",
    "output.context_logits": "output_config.return_context_logits",
    "output.generation_logits": "output_config.return_generation_logits",
    "output.perf_metrics": "output_config.return_perf_metrics",
    "guided_decoding.guide_type": "guided_decoding.guide_type",
    "guided_decoding.guide": "guided_decoding.guide",
    "lora.id": "lora_config.task_id",
    "lora.version": "lora_config.task_id",
    "kv_cache.salt": "cache_salt_id",
}


def contract_name(path: str) -> str:
    """The contract's name of a field of ours."""
    return _CONTRACT_NAMES.get(path, path)


@dataclass(frozen=True, slots=True)
class AskedGeneration:
    """A call: the work of the engine, and the content of the answers."""

    command: epb.SubmitCommand
    """The item, with the first sequence at handle 0."""
    sequences: int
    streaming: bool
    revises: bool
    """Whether tokens may change until the end, as in a beam search; chunks only add tokens."""
    stop_texts: tuple[str, ...]
    min_tokens: int
    includes_stop: bool
    logprobs: int | None
    """Most alternatives of each token; None without log-probabilities."""
    prompt_logprobs: int | None
    logits_row_bytes: int
    arrival_time: float | None
    """Seconds of the Unix clock."""

    @property
    def request_id(self) -> str:
        return self.command.request_id


def parse_generate(
    request: tpb.GenerateRequest,
    info: BackendInfo,
    texts: Texts | None,
    adapters: Mapping[int, Sequence[str]],
    most_answer_bytes: int,
) -> AskedGeneration:
    """Raises InvalidField, UnsupportedField or AdapterNotFound. `adapters` has the versions in memory, by number."""
    _refuse_unknown(request)
    _refuse_unsupported(request)
    _check_request_id(request.request_id)
    command = epb.SubmitCommand(request_id=request.request_id)
    command.token_ids.extend(request.tokenized.input_token_ids)
    config = command.config
    if not request.max_tokens:
        raise InvalidField("is 0 but must be at least 1", field="max_tokens")
    config.stopping.max_tokens = request.max_tokens
    _take_sampling(request.sampling_config, config)
    _take_stops(request, config, texts)
    _take_output(request.output_config, config)
    _take_lora(request.lora_config.task_id, config, info, adapters)
    _take_others(request, config)
    beams = config.beam_search.beam_width > 1
    sequences = config.sampling.num_return_sequences or max(1, config.beam_search.beam_width)
    if request.stop and beams:
        raise UnsupportedField(
            "is not supported with a beam search; leave it out, or send stop_token_ids",
            field="stop",
        )
    output = request.output_config
    asked = AskedGeneration(
        command=command,
        sequences=sequences,
        streaming=request.streaming,
        revises=beams,
        stop_texts=tuple(request.stop),
        min_tokens=config.stopping.min_tokens,
        includes_stop=request.include_stop_token_in_output,
        logprobs=max(1, output.logprobs) if output.HasField("logprobs") else None,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        logits_row_bytes=4 * info.vocabulary_size,
        arrival_time=request.arrival_time if request.HasField("arrival_time") else None,
    )
    _check_size(asked, request, info, most_answer_bytes)
    return asked


def _refuse_unknown(request: tpb.GenerateRequest) -> None:
    """Refuses fields of a newer contract."""
    known = tpb.GenerateRequest()
    known.CopyFrom(request)
    known.DiscardUnknownFields()  # type: ignore[attr-defined]  # the stubs lack it
    if known.ByteSize() != request.ByteSize():
        raise UnsupportedField(
            "has fields that this release does not know; is the client newer?", field="request"
        )


def _refuse_unsupported(request: tpb.GenerateRequest) -> None:
    refused = list(_unsupported(request))
    if refused:
        names = tuple(name for name, _ in refused)
        raise UnsupportedField(f"not supported: {refused[0][1]}; leave it out", fields=names)


def _unsupported(request: tpb.GenerateRequest) -> Iterator[tuple[str, str]]:
    """Fields for which the contract carries too little for any backend, with the reason."""
    if request.tokenized.query_token_ids:
        yield "tokenized.query_token_ids", "no backend has star attention"
    if request.sampling_config.beam_width_array:
        yield "sampling_config.beam_width_array", "a beam search has one width"
    if request.output_config.return_encoder_output:
        yield "output_config.return_encoder_output", "no backend returns the encoder's output"
    lora = request.lora_config
    if lora.HasField("weights"):
        yield "lora_config.weights", "the contract states no type and shape of the tensor"
    if lora.HasField("config_json"):
        yield "lora_config.config_json", "adapters are loaded through EngineService"
    if request.HasField("prompt_tuning_config"):
        yield "prompt_tuning_config", "the contract states no type and shape of the table"
    if request.HasField("multimodal_input"):
        yield "multimodal_input", "no backend reads images"
    if request.HasField("kv_cache_retention"):
        yield "kv_cache_retention", "the contract does not define its policies"
    asked = request.disaggregated_params
    whole = tpb.DisaggregatedParams.REQUEST_TYPE_CONTEXT_AND_GENERATION
    for name, used in (
        ("request_type", asked.request_type != whole),
        ("ctx_request_id", bool(asked.ctx_request_id)),
        ("context_phase_params", asked.HasField("context_phase_params")),
    ):
        if used:
            yield f"disaggregated_params.{name}", "an answer has no field for a handoff"


def _check_request_id(request_id: str) -> None:
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARACTERS or not request_id.isprintable():
        limit = f"printable and have 1 to {MAX_REQUEST_ID_CHARACTERS} characters"
        raise InvalidField.of("request_id", request_id, limit)


def _take_sampling(given: tpb.SamplingConfig, config: pb.GenerationConfig) -> None:
    for field, value in given.ListFields():
        if field.name in NEGATIVE_IS_UNSET and value < 0:
            # Clients say so that it is off.
            continue
        if field.name in SAMPLING:
            _put(config, SAMPLING[field.name], value, f"sampling_config.{field.name}")
    sampling = config.sampling
    if sampling.presence_penalty or sampling.frequency_penalty:
        # TensorRT-LLM counts the whole prompt by default.
        sampling.prompt_ignore_length = given.prompt_ignore_length
    # 0 is unset: the contract has no presence for these two.
    if given.beam_width not in (0, 1):
        _check_range("beam_search.beam_width", given.beam_width)
        config.beam_search.beam_width = given.beam_width
    if given.num_return_sequences:
        _check_range("sampling.num_return_sequences", given.num_return_sequences)
        config.sampling.num_return_sequences = given.num_return_sequences
    if given.HasField("early_stopping"):
        if given.early_stopping not in EARLY_STOPPING:
            limit = "0, 1 or 2"
            raise InvalidField.of("sampling_config.early_stopping", given.early_stopping, limit)
        config.beam_search.early_stopping = EARLY_STOPPING[given.early_stopping]
    if not given.HasField("seed"):
        config.sampling.seed = secrets.randbits(64)


def _check_range(path: str, value: int) -> None:
    """Checks a number of sequences before there is anything for each of them."""
    low, high = map(int, LIMITS[path])
    if not low <= value <= high:
        raise InvalidField.of(contract_name(path), value, f"in [{low}, {high}]")


def _put(message: Any, path: str, value: Any, name: str) -> None:
    """Sets a field by path. Raises InvalidField for a number outside the type, such as a negative number."""
    *parents, last = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    try:
        setattr(message, last, value)
    except ValueError:
        raise InvalidField.of(name, value, "at least 0") from None


def _take_stops(
    request: tpb.GenerateRequest, config: pb.GenerationConfig, texts: Texts | None
) -> None:
    stopping = config.stopping
    stopping.ignore_end_id = request.ignore_eos
    for token in request.stop_token_ids:
        stopping.stop_token_ids.add(ids=[token])
    for token in request.bad_token_ids:
        stopping.bad_token_ids.add(ids=[token])
    for name, words in (("stop", request.stop), ("bad", request.bad)):
        if not words:
            continue
        if texts is None:
            raise UnsupportedField(
                f"needs the tokenizer.json of the model in the worker's model directory; send {name}_token_ids",
                field=name,
            )
        _check_words(name, words)
    for word in request.bad:
        assert texts is not None
        for ids in texts.spell(word, "bad"):
            stopping.bad_token_ids.add(ids=ids)


def _check_words(name: str, words: Any) -> None:
    if len(words) > MAX_WORDS:
        raise InvalidField(
            f"has {len(words)} entries but must have at most {MAX_WORDS}", field=name
        )
    for word in words:
        if not 1 <= len(word) <= MAX_WORD_LENGTH:
            raise InvalidField(
                f"has an entry of length {len(word)} but each must have 1 to {MAX_WORD_LENGTH}",
                field=name,
            )
    characters = sum(map(len, words))
    if characters > MAX_STOP_TEXT_CHARACTERS:
        raise InvalidField(
            f"has {characters} characters together but must have at most {MAX_STOP_TEXT_CHARACTERS}",
            field=name,
        )


def _take_output(given: tpb.OutputConfig, config: pb.GenerationConfig) -> None:
    """`exclude_input_from_output` is always true: false means unset, and the contract's default is true."""
    output = config.output
    for name in ("logprobs", "prompt_logprobs"):
        if given.HasField(name):
            value = getattr(given, name)
            if not 0 <= value <= MOST_LOGPROBS:
                raise InvalidField.of(f"output_config.{name}", value, f"in [0, {MOST_LOGPROBS}]")
            output.top_log_probs = max(output.top_log_probs, value)
    if given.HasField("logprobs"):
        output.log_probs = True
        # Gateways send 0 for log-probabilities without alternatives, which engines take for none at all.
        output.top_log_probs = max(1, output.top_log_probs)
    output.prompt_log_probs = given.HasField("prompt_logprobs")
    output.context_logits = given.return_context_logits
    output.generation_logits = given.return_generation_logits
    output.perf_metrics = given.return_perf_metrics


def _take_lora(
    number: int,
    config: pb.GenerationConfig,
    info: BackendInfo,
    adapters: Mapping[int, Sequence[str]],
) -> None:
    # The contract's number of no adapter is 0.
    if not number:
        return
    _put(config, "lora.id", number, "lora_config.task_id")
    # Without support, the refusal of the field says so.
    if "lora.id" not in info.supported_fields:
        return
    versions = adapters.get(number, ())
    if not versions:
        raise AdapterNotFound(
            f"is {number}, an adapter that this worker does not hold; load it first",
            field="lora.id",
            value=str(number),
        )
    if len(versions) > 1:
        raise InvalidField(
            f"is {number}, of which the worker holds {len(versions)} versions, and the contract cannot name one;"
            " unload the others",
            field="lora.id",
            value=str(number),
        )
    (config.lora.version,) = versions


def _take_others(request: tpb.GenerateRequest, config: pb.GenerationConfig) -> None:
    config.sampling.embedding_bias.extend(request.embedding_bias)
    if request.HasField("guided_decoding"):
        guide_type = cast("pb.GuideType.ValueType", request.guided_decoding.guide_type)
        config.guided_decoding.guide_type = guide_type
        if request.guided_decoding.guide:
            config.guided_decoding.guide = request.guided_decoding.guide
    for field, value in request.lookahead_config.ListFields():
        _put(config, LOOKAHEAD[field.name], value, f"lookahead_config.{field.name}")
    if request.HasField("cache_salt_id"):
        config.kv_cache.salt = str(request.cache_salt_id)
    arrived = request.arrival_time
    # Also refuses NaN.
    if request.HasField("arrival_time") and not 0 <= arrived < 1e12:
        raise InvalidField.of("arrival_time", arrived, "seconds of the Unix clock")


def _check_size(
    asked: AskedGeneration,
    request: tpb.GenerateRequest,
    info: BackendInfo,
    most_answer_bytes: int,
) -> None:
    """Refuses data too large for the single message with everything of a sequence."""
    prompt = len(asked.command.token_ids)
    tokens = max(0, min(request.max_tokens, info.max_sequence_tokens - prompt))
    output = request.output_config
    parts = {
        "logprobs": tokens * LOGPROB_BYTES * (1 + (asked.logprobs or 0))
        if asked.logprobs is not None
        else 0,
        "prompt_logprobs": prompt * LOGPROB_BYTES * (1 + (asked.prompt_logprobs or 0))
        if asked.prompt_logprobs is not None
        else 0,
        "return_context_logits": prompt * asked.logits_row_bytes * output.return_context_logits,
        "return_generation_logits": tokens
        * asked.logits_row_bytes
        * output.return_generation_logits,
    }
    if sum(parts.values()) > most_answer_bytes:
        fields = tuple(f"output_config.{name}" for name, size in parts.items() if size)
        raise InvalidField(
            f"of {prompt} prompt tokens and up to {tokens} new ones may take {sum(parts.values())} bytes, but an answer"
            f" has room for {most_answer_bytes} (half of max_message_bytes); ask for fewer tokens or less of each",
            fields=fields,
            value=str(sum(parts.values())),
            limit=f"at most {most_answer_bytes} bytes",
        )
