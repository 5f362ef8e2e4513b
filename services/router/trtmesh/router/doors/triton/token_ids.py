"""Token ids that upstream's scripts send and an engine would refuse."""

from __future__ import annotations

from array import array
from dataclasses import replace

from trtmesh.router.doors.triton.engines import Engines
from trtmesh.router.doors.triton.templates.template import Call
from trtmesh.router.doors.triton.tensors import InputTensor

DECODER_INPUTS = ("decoder_input_ids", "decoder_input_lengths")
DECODER_FIELD = "encoder_decoder.decoder_prompt.token_ids"


def fit_to_engines(call: Call, engines: Engines) -> Call:
    """The call without the decoder start of a decoder-only model, its prompt wrapped where its model says so."""
    if "input_ids" not in call.inputs:
        return call
    inputs = dict(call.inputs)
    if _has_only_decoder_start(call) and not engines.support(call.model, DECODER_FIELD):
        for name in DECODER_INPUTS:
            inputs.pop(name, None)
    if _wraps(call):
        inputs["input_ids"] = wrapped(inputs["input_ids"], engines.vocabulary_size(call.model))
    return replace(call, inputs=inputs)


def _has_only_decoder_start(call: Call) -> bool:
    """Whether each row has a single decoder id, as `preprocessing` emits without a decoder query."""
    ids, lengths = (call.inputs.get(name) for name in DECODER_INPUTS)
    starts = ids is not None and ids.row_shape == (1,)
    return starts and (lengths is None or set(lengths.elements) == {1})


def _wraps(call: Call) -> bool:
    """Whether ids outside of the vocabulary have no meaning: a table extends the vocabulary."""
    tables = "prompt_embedding_table" in call.inputs
    return call.model.wrap_token_ids and not tables


def wrapped(ids: InputTensor, vocabulary_size: int) -> InputTensor:
    """Ids modulo the size of the vocabulary, 0 if unknown. Ids below 0 count from its end."""
    if not vocabulary_size:
        return ids
    elements = array("i", (int(token) % vocabulary_size for token in ids.elements))
    return replace(ids, elements=elements)
