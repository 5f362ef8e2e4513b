"""`preprocessing` and `postprocessing`: the tokenizer alone, as tensors."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from trtmesh.chassis.errors import InvalidRequest, UnsupportedField
from trtmesh.router.doors.triton.templates.outputs import PAD_ID
from trtmesh.router.doors.triton.templates.put import PAD_OFFSET
from trtmesh.router.doors.triton.templates.template import Call, Share, Spent, Template
from trtmesh.router.doors.triton.templates.tensor_table import (
    PASSED_INPUTS,
    POSTPROCESSING_INPUTS,
    POSTPROCESSING_OUTPUTS,
    PREPROCESSING_INPUTS,
    PREPROCESSING_OUTPUTS,
    VISION_INPUTS,
)
from trtmesh.router.doors.triton.templates.texts import Texts
from trtmesh.router.doors.triton.tensors import Output, Shape, pad_rows

IdRows = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A row: ids of all texts and words, without words that have no ids."""

    query: Sequence[int]
    decoder_query: Sequence[int]
    bad_words: IdRows
    stop_words: IdRows
    bias: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class TokenizerTemplate(Template, ABC):
    """Asks only a tokenizer and answers once."""

    backend: str = "python"
    decoupled: bool = False

    @abstractmethod
    async def outputs_of(self, call: Call, texts: Texts) -> list[Output]:
        """The outputs of a call. Raises InvalidRequest, UnsupportedField or NoTokenizer."""


@dataclass(frozen=True, kw_only=True)
class PreprocessingTemplate(TokenizerTemplate):
    """Makes the inputs of the core model."""

    def share(self, spent: Spent) -> Share:
        return Share(input=spent.reading, infer=spent.encoding)

    async def outputs_of(self, call: Call, texts: Texts) -> list[Output]:
        _check_no_vision(call)
        about = texts.describe(call.model)
        end_id = about.eos_id if about.HasField("eos_id") else -1
        pad_id = about.pad_id if about.HasField("pad_id") else end_id
        end_ids = _given(call, "END_ID", end_id)
        pad_ids = _given(call, "PAD_ID", pad_id)
        rows = await asyncio.gather(
            *(
                _encode_row(call, row, texts, about.vocabulary_size)
                for row in range(call.batch_size)
            )
        )
        queries = [row.query for row in rows]
        decoder_queries = [row.decoder_query or [pad_ids[i]] for i, row in enumerate(rows)]
        lengths = call.inputs["REQUEST_OUTPUT_LEN"]
        extra_ids = _extra_ids(call, max(map(len, queries)))
        outputs = [
            _padded("INPUT_ID", "INT32", queries, pad_ids),
            Output.of_rows("REQUEST_INPUT_LEN", "INT32", [*map(len, queries)]),
            _padded("DECODER_INPUT_ID", "INT32", decoder_queries, pad_ids),
            Output.of_rows("REQUEST_DECODER_INPUT_LEN", "INT32", [*map(len, decoder_queries)]),
            _words(call, "BAD_WORDS", [row.bad_words for row in rows]),
            _words(call, "STOP_WORDS", [row.stop_words for row in rows]),
            _padded("EMBEDDING_BIAS", "FP32", [row.bias for row in rows]),
            Output.of_input("REQUEST_OUTPUT_LEN", lengths),
            Output.of_rows("OUT_END_ID", "INT32", end_ids),
            Output.of_rows("OUT_PAD_ID", "INT32", pad_ids),
            _padded("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", extra_ids),
        ]
        if (table := call.inputs.get("PROMPT_EMBEDDING_TABLE")) is not None:
            outputs.append(Output.of_input("OUT_PROMPT_EMBEDDING_TABLE", table))
        return [output for output in outputs if call.wants(output.name)]


@dataclass(frozen=True, kw_only=True)
class PostprocessingTemplate(TokenizerTemplate):
    """Decodes all rows and beams into a flat list."""

    def share(self, spent: Spent) -> Share:
        return Share(infer=spent.decoding, output=spent.writing)

    async def outputs_of(self, call: Call, texts: Texts) -> list[Output]:
        sequences = _sequences(call)
        decoded = await asyncio.gather(*(texts.decode(call.model, ids) for ids in sequences))
        outputs = [Output.of_texts("OUTPUT", decoded)]
        outputs += [
            Output.of_input(f"OUT_{spec.name}", call.inputs[spec.name])
            for spec in PASSED_INPUTS
            if spec.name in call.inputs
        ]
        return [output for output in outputs if call.wants(output.name)]


PREPROCESSING = PreprocessingTemplate(
    name="preprocessing", inputs=PREPROCESSING_INPUTS, outputs=PREPROCESSING_OUTPUTS
)
POSTPROCESSING = PostprocessingTemplate(
    name="postprocessing", inputs=POSTPROCESSING_INPUTS, outputs=POSTPROCESSING_OUTPUTS
)


def _sequences(call: Call) -> list[Sequence[int]]:
    """The ids of all rows and beams, without padding. Raises InvalidRequest."""
    tokens, given = call.inputs["TOKENS_BATCH"], call.inputs.get("SEQUENCE_LENGTH")
    rows, beams, longest = tokens.shape
    sequences: list[Any] = [
        tokens.elements[index * longest : (index + 1) * longest] for index in range(rows * beams)
    ]
    if given is None:
        lengths = [_unpadded_length(sequence) for sequence in sequences]
    elif given.shape == (rows, beams):
        lengths = [given.scalar(index) for index in range(rows * beams)]
    else:
        raise InvalidRequest(
            f"has shape {list(given.shape)} but TOKENS_BATCH has {list(tokens.shape)}; give one length for each"
            " row and beam",
            field="SEQUENCE_LENGTH",
        )
    for index, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        del sequence[max(length, 0) :]
        if length < 0 or min(sequence, default=0) < 0:
            raise InvalidRequest(
                f"have a length or an id below 0 in sequence {index}",
                fields=("TOKENS_BATCH", "SEQUENCE_LENGTH"),
            )
    return sequences


def _unpadded_length(ids: Sequence[int]) -> int:
    """The length without the padding of `output_ids`."""
    length = len(ids)
    while length and ids[length - 1] == PAD_ID:
        length -= 1
    return length


def _check_no_vision(call: Call) -> None:
    for spec in VISION_INPUTS:
        if spec.name in call.inputs:
            raise UnsupportedField(
                f"of model '{call.model.name}' needs a vision encoder, which this server does not have; send text"
                " alone",
                field=spec.name,
            )


async def _encode_row(call: Call, row: int, texts: Texts, vocabulary_size: int) -> _Encoded:
    bad, stop, bias_words = (
        call.inputs[name].texts(row) if name in call.inputs else []
        for name in ("BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS")
    )
    # Empty words fill up rows. Words with weights keep them, because the weights count them.
    bad, stop = [word for word in bad if word], [word for word in stop if word]
    given = call.inputs.get("EMBEDDING_BIAS_WEIGHTS")
    weights = given.row(row) if given else ()
    if len(weights) != len(bias_words):
        raise InvalidRequest(
            f"has {len(bias_words)} words but EMBEDDING_BIAS_WEIGHTS {len(weights)}; they must be equally many",
            field="EMBEDDING_BIAS_WORDS",
        )
    query = call.inputs["QUERY"].texts(row)[0]
    encoded = await texts.encode(call.model, query, bias_words, [*bad, *stop])
    decoder_query: Sequence[int] = ()
    if "DECODER_QUERY" in call.inputs:
        text = call.inputs["DECODER_QUERY"].texts(row)[0]
        decoder_query = (await texts.encode(call.model, text)).token_ids
    spelled = [[list(ids.ids) for ids in word.spellings] for word in encoded.spelled_words]
    bias = [0.0] * (vocabulary_size if bias_words else 0)
    for word, weight in zip(encoded.words, weights, strict=True):
        for token_id in word.ids:
            bias[token_id] += weight
    return _Encoded(
        list(encoded.token_ids),
        list(decoder_query),
        [*chain.from_iterable(spelled[: len(bad)])],
        [*chain.from_iterable(spelled[len(bad) :])],
        bias,
    )


def _given(call: Call, name: str, default: int) -> list[int]:
    """A value for each row."""
    tensor = call.inputs.get(name)
    return [tensor.scalar(row) if tensor else default for row in range(call.batch_size)]


def _padded(
    name: str, data_type: str, rows: Sequence[Sequence[float]], pads: Iterable[float] = repeat(0)
) -> Output:
    """Rows filled up to the longest, each with its own padding."""
    longest, elements = pad_rows(rows, pads)
    return Output.of_numbers(name, data_type, (len(rows), longest), elements)


def _extra_ids(call: Call, longest: int) -> list[list[int]]:
    tensor = call.inputs.get("PROMPT_TABLE_EXTRA_ID")
    return [[tensor.scalar(row)] * longest if tensor else [] for row in range(call.batch_size)]


def _words(call: Call, name: str, rows: Sequence[IdRows]) -> Output:
    given = f"{name}_DICT" in call.inputs
    shape, data = format_words(rows) if given else ((len(rows), 2, 0), b"")
    return Output(f"{name}_IDS", "INT32", shape, data)


def format_words(rows: Sequence[Sequence[Sequence[int]]]) -> tuple[Shape, bytes]:
    """Shape [rows, 2, n] and data of each row's word list: ids padded with 0, offsets with -1."""
    length = max((sum(map(len, words)) for words in rows), default=0)
    length = max(1, length, *map(len, rows))
    data = array("i")
    for words in rows:
        ids = [token_id for word in words for token_id in word]
        offsets: list[int] = []
        for word in words:
            offsets.append((offsets[-1] if offsets else 0) + len(word))
        data.extend(ids + [0] * (length - len(ids)))
        data.extend(offsets + [PAD_OFFSET] * (length - len(offsets)))
    return (len(rows), 2, length), data.tobytes()
