"""Every input tensor of the five models and the field of a GenerateItem that it sets.

`protos/trtmesh/v1/README.md` has the same table for readers. The inputs of a request are put in the order of these
lists, so one that needs another (a length its ids) stands behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.router.triton.tensors import InputTensor, TensorSpec
from trtmesh.router.triton.words import parse_words
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

Put = Callable[[router_pb.GenerateItem, InputTensor, int], None]
"""Puts one row of an input into the item of that row."""


@dataclass(frozen=True, slots=True)
class InputSpec(TensorSpec):
    """An input and where it goes; without `put` the door acts on it itself."""

    put: Put | None = None


def _set(message: Any, field: str, value: Any, tensor: InputTensor) -> None:
    try:
        setattr(message, field, value)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"input '{tensor.name}' is {value!r}: {error}") from error


def _at(item: router_pb.GenerateItem, path: str) -> tuple[Any, str]:
    """The message that holds the field `path` of the config, and the field's name."""
    *groups, name = path.split(".")
    message: Any = item.config
    for group in groups:
        message = getattr(message, group)
    return message, name


def value(path: str) -> Put:
    """One number or truth value."""

    def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        message, name = _at(item, path)
        _set(message, name, tensor.scalar(row), tensor)

    return put


def positive(path: str) -> Put:
    """One number that means nothing unless it is above 0."""

    def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        message, name = _at(item, path)
        if tensor.scalar(row) > 0:
            _set(message, name, tensor.scalar(row), tensor)

    return put


def values(path: str) -> Put:
    """Numbers of a repeated field."""

    def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        message, name = _at(item, path)
        try:
            getattr(message, name)[:] = tensor.row(row)
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"input '{tensor.name}': {error}") from error

    return put


def text(path: str) -> Put:
    """One text."""

    def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        message, name = _at(item, path)
        setattr(message, name, tensor.texts(row)[0])

    return put


def texts(path: str) -> Put:
    """Texts, of which empty ones mean none."""

    def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        message, name = _at(item, path)
        getattr(message, name)[:] = [word for word in tensor.texts(row) if word]

    return put


def words(path: str) -> Put:
    """Token id sequences, as ids and offsets."""

    def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        message, name = _at(item, path)
        for ids in parse_words(tensor, row):
            getattr(message, name).add(ids=ids)

    return put


def dense(path: str) -> Put:
    """A dense array."""

    def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        message, name = _at(item, path)
        getattr(message, name).CopyFrom(tensor.tensor(row))

    return put


def _prompt_text(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    item.prompt.text = tensor.texts(row)[0]


def _prompt_ids(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    try:
        item.prompt.token_ids.ids[:] = tensor.row(row)
        item.prompt.token_ids.SetInParent()
    except ValueError as error:
        raise InvalidRequest(f"input '{tensor.name}' holds an id below 0: {error}") from error


def _prompt_length(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    if item.prompt.HasField("token_ids"):
        # It is the length of encoder_input_features where these come instead.
        _trim(item.prompt.token_ids.ids, tensor, row)


def _trim(ids: Any, tensor: InputTensor, row: int) -> None:
    """Cuts the padding off a row."""
    length = tensor.scalar(row)
    if not 0 <= length <= len(ids):
        raise InvalidRequest(
            f"input '{tensor.name}' is {length} but must be in [0, {len(ids)}], the ids of its row"
        )
    del ids[length:]


def _decoder_ids(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    prompt = item.config.encoder_decoder.decoder_prompt
    try:
        prompt.token_ids.ids[:] = tensor.row(row)
    except ValueError as error:
        raise InvalidRequest(f"input '{tensor.name}' holds an id below 0: {error}") from error


def _decoder_length(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    _trim(item.config.encoder_decoder.decoder_prompt.token_ids.ids, tensor, row)


def _max_tokens(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    if tensor.scalar(row) < 1:
        raise InvalidRequest(f"{tensor.name} must be a single value > 0, not {tensor.scalar(row)}")
    item.config.stopping.max_tokens = tensor.scalar(row)


def _end_id(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    """-1 is the id that never comes."""
    if tensor.scalar(row) == -1:
        item.config.stopping.ignore_end_id = True
    else:
        _set(item.config.stopping, "end_id", tensor.scalar(row), tensor)


def _stop_texts(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    stopping = item.config.stopping
    stopping.stop_texts[:] = [word for word in tensor.texts(row) if word]
    if stopping.stop_texts:
        stopping.include_stop_text = True


def _early_stopping(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    given = int(tensor.scalar(row))
    if given not in (0, 1, 2):
        raise InvalidRequest(f"input '{tensor.name}' is {given} but must be 0, 1 or 2")
    item.config.beam_search.early_stopping = pb.EarlyStopping.ValueType(given + 1)


def _guide_type(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    given = tensor.texts(row)[0]
    known = {
        name.removeprefix("GUIDE_TYPE_").lower(): number
        for name, number in pb.GuideType.items()
        if number
    }
    if given not in known:
        raise InvalidRequest(
            f"input '{tensor.name}' is {given!r} but must be one of {', '.join(known)}"
        )
    item.config.guided_decoding.guide_type = known[given]


def _extra_ids(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    """One id a prompt token, or none; what stands behind belongs to the padding."""
    ids, tokens = tensor.row(row), len(item.prompt.token_ids.ids)
    if ids and len(ids) < tokens:
        raise InvalidRequest(
            f"input '{tensor.name}' has {len(ids)} ids but the prompt has {tokens}; give one for each"
        )
    item.config.prompt_tuning.extra_ids[:] = ids[:tokens]


def _state(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    item.config.handoff.state = tensor.row(row).tobytes()


def _range_starts(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    for start in tensor.row(row):
        _set(item.config.kv_cache.token_ranges.add(), "token_start", start, tensor)


def _range(field: str) -> Put:
    """A field of each retention range; -1 leaves it unset."""

    def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        ranges, given = item.config.kv_cache.token_ranges, tensor.row(row)
        if len(given) != len(ranges):
            raise InvalidRequest(
                f"input '{tensor.name}' has {len(given)} values but retention_token_range_starts has"
                f" {len(ranges)}; they must be equally many"
            )
        for retention, one in zip(ranges, given, strict=True):
            if one != -1:
                _set(retention, field, one, tensor)

    return put


def _duration(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    if tensor.scalar(row) != -1:
        _set(item.config.kv_cache, "decode_duration_ms", tensor.scalar(row), tensor)


def _image_pixels(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    item.config.multimodal.images.add(pixels=tensor.tensor(row))


def _image_urls(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    for url in tensor.texts(row):
        item.config.multimodal.images.add(url=url)


def _model_input(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    item.config.multimodal.model_inputs[tensor.name].CopyFrom(tensor.tensor(row))


ONE = (1,)
ANY = (-1,)
MATRIX = (-1, -1)


def _one(name: str, data_type: str, put: Put | None, *, optional: bool = True) -> InputSpec:
    """One value a row, which the model sees without its last dimension."""
    return InputSpec(name, (data_type,), ONE, optional, scalar=True, put=put)


def _list(
    name: str, data_type: str, dims: tuple[int, ...], put: Put | None, *, optional: bool = True
) -> InputSpec:
    return InputSpec(name, (data_type,), dims, optional, ragged=True, put=put)


def _sampling(prefix: str, length_penalty: str) -> tuple[InputSpec, ...]:
    return (
        _one("num_return_sequences", "INT32", value("sampling.num_return_sequences")),
        _one("beam_width", "INT32", value("beam_search.beam_width")),
        _one("end_id", "INT32", _end_id),
        _one("pad_id", "INT32", value("stopping.pad_id")),
        _one(prefix + "top_k", "INT32", value("sampling.top_k")),
        _one(prefix + "top_p", "FP32", positive("sampling.top_p")),
        _one("temperature", "FP32", value("sampling.temperature")),
        _one("repetition_penalty", "FP32", value("sampling.repetition_penalty")),
        _one("presence_penalty", "FP32", value("sampling.presence_penalty")),
        _one("frequency_penalty", "FP32", value("sampling.frequency_penalty")),
        _one(length_penalty, "FP32", value("beam_search.length_penalty")),
        InputSpec("early_stopping", ("INT32", "BOOL"), ONE, scalar=True, put=_early_stopping),
        _one("min_tokens", "INT32", value("stopping.min_tokens")),
        _one("seed", "UINT64", value("sampling.seed")),
        _one("return_log_probs", "BOOL", value("output.log_probs")),
        _one("return_context_logits", "BOOL", value("output.context_logits")),
        _one("return_generation_logits", "BOOL", value("output.generation_logits")),
        _one("return_perf_metrics", "BOOL", value("output.perf_metrics")),
        _one("return_num_input_tokens", "BOOL", None),
        _one("return_num_output_tokens", "BOOL", None),
        _one("exclude_input_in_output", "BOOL", value("output.exclude_prompt")),
        _one("stop", "BOOL", None),
        InputSpec(
            "prompt_embedding_table",
            ("FP16", "FP32", "BF16"),
            MATRIX,
            ragged=True,
            put=dense("prompt_tuning.embedding_table"),
        ),
        _one("prompt_vocab_size", "INT32", value("prompt_tuning.vocabulary_size")),
        _one("lora_task_id", "UINT64", value("lora.id")),
        InputSpec("lora_weights", ("FP16", "BF16"), MATRIX, ragged=True, put=dense("lora.weights")),
        _list("lora_config", "INT32", MATRIX, dense("lora.config")),
        _list("guided_decoding_guide_type", "BYTES", ONE, _guide_type),
        _list("guided_decoding_guide", "BYTES", ONE, text("guided_decoding.guide")),
    )


TEXT_INPUTS = (
    _list("text_input", "BYTES", ONE, _prompt_text, optional=False),
    _list("decoder_text_input", "BYTES", ONE, text("encoder_decoder.decoder_prompt.text")),
    _one("max_tokens", "INT32", _max_tokens, optional=False),
    _list("bad_words", "BYTES", ANY, texts("stopping.bad_texts")),
    _list("stop_words", "BYTES", ANY, _stop_texts),
    _one("stream", "BOOL", None),
    _list("embedding_bias_words", "BYTES", ANY, texts("sampling.embedding_bias_texts")),
    _list("embedding_bias_weights", "FP32", ANY, values("sampling.embedding_bias_weights")),
    _one("prompt_table_extra_id", "UINT64", values("prompt_tuning.extra_ids")),
    *_sampling("", "length_penalty"),
)
"""What `ensemble` takes."""

BLS_INPUTS = (
    *TEXT_INPUTS,
    _list("image_input", "FP16", (-1, 3, -1, -1), _image_pixels),
    _list("image_bytes_input", "UINT8", (-1, -1, -1, -1), _image_pixels),
    _list("image_url_input", "BYTES", ONE, _image_urls),
    _list("video_bytes_input", "UINT8", (-1, -1, -1, -1), dense("multimodal.video")),
    _one("num_draft_tokens", "INT32", value("draft.num_draft_tokens")),
    _one("use_draft_logits", "BOOL", value("draft.use_draft_logits")),
)
"""What `tensorrt_llm_bls` takes."""

TOKEN_INPUTS = (
    _list("input_ids", "INT32", ANY, _prompt_ids),
    _one("input_lengths", "INT32", _prompt_length, optional=False),
    _one("request_output_len", "INT32", _max_tokens, optional=False),
    InputSpec(
        "encoder_input_features",
        ("FP16", "FP32", "BF16"),
        MATRIX,
        ragged=True,
        put=dense("encoder_decoder.encoder_features"),
    ),
    _one("encoder_output_lengths", "INT32", value("encoder_decoder.encoder_output_length")),
    _list("decoder_input_ids", "INT32", ANY, _decoder_ids),
    _one("decoder_input_lengths", "INT32", _decoder_length),
    _list("draft_input_ids", "INT32", ANY, values("draft.token_ids")),
    InputSpec(
        "draft_logits", ("FP32", "FP16", "BF16"), MATRIX, ragged=True, put=dense("draft.logits")
    ),
    _one("draft_acceptance_threshold", "FP32", value("draft.acceptance_threshold")),
    _list("stop_words_list", "INT32", (2, -1), words("stopping.stop_token_ids")),
    _list("bad_words_list", "INT32", (2, -1), words("stopping.bad_token_ids")),
    _list("embedding_bias", "FP32", ANY, values("sampling.embedding_bias")),
    *_sampling("runtime_", "len_penalty"),
    _one("beam_search_diversity_rate", "FP32", value("beam_search.diversity_rate")),
    _one("runtime_top_p_min", "FP32", value("sampling.top_p_min")),
    # The name under which Triton's C++ backend reads the same number.
    _one("runtime_top_k_min", "FP32", value("sampling.top_p_min")),
    _one("runtime_top_p_decay", "FP32", value("sampling.top_p_decay")),
    _one("runtime_top_p_reset_ids", "INT32", value("sampling.top_p_reset_id")),
    _one("prompt_ignore_length", "INT32", value("sampling.prompt_ignore_length")),
    _one("no_repeat_ngram_size", "INT32", value("sampling.no_repeat_ngram_size")),
    _one("return_kv_cache_reuse_stats", "BOOL", value("output.perf_metrics")),
    _one("streaming", "BOOL", None),
    _list("prompt_table_extra_ids", "UINT64", ANY, _extra_ids),
    _list("cross_attention_mask", "BOOL", MATRIX, dense("encoder_decoder.cross_attention_mask")),
    _list("skip_cross_attn_blocks", "BOOL", ONE, value("encoder_decoder.skip_cross_attention")),
    _list("mrope_rotary_cos_sin", "FP32", ANY, dense("multimodal.mrope_rotary_cos_sin")),
    _list("mrope_position_deltas", "INT64", ONE, value("multimodal.mrope_position_delta")),
    InputSpec(
        "multimodal_embedding",
        ("FP16", "FP32", "BF16"),
        MATRIX,
        ragged=True,
        put=dense("multimodal.embedding"),
    ),
    _list("multimodal_hashes", "INT32", MATRIX, dense("multimodal.hashes")),
    _list("multimodal_item_runs", "INT32", MATRIX, dense("multimodal.item_runs")),
    _list("context_phase_params", "UINT8", ANY, _state),
    _list("retention_token_range_starts", "INT32", ANY, _range_starts),
    _list("retention_token_range_ends", "INT32", ANY, _range("token_end")),
    _list("retention_token_range_priorities", "INT32", ANY, _range("priority")),
    _list("retention_token_range_durations_ms", "INT32", ANY, _range("duration_ms")),
    _list("retention_decode_priority", "INT32", ONE, value("kv_cache.decode_priority")),
    _list("retention_decode_duration_ms", "INT32", ONE, _duration),
    _list("lookahead_window_size", "INT32", ONE, value("lookahead.window_size")),
    _list("lookahead_ngram_size", "INT32", ONE, value("lookahead.ngram_size")),
    _list(
        "lookahead_verification_set_size", "INT32", ONE, value("lookahead.verification_set_size")
    ),
)
"""What `tensorrt_llm` takes."""
