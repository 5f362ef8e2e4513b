"""Every field that a contract is said to carry changes what is asked of the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine.config_fields import LEAVES, put, sample
from trtmesh.chassis.parsing import parse_config
from trtmesh.chassis.stopping import EndRule
from trtmesh.engine.backend import Submission
from trtmesh.engine.backends.foreign import sglang, trtllm, vllm
from trtmesh.engine.backends.foreign.contract import Ask
from trtmesh.engine.backends.foreign.sequence import Figures, ForeignSequence
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1.generation_fields import supported_by

REQUESTS: dict[str, tuple[frozenset[str], Callable[[Ask], Any]]] = {
    "vllm": (supported_by("vllm"), vllm.request_of),
    "sglang": (supported_by("sglang"), sglang.request_of),
    "trtllm": (supported_by("trtllm"), trtllm.request_of),
}
ALONG: dict[str, dict[str, Any]] = {
    "guided_decoding.guide": {"guided_decoding.guide_type": pb.GUIDE_TYPE_REGEX},
    "sampling.embedding_bias_token_ids": {"sampling.embedding_bias_weights": [0.5]},
    "sampling.embedding_bias_weights": {
        "sampling.embedding_bias_token_ids": [pb.TokenIds(ids=[7])]
    },
}
"""Fields that a field needs beside it."""
BASE = {"sampling.temperature": 0.75, "sampling.seed": 5, "stopping.max_tokens": 50}


def asked(contract: str, fields: dict[str, Any]) -> list[bytes]:
    """The requests of an item, one a sequence."""
    config = pb.GenerationConfig()
    for path, value in {**BASE, **fields}.items():
        put(config, path, value)
    parsed = parse_config(config)
    keys = tuple(range(parsed.sequences))
    item = Submission(keys, "item", 0, 0, [11, 12, 13], 0, parsed)
    limit = len(item.token_ids) + (parsed.stopping.max_tokens or 0)
    rule = EndRule(parsed.stopping, [1], len(item.token_ids), limit)
    _, request_of = REQUESTS[contract]
    return [
        request_of(
            ForeignSequence(item, key, rule, "call", Figures(), 1.0).ask("")
        ).SerializeToString(deterministic=True)
        for key in keys
    ]


SAID_OTHERWISE = {
    ("vllm", "sampling.prompt_ignore_length"),
    ("sglang", "sampling.prompt_ignore_length"),
}
"""Fields whose only possible value needs no word, while others are refused: see tests/engine/torch/test_fields.py."""


@pytest.mark.parametrize(
    ("contract", "path"),
    [
        (name, path)
        for name, (fields, _) in REQUESTS.items()
        for path in sorted(fields)
        if (name, path) not in SAID_OTHERWISE
    ],
)
def test_supported_field_reaches_the_engine(contract: str, path: str) -> None:
    along = ALONG.get(path, {})
    with_field = asked(contract, {**along, path: sample(path, LEAVES[path])})
    # What no item may have alone.
    without = {
        name: value
        for name, value in along.items()
        if not name.startswith(("sampling.embedding_bias", "guided_decoding"))
    }
    assert with_field != asked(contract, without)
