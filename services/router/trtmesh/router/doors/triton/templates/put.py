"""How one row of an input is put into the item of that row: a number, a text, a list, an array, or its own way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.router.doors.triton.tensors import InputTensor
from trtmesh.router.doors.triton.words import parse_words
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

PutRow = Callable[[router_pb.GenerateItem, InputTensor, int], None]
"""Puts one row of an input into the item of that row. Raises InvalidRequest."""


@dataclass(frozen=True, slots=True)
class Put:
    """A PutRow and the fields of the config that it may set, by which an error is traced back to the input."""

    put_row: PutRow
    fields: tuple[str, ...]

    def __call__(self, item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        self.put_row(item, tensor, row)


def sets(*fields: str) -> Callable[[PutRow], Put]:
    """Makes a Put of a function that sets these fields."""
    return lambda put_row: Put(put_row, fields)


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

    @sets(path)
    def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        message, name = _at(item, path)
        _set(message, name, tensor.scalar(row), tensor)

    return put


def positive(path: str) -> Put:
    """One number, or truth value, that asks for nothing unless it is above 0; so several may ask for the same."""

    @sets(path)
    def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        message, name = _at(item, path)
        if tensor.scalar(row) > 0:
            _set(message, name, tensor.scalar(row), tensor)

    return put


def values(path: str) -> Put:
    """Numbers of a repeated field."""

    @sets(path)
    def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        message, name = _at(item, path)
        try:
            getattr(message, name)[:] = tensor.row(row)
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"input '{tensor.name}': {error}") from error

    return put


def text(path: str) -> Put:
    """One text."""

    @sets(path)
    def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        message, name = _at(item, path)
        setattr(message, name, tensor.texts(row)[0])

    return put


def texts(path: str) -> Put:
    """Texts, of which empty ones mean none."""

    @sets(path)
    def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        message, name = _at(item, path)
        getattr(message, name)[:] = [word for word in tensor.texts(row) if word]

    return put


def weighted_texts(path: str) -> Put:
    """Texts that have a weight each; an empty one goes once all inputs are read, with its weight."""

    @sets(path)
    def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        message, name = _at(item, path)
        getattr(message, name)[:] = tensor.texts(row)

    return put


def words(path: str) -> Put:
    """Token id sequences, as ids and offsets."""

    @sets(path)
    def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        message, name = _at(item, path)
        for ids in parse_words(tensor, row):
            getattr(message, name).add(ids=ids)

    return put


def dense(path: str) -> Put:
    """A dense array."""

    @sets(path)
    def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        message, name = _at(item, path)
        getattr(message, name).CopyFrom(tensor.tensor(row))

    return put


@sets("prompt.text")
def prompt_text(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    item.prompt.text = tensor.texts(row)[0]


@sets("prompt.token_ids")
def prompt_ids(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    try:
        item.prompt.token_ids.ids[:] = tensor.row(row)
        item.prompt.token_ids.SetInParent()
    except ValueError as error:
        raise InvalidRequest(f"input '{tensor.name}' holds an id below 0: {error}") from error


@sets("prompt.token_ids")
def prompt_length(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
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


@sets("encoder_decoder.decoder_prompt.token_ids")
def decoder_ids(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    prompt = item.config.encoder_decoder.decoder_prompt
    try:
        prompt.token_ids.ids[:] = tensor.row(row)
    except ValueError as error:
        raise InvalidRequest(f"input '{tensor.name}' holds an id below 0: {error}") from error


@sets("encoder_decoder.decoder_prompt.token_ids")
def decoder_length(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    _trim(item.config.encoder_decoder.decoder_prompt.token_ids.ids, tensor, row)


@sets("stopping.max_tokens")
def max_tokens(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    if tensor.scalar(row) < 1:
        raise InvalidRequest(f"{tensor.name} must be a single value > 0, not {tensor.scalar(row)}")
    item.config.stopping.max_tokens = tensor.scalar(row)


@sets("stopping.end_id", "stopping.ignore_end_id")
def end_id(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    """-1 is the id that never comes."""
    if tensor.scalar(row) == -1:
        item.config.stopping.ignore_end_id = True
    else:
        _set(item.config.stopping, "end_id", tensor.scalar(row), tensor)


@sets("stopping.stop_texts", "stopping.include_stop_text")
def stop_texts(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    stopping = item.config.stopping
    stopping.stop_texts[:] = [word for word in tensor.texts(row) if word]
    if stopping.stop_texts:
        stopping.include_stop_text = True


@sets("beam_search.early_stopping")
def early_stopping(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    given = int(tensor.scalar(row))
    if given not in (0, 1, 2):
        raise InvalidRequest(f"input '{tensor.name}' is {given} but must be 0, 1 or 2")
    item.config.beam_search.early_stopping = pb.EarlyStopping.ValueType(given + 1)


@sets("guided_decoding.guide_type")
def guide_type(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
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


@sets("prompt_tuning.extra_ids")
def extra_ids(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    """One id a prompt token, or none; what stands behind belongs to the padding."""
    ids, tokens = tensor.row(row), len(item.prompt.token_ids.ids)
    if ids and len(ids) < tokens:
        raise InvalidRequest(
            f"input '{tensor.name}' has {len(ids)} ids but the prompt has {tokens}; give one for each"
        )
    item.config.prompt_tuning.extra_ids[:] = ids[:tokens]


@sets("handoff.state")
def state(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    item.config.handoff.state = tensor.row(row).tobytes()


@sets("kv_cache.token_ranges", "kv_cache.token_ranges.token_start")
def range_starts(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    for start in tensor.row(row):
        _set(item.config.kv_cache.token_ranges.add(), "token_start", start, tensor)


def range_field(field: str) -> Put:
    """A field of each retention range; -1 leaves it unset."""

    @sets(f"kv_cache.token_ranges.{field}")
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


@sets("kv_cache.decode_duration_ms")
def duration(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    if tensor.scalar(row) != -1:
        _set(item.config.kv_cache, "decode_duration_ms", tensor.scalar(row), tensor)


@sets("multimodal.images")
def image_pixels(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    item.config.multimodal.images.add(pixels=tensor.tensor(row))


@sets("multimodal.images")
def image_urls(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    for url in tensor.texts(row):
        item.config.multimodal.images.add(url=url)
