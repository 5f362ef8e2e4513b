"""`preprocessing` and `postprocessing`: the tokenizer alone, as tensors."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trtmesh.chassis.errors import InvalidRequest, UnsupportedField
from trtmesh.router.doors.triton.grpc.responses import Output, text_data
from trtmesh.router.doors.triton.templates.generation import Call
from trtmesh.router.doors.triton.templates.specs import PICTURE_INPUTS
from trtmesh.router.doors.triton.texts import Texts
from trtmesh.router.doors.triton.words import format_words

IdRows = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Encoded:
    """One row: ids of the texts and of the three lists of words, in which words without ids are left out."""

    query: Sequence[int]
    decoder_query: Sequence[int]
    bad_words: IdRows
    stop_words: IdRows
    bias: Sequence[float]


async def preprocess(call: Call, texts: Texts) -> list[Output]:
    """The inputs of the core model. Raises InvalidRequest, UnsupportedField or NoTokenizer."""
    for spec in PICTURE_INPUTS:
        if spec.name in call.inputs:
            raise UnsupportedField(
                f"input '{spec.name}' of model '{call.model.name}' needs a vision encoder, which this server does not"
                " have; send text alone"
            )
    about = texts.describe()
    end_id = about.eos_id if about.HasField("eos_id") else -1
    pad_id = about.pad_id if about.HasField("pad_id") else end_id
    end_ids = _given(call, "END_ID", end_id)
    pad_ids = _given(call, "PAD_ID", pad_id)
    rows = await asyncio.gather(
        *(
            _encode_row(
                call, row, texts, about.vocabulary_size, special=call.model.add_special_tokens
            )
            for row in range(call.batch_size)
        )
    )
    queries = [row.query for row in rows]
    decoder_queries = [row.decoder_query or [pad_ids[i]] for i, row in enumerate(rows)]
    extra_ids = call.inputs.get("PROMPT_TABLE_EXTRA_ID")
    longest = max(map(len, queries)) if extra_ids else 0
    extra = [[extra_ids.scalar(i)] * longest if extra_ids else [] for i in range(call.batch_size)]
    lengths = call.inputs["REQUEST_OUTPUT_LEN"]
    outputs = [
        _padded("INPUT_ID", "i", queries, pad_ids),
        _padded("REQUEST_INPUT_LEN", "i", [[len(ids)] for ids in queries]),
        _padded("DECODER_INPUT_ID", "i", decoder_queries, pad_ids),
        _padded("REQUEST_DECODER_INPUT_LEN", "i", [[len(ids)] for ids in decoder_queries]),
        _words(
            "BAD_WORDS_IDS", [row.bad_words for row in rows], given="BAD_WORDS_DICT" in call.inputs
        ),
        _words(
            "STOP_WORDS_IDS",
            [row.stop_words for row in rows],
            given="STOP_WORDS_DICT" in call.inputs,
        ),
        _padded("EMBEDDING_BIAS", "f", [row.bias for row in rows]),
        _padded("REQUEST_OUTPUT_LEN", "i", [[lengths.scalar(i)] for i in range(call.batch_size)]),
        _padded("OUT_END_ID", "i", [[i] for i in end_ids]),
        _padded("OUT_PAD_ID", "i", [[i] for i in pad_ids]),
        _padded("OUT_PROMPT_TABLE_EXTRA_IDS", "Q", extra),
    ]
    return [output for output in outputs if call.wants(output.name)]


async def postprocess(call: Call, texts: Texts) -> list[Output]:
    """The texts of all rows and beams, one after another. Raises InvalidRequest or NoTokenizer."""
    tokens, lengths = call.inputs["TOKENS_BATCH"], call.inputs["SEQUENCE_LENGTH"]
    if tokens.shape[:2] != lengths.shape:
        raise InvalidRequest(
            f"input 'SEQUENCE_LENGTH' has shape {list(lengths.shape)} but 'TOKENS_BATCH' has"
            f" {list(tokens.shape)}; give one length for each row and beam"
        )
    longest = tokens.shape[2]
    sequences: list[Sequence[int]] = []
    for index in range(len(lengths.elements)):
        length: int = lengths.scalar(index)
        ids: Any = tokens.elements[index * longest :][: min(length, longest)]
        if length < 0 or (len(ids) and min(ids) < 0):
            raise InvalidRequest(
                f"inputs 'TOKENS_BATCH' and 'SEQUENCE_LENGTH': sequence {index} has a length or an id below 0"
            )
        sequences.append(ids)
    decoded = await asyncio.gather(*(texts.decode(ids) for ids in sequences))
    return [Output("OUTPUT", "BYTES", (len(decoded),), text_data(decoded))]


async def _encode_row(
    call: Call, row: int, texts: Texts, vocabulary_size: int, *, special: bool
) -> _Encoded:
    bad, stop, bias_words = (
        call.inputs[name].texts(row) if name in call.inputs else []
        for name in ("BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS")
    )
    # Those that rows are filled up with; of words with weights they are kept beside theirs.
    bad, stop = [word for word in bad if word], [word for word in stop if word]
    given = call.inputs.get("EMBEDDING_BIAS_WEIGHTS")
    weights = given.row(row) if given else ()
    if len(weights) != len(bias_words):
        raise InvalidRequest(
            f"EMBEDDING_BIAS_WORDS has {len(bias_words)} words but EMBEDDING_BIAS_WEIGHTS {len(weights)}; they must be"
            " equally many"
        )
    query = call.inputs["QUERY"].texts(row)[0]
    encoded = await texts.encode(query, [*bad, *stop, *bias_words], add_special_tokens=special)
    decoder_query: Sequence[int] = ()
    if "DECODER_QUERY" in call.inputs:
        text = call.inputs["DECODER_QUERY"].texts(row)[0]
        decoder_query = (await texts.encode(text, add_special_tokens=special)).token_ids
    ids = [list(word.ids) for word in encoded.words]
    bias = [0.0] * (vocabulary_size if bias_words else 0)
    for word, weight in zip(ids[len(bad) + len(stop) :], weights, strict=True):
        for token_id in word:
            bias[token_id] += weight
    return _Encoded(
        list(encoded.token_ids),
        list(decoder_query),
        [word for word in ids[: len(bad)] if word],
        [word for word in ids[len(bad) : len(bad) + len(stop)] if word],
        bias,
    )


def _given(call: Call, name: str, default: int) -> list[int]:
    """An input of one value a row, or the default for each."""
    tensor = call.inputs.get(name)
    return [tensor.scalar(row) if tensor else default for row in range(call.batch_size)]


def _padded(
    name: str, code: str, rows: Sequence[Sequence[float]], pads: Sequence[float] = ()
) -> Output:
    """Rows filled up to the longest, each with its own padding."""
    longest = max(map(len, rows))
    data: array[Any] = array(code)
    for index, row in enumerate(rows):
        data.extend(row)
        data.extend([pads[index] if pads else 0] * (longest - len(row)))
    data_type = {"i": "INT32", "f": "FP32", "Q": "UINT64"}[code]
    return Output(name, data_type, (len(rows), longest), data.tobytes())


def _words(name: str, rows: Sequence[IdRows], *, given: bool) -> Output:
    if not given:
        return Output(name, "INT32", (len(rows), 2, 0), b"")
    shape, data = format_words(rows)
    return Output(name, "INT32", shape, data)
