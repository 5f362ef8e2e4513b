"""Setters: each sets a field of an item from a row of an input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trtmesh.chassis.errors import InvalidRequest, UnsupportedField
from trtmesh.chassis.number_lists import fill
from trtmesh.chassis.parsing import MAX_WORD_LENGTH, MAX_WORDS
from trtmesh.router.doors.triton.tensors import InputTensor
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb
from trtmesh.v1.generation_fields import MOST_ENTRIES, WORD_LISTS

PutRow = Callable[[router_pb.GenerateItem, InputTensor, int], None]
"""Puts a row of an input into an item. Raises InvalidRequest."""
MOST_WORD_IDS = MAX_WORDS * MAX_WORD_LENGTH
PAD_OFFSET = -1
"""Fills a row of offsets in a word list."""


@dataclass(frozen=True, slots=True)
class Put:
    """A PutRow with its fields, which lead from an error back to the input."""

    put_row: PutRow
    fields: tuple[str, ...]
    most: int | None = None
    """Most elements of a row, for `read_call` to refuse before it copies them."""


def sets(*fields: str) -> Callable[[PutRow], Put]:
    """Declares the fields of a PutRow."""
    return lambda put_row: Put(put_row, fields)


def _set(message: Any, field: str, value: Any, tensor: InputTensor) -> None:
    try:
        setattr(message, field, value)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(
            f"is {value!r}: {error}", field=tensor.name, value=repr(value)
        ) from error


def _of_field(assign: Callable[[Any, str, InputTensor, int], None]) -> Callable[[str], Put]:
    """Makes setters of a way to assign: `assign` gets the parent message and the name of the field at a path."""

    def setter(path: str) -> Put:
        *groups, name = path.split(".")
        most = None if path in WORD_LISTS else MOST_ENTRIES.get(path)

        def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
            message: Any = item if groups[0] == "prompt" else item.config
            for group in groups:
                message = getattr(message, group)
            assign(message, name, tensor, row)

        return Put(put, (path,), most)

    return setter


@_of_field
def value(message: Any, name: str, tensor: InputTensor, row: int) -> None:
    """A number or a boolean."""
    _set(message, name, tensor.scalar(row), tensor)


@_of_field
def positive(message: Any, name: str, tensor: InputTensor, row: int) -> None:
    """A number or boolean, ignored unless above 0: so several inputs may share a field."""
    if tensor.scalar(row) > 0:
        _set(message, name, tensor.scalar(row), tensor)


@_of_field
def unless_negative(message: Any, name: str, tensor: InputTensor, row: int) -> None:
    """A number, switched off by clients with a value below 0."""
    if tensor.scalar(row) >= 0:
        _set(message, name, tensor.scalar(row), tensor)


@_of_field
def values(message: Any, name: str, tensor: InputTensor, row: int) -> None:
    """Numbers of a repeated field."""
    try:
        fill(getattr(message, name), tensor.row(row))
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"cannot be set: {error}", field=tensor.name) from error


@_of_field
def text(message: Any, name: str, tensor: InputTensor, row: int) -> None:
    setattr(message, name, tensor.texts(row)[0])


@_of_field
def texts(message: Any, name: str, tensor: InputTensor, row: int) -> None:
    """Texts without the empty ones."""
    getattr(message, name)[:] = [word for word in tensor.texts(row) if word]


@_of_field
def weighted_texts(message: Any, name: str, tensor: InputTensor, row: int) -> None:
    """Texts with weights. Empty texts stay until their weights are there too."""
    getattr(message, name)[:] = tensor.texts(row)


@_of_field
def words(message: Any, name: str, tensor: InputTensor, row: int) -> None:
    """Token id sequences."""
    for ids in parse_words(tensor, row):
        getattr(message, name).add(ids=ids)


@_of_field
def dense(message: Any, name: str, tensor: InputTensor, row: int) -> None:
    getattr(message, name).CopyFrom(tensor.tensor(row))


@_of_field
def ids(message: Any, name: str, tensor: InputTensor, row: int) -> None:
    """The token ids of a prompt, present even if empty."""
    try:
        ids = getattr(message, name)
        # Present even if empty.
        ids.SetInParent()
        fill(ids.ids, tensor.row(row))
    except ValueError as error:
        raise InvalidRequest(f"holds an id below 0: {error}", field=tensor.name) from error


@sets("prompt.token_ids")
def prompt_length(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    if item.prompt.HasField("token_ids"):
        # Without ids, the length is that of encoder_input_features.
        _trim(item.prompt.token_ids.ids, tensor, row)


def _trim(ids: Any, tensor: InputTensor, row: int) -> None:
    """Cuts the padding off a row."""
    length = tensor.scalar(row)
    if not 0 <= length <= len(ids):
        raise InvalidRequest(
            field=tensor.name, value=str(length), limit=f"in [0, {len(ids)}], the ids of its row"
        )
    del ids[length:]


@sets("encoder_decoder.decoder_prompt.token_ids")
def decoder_length(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    _trim(item.config.encoder_decoder.decoder_prompt.token_ids.ids, tensor, row)


@sets("stopping.max_tokens")
def max_tokens(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    given = tensor.scalar(row)
    if given < 1:
        raise InvalidRequest(
            f"must be a single value > 0, not {given}",
            field=tensor.name,
            value=str(given),
            limit="> 0",
        )
    item.config.stopping.max_tokens = given


@sets("stopping.end_id", "stopping.ignore_end_id")
def end_id(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    """-1 is an id that no model generates."""
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
        raise InvalidRequest(field=tensor.name, value=str(given), limit="0, 1 or 2")
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
            field=tensor.name, value=repr(given), limit=f"one of {', '.join(known)}"
        )
    item.config.guided_decoding.guide_type = known[given]


@sets("prompt_tuning.extra_ids")
def extra_ids(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    """An id for each prompt token, or none; the rest is padding."""
    ids, tokens = tensor.row(row), len(item.prompt.token_ids.ids)
    if ids and len(ids) < tokens:
        raise InvalidRequest(
            f"has {len(ids)} ids but the prompt has {tokens}; give one for each", field=tensor.name
        )
    fill(item.config.prompt_tuning.extra_ids, ids[:tokens])


@sets("handoff.state")
def state(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    item.config.handoff.state = tensor.row(row).tobytes()


@sets("kv_cache.token_ranges", "kv_cache.token_ranges.token_start")
def range_starts(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    most = MOST_ENTRIES["kv_cache.token_ranges"]
    if tensor.row_length > most:
        raise InvalidRequest(
            f"has {tensor.row_length} ranges but must have at most {most}",
            field=tensor.name,
        )
    for start in tensor.row(row):
        _set(item.config.kv_cache.token_ranges.add(), "token_start", start, tensor)


def range_field(field: str) -> Put:
    """A field of each retention range; -1 leaves it unset."""

    @sets(f"kv_cache.token_ranges.{field}")
    def put(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
        ranges, given = item.config.kv_cache.token_ranges, tensor.row(row)
        if len(given) != len(ranges):
            raise InvalidRequest(
                f"has {len(given)} values but retention_token_range_starts has {len(ranges)}; they must be equally"
                " many",
                field=tensor.name,
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


@sets("prompt.text")
def only_prompt_text(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    texts = tensor.texts(row)
    if len(texts) != 1:
        raise InvalidRequest(
            f"has {len(texts)} texts but the model takes one; send a request for each",
            field=tensor.name,
        )
    item.prompt.text = texts[0]


@sets("sampling.best_of")
def best_of(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    """1 asks for nothing."""
    if tensor.scalar(row) != 1:
        _set(item.config.sampling, "best_of", tensor.scalar(row), tensor)


@sets("sampling.logits_post_processor")
def logits_post_processor(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:
    """An empty name asks for nothing."""
    if name := tensor.texts(row)[0]:
        item.config.sampling.logits_post_processor = name


@sets()
def adapter_path(item: router_pb.GenerateItem, tensor: InputTensor, row: int) -> None:  # noqa: ARG001 - a PutRow
    raise UnsupportedField(
        "names a path, which this server never reads for a request; leave it out and name an adapter with lora_id and"
        " lora_name",
        field=tensor.name,
    )


def parse_words(tensor: InputTensor, row: int) -> list[Sequence[int]]:
    """The words of a row of shape [2, n]: all ids, and below them the end of each word."""
    if tensor.row_length > 2 * MOST_WORD_IDS:
        raise InvalidRequest(
            f"has {tensor.row_length // 2} ids but must have at most {MOST_WORD_IDS}",
            field=tensor.name,
        )
    elements = tensor.row(row)
    length = len(elements) // 2
    ids, offsets = elements[:length], list(elements[length:])
    while offsets and offsets[-1] == PAD_OFFSET:
        offsets.pop()
    words: list[Sequence[int]] = []
    start = 0
    for end in offsets:
        if not start < end <= length:
            raise InvalidRequest(
                f"Invalid format for word list: input '{tensor.name}' has the offset {end} after {start}, but offsets"
                f" must increase to at most {length}, followed by -1"
            )
        word = ids[start:end]
        if min(word) < 0:
            raise InvalidRequest(
                f"Invalid format for word list: input '{tensor.name}' holds an id below 0"
            )
        words.append(word)
        start = end
    return words
