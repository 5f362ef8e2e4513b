"""Parses `generation_pb2.GenerationConfig` to `vocabulary.GenerationConfig` and checks all limits.

The parser is generic: messages and dataclasses have equal field names, and limits stand in the proto, so a new field
needs no code here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from trtmesh.chassis import vocabulary as v
from trtmesh.chassis.errors import InvalidField, UnsupportedField
from trtmesh.chassis.number_lists import ids_of, tuple_of
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1.generation_fields import LIMITS, MOST_CHARACTERS, MOST_ENTRIES, WORD_LISTS

DATACLASSES: dict[str, type] = {
    "Tensor": v.Tensor,
    "Prompt": v.Prompt,
    "GenerationConfig": v.GenerationConfig,
    "StoppingConfig": v.Stopping,
    "SamplingConfig": v.Sampling,
    "BeamSearchConfig": v.BeamSearch,
    "OutputConfig": v.Output,
    "LoraConfig": v.Lora,
    "PromptTuningConfig": v.PromptTuning,
    "DraftConfig": v.Draft,
    "LookaheadConfig": v.Lookahead,
    "GuidedDecodingConfig": v.GuidedDecoding,
    "TokenRangeRetention": v.TokenRangeRetention,
    "KvCacheConfig": v.KvCache,
    "EncoderDecoderConfig": v.EncoderDecoder,
    "Image": v.Image,
    "MultimodalConfig": v.Multimodal,
    "HandoffConfig": v.Handoff,
}

_DEFAULTS = {
    name: {field.name: field.default for field in fields(kind)}
    for name, kind in DATACLASSES.items()
}

RETURNED = "sampling.num_return_sequences"

REMEMBERED_GROUPS, GROUP_BYTES = 1024, 256
"""Parsed groups of fields kept, and the size of the largest: most items have those of the one before. Not `sampling`,
which has a seed of the item's own on its way to a worker."""

MAX_PROMPT_TOKENS = MOST_ENTRIES["prompt.token_ids"]
MAX_WORDS = MOST_ENTRIES["stopping.stop_texts"]
MAX_WORD_LENGTH = 4096
MAX_DIMENSIONS = 16
MAX_STOP_TEXT_CHARACTERS = 16_384
"""Limit for all stop texts together, which determine the time and memory of the automaton."""

ELEMENT_BYTES: Mapping[int, int] = {
    pb.DATA_TYPE_FP32: 4,
    pb.DATA_TYPE_FP16: 2,
    pb.DATA_TYPE_BF16: 2,
    pb.DATA_TYPE_INT32: 4,
    pb.DATA_TYPE_INT64: 8,
    pb.DATA_TYPE_UINT8: 1,
    pb.DATA_TYPE_BOOL: 1,
}

LOGITS_DATA_TYPES = frozenset({0, pb.DATA_TYPE_FP32, pb.DATA_TYPE_FP16, pb.DATA_TYPE_BF16})


def parse_config(message: pb.GenerationConfig) -> v.GenerationConfig:
    """Parses a config. Raises InvalidField."""
    paths: set[str] = set()
    values = _values(message, "", paths)
    has_beams = "beam_search" in values and values["beam_search"].beam_width > 1
    if has_beams and message.sampling.HasField("num_return_sequences"):
        # Beam search returns all beams by default, so 1 is not the default.
        paths.add("sampling.num_return_sequences")
    config = v.GenerationConfig(**values, fields_set=frozenset(paths))
    _check_combinations(config)
    return config


def parse_prompt(message: pb.Prompt) -> v.Prompt:
    """Parses a prompt, field by field, since each item has one. Raises InvalidField without text and token ids."""
    special = message.add_special_tokens if message.HasField("add_special_tokens") else True
    match message.WhichOneof("content"):
        case "text":
            return v.Prompt(text=message.text, add_special_tokens=special)
        case "token_ids":
            ids = message.token_ids.ids
            _check_count("prompt.token_ids", ids)
            return v.Prompt(token_ids=ids_of(ids), add_special_tokens=special)
    raise InvalidField("has neither text nor token_ids; set one of them", field="prompt")


def refuse_unsupported(config: v.GenerationConfig, supported: Iterable[str], who: str) -> None:
    """Raises UnsupportedField for set fields outside `supported`; `who` names the process."""
    unsupported = sorted(config.fields_set.difference(supported))
    if unsupported:
        raise UnsupportedField(
            f"not supported by {who}; leave it out or use another worker", fields=tuple(unsupported)
        )


def _message(message: Message, prefix: str, paths: set[str]) -> Any:
    """Converts `message` to its dataclass and adds the paths of non-default leaves to `paths`."""
    values = _values(message, prefix, paths)
    if isinstance(message, pb.Tensor):
        tensor = v.Tensor(**values)
        _check_tensor(prefix.rstrip("."), tensor)
        return tensor
    return DATACLASSES[message.DESCRIPTOR.name](**values)


def _values(message: Message, prefix: str, paths: set[str]) -> dict[str, Any]:
    """The set fields of `message`, converted.

    A field set to its default, such as a beam width of 1, needs no support by the backend.
    """
    defaults = _DEFAULTS[message.DESCRIPTOR.name]
    values = {}
    for field, value in message.ListFields():
        name = field.name
        path = prefix + name
        parsed = values[name] = _field(field, value, path, paths)
        if path in paths and parsed == defaults[name]:
            paths.discard(path)
    return values


def _field(field: FieldDescriptor, value: Any, path: str, paths: set[str]) -> Any:
    kind = field.message_type
    if kind is None:
        paths.add(path)
        if field.enum_type is not None:
            return _enum(field, path, value)
        return _scalars(path, value) if field.is_repeated else _scalar(path, value)
    if kind.has_options and kind.GetOptions().map_entry:
        paths.add(path)
        _check_count(path, value)
        return {name: _message(item, f"{path}.{name}.", set()) for name, item in value.items()}
    if field.is_repeated:
        paths.add(path)
        _check_count(path, value)
        return tuple(_nested(item, path, set()) for item in value)
    return _nested(value, path, paths)


def _nested(value: Message, path: str, paths: set[str]) -> Any:
    if isinstance(value, pb.TokenIds):
        paths.add(path)
        if path in WORD_LISTS:
            _check_word(path, value.ids)
        else:
            _check_count(path, value.ids)
        return tuple_of(value.ids)
    if isinstance(value, pb.Tensor):
        paths.add(path)
        return _message(value, f"{path}.", set())
    if "." in path or path == "sampling" or value.ByteSize() > GROUP_BYTES:
        return _message(value, f"{path}.", paths)
    parsed, found = _group(path, value.SerializeToString())
    paths |= found
    return parsed


@lru_cache(REMEMBERED_GROUPS)
def _group(name: str, serialized: bytes) -> tuple[Any, frozenset[str]]:
    """A group of a config, and the paths of its non-default leaves."""
    paths: set[str] = set()
    group: Message = getattr(pb.GenerationConfig(), name)
    group.ParseFromString(serialized)
    return _message(group, f"{name}.", paths), frozenset(paths)


def _enum(field: FieldDescriptor, path: str, value: int) -> int:
    # proto3 enums are open: unknown numbers arrive unchanged.
    if value not in field.enum_type.values_by_number:
        names = ", ".join(field.enum_type.values_by_name)
        raise InvalidField.of(path, value, f"one of {names}")
    return value


def _scalar(path: str, value: Any) -> Any:
    limits = LIMITS.get(path)
    if limits and not limits[0] <= value <= limits[1]:
        raise InvalidField.of(path, value, _range_text(*limits))
    most = MOST_CHARACTERS.get(path)
    if most is not None and len(value) > most:
        raise InvalidField.of(path, value, f"at most {most} characters")
    return value


def _scalars(path: str, values: Any) -> tuple[Any, ...]:
    if path.endswith(".shape") and len(values) > MAX_DIMENSIONS:
        raise InvalidField(
            f"has {len(values)} dimensions but must have at most {MAX_DIMENSIONS}", field=path
        )
    _check_count(path, values)
    given: tuple[Any, ...] = tuple_of(values)
    if path in WORD_LISTS:
        for word in given:
            _check_word(path, word)
    if path in LIMITS:
        # Up to one value per vocabulary entry: no call for each value.
        low, high = LIMITS[path]
        for value in given:
            if not low <= value <= high:
                raise InvalidField.of(path, value, _range_text(low, high))
    return given


def _check_count(path: str, values: Any) -> None:
    most = MOST_ENTRIES.get(path)
    if most is not None and len(values) > most:
        raise InvalidField(f"has {len(values)} entries but must have at most {most}", field=path)


def _check_word(path: str, word: Any) -> None:
    if not 1 <= len(word) <= MAX_WORD_LENGTH:
        raise InvalidField(
            f"has an entry of length {len(word)} but each must have 1 to {MAX_WORD_LENGTH}",
            field=path,
        )


def _range_text(low: float, high: float) -> str:
    if low == -math.inf:
        return "a number below infinity"
    if low == math.ulp(0.0):
        return f"above 0 and at most {high:g}"
    return f"in [{_number_text(low)}, {_number_text(high)}]"


def _number_text(value: float) -> str:
    """All digits of an integer."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _check_tensor(path: str, tensor: v.Tensor) -> None:
    size = ELEMENT_BYTES.get(tensor.data_type)
    if size is None:
        raise InvalidField.of(f"{path}.data_type", tensor.data_type, "a DataType other than 0")
    expected = math.prod(tensor.shape) * size
    if len(tensor.data) != expected:
        raise InvalidField(
            f"has {len(tensor.data)} bytes of data but shape {tensor.shape} needs {expected}",
            field=path,
        )


def _check_combinations(config: v.GenerationConfig) -> None:
    stopping = config.stopping
    characters = sum(map(len, stopping.stop_texts))
    if characters > MAX_STOP_TEXT_CHARACTERS:
        raise InvalidField(
            f"has {characters} characters together but must have at most {MAX_STOP_TEXT_CHARACTERS}",
            field="stopping.stop_texts",
        )
    if config.output.logits_data_type not in LOGITS_DATA_TYPES:
        name = pb.DataType.Name(pb.DataType.ValueType(config.output.logits_data_type))
        limit = "DATA_TYPE_FP32, DATA_TYPE_FP16 or DATA_TYPE_BF16"
        raise InvalidField.of("output.logits_data_type", name, limit)
    if stopping.ignore_end_id and stopping.end_id is not None:
        fields = ("stopping.end_id", "stopping.ignore_end_id")
        raise InvalidField("exclude each other; set one of them", fields=fields)
    window = config.lookahead
    if window and None in (window.window_size, window.ngram_size, window.verification_set_size):
        needed = "needs window_size, ngram_size and verification_set_size"
        raise InvalidField(needed, field="lookahead")
    _check_counts(config)
    _check_bias(config.sampling)
    if config.handoff is not None:
        _check_handoff(config.handoff)


def _check_handoff(handoff: v.Handoff) -> None:
    continues = handoff.phase == pb.GENERATION_PHASE_GENERATION_ONLY
    if continues and handoff.state is None:
        raise InvalidField(
            "is missing: generation only continues from the state of a context_only item",
            field="handoff.state",
            limit_field="handoff.phase",
        )
    if handoff.state is not None and not continues:
        raise InvalidField(
            "needs the phase GENERATION_PHASE_GENERATION_ONLY",
            field="handoff.state",
            limit_field="handoff.phase",
        )


def _check_counts(config: v.GenerationConfig) -> None:
    sampling, width = config.sampling, config.beam_search.beam_width
    if 1 < width < sampling.num_return_sequences:
        returned = sampling.num_return_sequences
        raise InvalidField.of(RETURNED, returned, f"at most {width}", "beam_search.beam_width")
    if sampling.best_of is not None and sampling.best_of < sampling.num_return_sequences:
        limit = f"at least {sampling.num_return_sequences}"
        raise InvalidField.of("sampling.best_of", sampling.best_of, limit, RETURNED)


def _check_bias(sampling: v.Sampling) -> None:
    texts, lists = len(sampling.embedding_bias_texts), len(sampling.embedding_bias_token_ids)
    weights = len(sampling.embedding_bias_weights)
    if texts + lists != weights:
        counts = {"texts": texts} if texts or not lists else {}
        counts |= {"token_ids": lists} if lists else {}
        *first, last = map(str, [*counts.values(), weights])
        raise InvalidField(
            f"have {', '.join(first)} and {last} entries but need a weight for each",
            fields=tuple(f"sampling.embedding_bias_{kind}" for kind in (*counts, "weights")),
        )
