"""No field of GenerationConfig is accepted and ignored: each is observed at the backend or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from engine_streams import RouterStream, router_stream, serving, submit
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from recording_backend import INFO, RecordingBackend
from trtmesh.engine.backends.simulated.backend import SUPPORTED_FIELDS
from trtmesh.engine.backends.torch.fields import SUPPORTED_FIELDS as TORCH_FIELDS
from trtmesh.v1 import generation_pb2 as pb

LEAF_MESSAGES = {"Tensor", "TokenIds", "Image", "TokenRangeRetention"}

# Fields whose value must satisfy more than its type.
VALUES: dict[str, Any] = {
    "lookahead.window_size": 3,
    "stopping.min_tokens": 1,
    # True is their default and so asks for nothing.
    "encoder_decoder.decoder_prompt.add_special_tokens": False,
    "kv_cache.reuse": False,
    "output.exclude_prompt": False,
    "output.skip_special_tokens": False,
    "output.stream": False,
    "output.text": False,
}
# Set together, because each alone is refused for the lack of the others.
COMPANIONS: dict[str, dict[str, Any]] = {
    "lookahead.window_size": {"lookahead.ngram_size": 2, "lookahead.verification_set_size": 2},
    "lookahead.ngram_size": {"lookahead.window_size": 2, "lookahead.verification_set_size": 2},
    "lookahead.verification_set_size": {"lookahead.window_size": 2, "lookahead.ngram_size": 2},
    "sampling.embedding_bias_texts": {"sampling.embedding_bias_weights": [0.5]},
    "sampling.embedding_bias_token_ids": {"sampling.embedding_bias_weights": [0.5]},
    "sampling.embedding_bias_weights": {"sampling.embedding_bias_texts": ["word"]},
}
SEED = "sampling.seed"


def leaves(descriptor: Descriptor, prefix: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    for field in descriptor.fields:
        path = prefix + field.name
        kind = field.message_type
        if kind is None or kind.name in LEAF_MESSAGES or kind.GetOptions().map_entry:
            yield path, field
        else:
            yield from leaves(kind, f"{path}.")


LEAVES = dict(leaves(pb.GenerationConfig.DESCRIPTOR))


def tensor() -> pb.Tensor:
    return pb.Tensor(data_type=pb.DATA_TYPE_UINT8, shape=[1], data=b"x")


def sample(path: str, field: FieldDescriptor) -> Any:
    """A value inside the field's limits that differs from every default."""
    if path in VALUES:
        return VALUES[path]
    if field.message_type is not None:
        return {
            "Tensor": tensor(),
            "TokenIds": pb.TokenIds(ids=[7]),
            "Image": pb.Image(url="https://example.org/a.png"),
            "TokenRangeRetention": pb.TokenRangeRetention(token_end=1, priority=1),
        }.get(field.message_type.name, tensor())
    if field.enum_type is not None:
        return 1
    return {
        FieldDescriptor.CPPTYPE_STRING: "word" if field.type == field.TYPE_STRING else b"word",
        FieldDescriptor.CPPTYPE_FLOAT: 0.5,
        FieldDescriptor.CPPTYPE_BOOL: True,
    }.get(field.cpp_type, 2)


def put(config: pb.GenerationConfig, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    message: Any = config
    for parent in parents:
        message = getattr(message, parent)
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, name)["input"].CopyFrom(value)
    elif field.is_repeated:
        getattr(message, name).extend(value if isinstance(value, list) else [value])
    elif field.message_type is not None:
        getattr(message, name).CopyFrom(value)
    else:
        setattr(message, name, value)


def config_with(path: str) -> tuple[pb.GenerationConfig, set[str]]:
    config = pb.GenerationConfig()
    put(config, path, sample(path, LEAVES[path]))
    for companion, value in COMPANIONS.get(path, {}).items():
        put(config, companion, value)
    # What the router always sends.
    config.sampling.seed = 5
    return config, {path, SEED, *COMPANIONS.get(path, {})}


async def send(stream: RouterStream, handle: int, config: pb.GenerationConfig) -> None:
    await stream.send(submit(handle, None, config=config))


@pytest.mark.parametrize("path", LEAVES)
async def test_a_supported_field_reaches_the_backend(path: str) -> None:
    config, fields = config_with(path)
    backend = RecordingBackend(replace(INFO, supported_fields=frozenset(fields)))
    async with serving(backend) as engine, router_stream(engine.address) as stream:
        await send(stream, 1, config)
        await stream.until(lambda: backend.items or stream.received)
        assert not stream.received, stream.received
        seen = backend.items[0].config
        assert fields <= seen.fields_set
        value: Any = seen
        for name in path.split("."):
            value = getattr(value, name)
        assert value not in (None, (), {})


@pytest.mark.parametrize("path", [path for path in LEAVES if path != SEED])
async def test_an_unsupported_field_is_refused_by_name(path: str) -> None:
    config, fields = config_with(path)
    backend = RecordingBackend(replace(INFO, supported_fields=frozenset(fields - {path})))
    async with serving(backend) as engine, router_stream(engine.address) as stream:
        await send(stream, 1, config)
        for received in (await stream.ends(range(1, 1 + _sequences(config)))).values():
            assert received.end is not None
            assert received.end.reason == pb.FINISH_REASON_ERROR
            assert received.end.error.code == 12
            assert received.end.error.reason == "UNSUPPORTED_FIELD"
            assert path in received.end.error.message
        assert backend.items == []


def _sequences(config: pb.GenerationConfig) -> int:
    return max(1, config.sampling.num_return_sequences, config.beam_search.beam_width)


@pytest.mark.parametrize("claimed", [SUPPORTED_FIELDS, TORCH_FIELDS])
def test_a_backend_claims_only_fields_that_exist(claimed: frozenset[str]) -> None:
    assert set(LEAVES) >= claimed
