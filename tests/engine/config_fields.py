"""Every field of GenerationConfig, and a config that sets only this field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from trtmesh.v1 import generation_pb2 as pb

LEAF_MESSAGES = {"Tensor", "TokenIds", "Image", "TokenRangeRetention"}

# Values with limits beyond their type.
VALUES: dict[str, Any] = {
    "lookahead.window_size": 3,
    "stopping.min_tokens": 1,
    # True is the default and asks for nothing.
    "encoder_decoder.decoder_prompt.add_special_tokens": False,
    "kv_cache.reuse": False,
    "output.exclude_prompt": False,
    "output.skip_special_tokens": False,
    "output.stream": False,
    "output.text": False,
}
# Set together: each alone is refused.
COMPANIONS: dict[str, dict[str, Any]] = {
    "handoff.state": {"handoff.phase": 3},
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
    """A value within the field's limits, different from every default."""
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
    # The router always sends these.
    config.sampling.seed = 5
    return config, {path, SEED, *COMPANIONS.get(path, {})}
