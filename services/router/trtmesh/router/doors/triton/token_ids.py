"""Token ids, and biases of ids, that upstream's scripts send and an engine would refuse."""

from __future__ import annotations

from array import array
from dataclasses import replace

from trtmesh.router.doors.triton.engines import Engines
from trtmesh.router.doors.triton.templates.template import Call
from trtmesh.router.doors.triton.templates.texts import Texts

DECODER_INPUTS = ("decoder_input_ids", "decoder_input_lengths")
BIAS = "embedding_bias"
DECODER_FIELD = "encoder_decoder.decoder_prompt.token_ids"

ADJUSTED = frozenset({*DECODER_INPUTS, "input_ids", BIAS})
"""Inputs that are left out or changed here; a call without any stays as it is."""


def without_decoder_start(call: Call, engines: Engines) -> Call:
    """The call of a decoder-only model without the decoder start that clients of others send."""
    if not _has_only_decoder_start(call) or engines.support(call.model, DECODER_FIELD):
        return call
    kept = {name: given for name, given in call.inputs.items() if name not in DECODER_INPUTS}
    return replace(call, inputs=kept) if "input_ids" in kept else call


def wrap_size(call: Call, engines: Engines) -> int:
    """The size of the vocabulary that the prompt's ids are taken modulo; 0 to take them as they are: a table extends
    the vocabulary."""
    wraps = call.model.wrap_token_ids and "input_ids" in call.inputs
    wraps = wraps and "prompt_embedding_table" not in call.inputs
    return engines.vocabulary_size(call.model) if wraps else 0


def with_wrapped_prompt(call: Call, vocabulary_size: int) -> Call:
    """Returns the call with the prompt's ids modulo the size, or unchanged for a size of 0. Ids below 0 count from its
    end."""
    if not vocabulary_size:
        return call
    ids = call.inputs["input_ids"]
    elements = array("i", (int(token) % vocabulary_size for token in ids.elements))
    return replace(call, inputs={**call.inputs, "input_ids": replace(ids, elements=elements)})


def bias_size(call: Call, engines: Engines, texts: Texts) -> int:
    """The size of the vocabulary for a bias of the tokenizer's, which `preprocessing` makes; 0 to take it as it is."""
    bias = call.inputs.get(BIAS)
    made = bias is not None and 0 < bias.row_length == texts.vocabulary_size(call.model)
    return engines.vocabulary_size(call.model) if made else 0


def with_fitted_bias(call: Call, size: int) -> Call:
    """Returns the call with the bias padded with zeros, or without the zeros of ids missing in the model."""
    bias = call.inputs.get(BIAS)
    if bias is None or size in (0, bias.row_length):
        return call
    rows = [bias.row(index) for index in range(call.batch_size)]
    if any(any(row[size:]) for row in rows):
        return call
    elements = array("f")
    for row in rows:
        elements.extend(row[:size])
        elements.frombytes(bytes(elements.itemsize * max(0, size - len(row))))
    fitted = replace(bias, shape=(call.batch_size, size), elements=elements)
    return replace(call, inputs={**call.inputs, BIAS: fitted})


def _has_only_decoder_start(call: Call) -> bool:
    """Whether each row has a single decoder id, as `preprocessing` emits without a decoder query."""
    ids, lengths = map(call.inputs.get, DECODER_INPUTS)
    starts = ids is not None and ids.row_shape == (1,)
    return starts and (lengths is None or set(lengths.elements) == {1})
