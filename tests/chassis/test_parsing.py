"""From GenerationConfig messages to values: names, limits and combinations."""

from __future__ import annotations

import math
from array import array
from dataclasses import fields
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from trtmesh.chassis import parsing
from trtmesh.chassis.errors import InvalidField, UnsupportedField
from trtmesh.chassis.parsing import (
    MAX_DIMENSIONS,
    parse_config,
    parse_prompt,
    refuse_unsupported,
)
from trtmesh.chassis.vocabulary import GenerationConfig, Prompt, Tensor
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1.generation_fields import LIMITS, MOST_CHARACTERS, MOST_ENTRIES


def config_with(path: str, value: Any) -> pb.GenerationConfig:
    config = pb.GenerationConfig()
    *parents, name = path.split(".")
    message: Any = config
    for parent in parents:
        message = getattr(message, parent)
        if message.__class__.__name__.startswith("Repeated"):
            message = message.add()
    if message.DESCRIPTOR.fields_by_name[name].is_repeated:
        getattr(message, name).append(value)
    else:
        setattr(message, name, value)
    return config


@pytest.mark.parametrize("name", parsing.DATACLASSES)
def test_messages_and_dataclasses_have_the_same_fields(name: str) -> None:
    proto = {field.name for field in pb.DESCRIPTOR.message_types_by_name[name].fields}
    own = {field.name for field in fields(parsing.DATACLASSES[name])} - {"fields_set"}
    assert own == proto


def test_every_message_has_a_dataclass() -> None:
    todo = [pb.GenerationConfig.DESCRIPTOR]
    seen = set()
    while todo:
        message = todo.pop()
        if message.full_name in seen or message.GetOptions().map_entry:
            continue
        seen.add(message.full_name)
        assert message.name in parsing.DATACLASSES or message.name == "TokenIds"
        todo += [field.message_type for field in message.fields if field.message_type]


def test_empty_message_is_the_default() -> None:
    assert parse_config(pb.GenerationConfig()) == GenerationConfig()


def test_remembered_groups_are_those_of_their_config() -> None:
    """A group is remembered by its content and name, and an invalid one is refused again."""
    few, many = (config_with("stopping.max_tokens", count) for count in (1, 2))
    many.output.log_probs = True
    read = [parse_config(each) for each in (few, many, few, many)]
    assert [each.stopping.max_tokens for each in read] == [1, 2, 1, 2]
    assert read[2:] == read[:2]
    assert read[0].fields_set == {"stopping.max_tokens"}
    assert read[3].fields_set == {"stopping.max_tokens", "output.log_probs"}
    for _ in range(2):
        with pytest.raises(InvalidField, match="max_tokens"):
            parse_config(config_with("stopping.max_tokens", 0))


def test_zero_differs_from_unset() -> None:
    config = parse_config(pb.GenerationConfig(sampling=pb.SamplingConfig(temperature=0, seed=0)))
    assert (config.sampling.temperature, config.sampling.seed) == (0.0, 0)
    assert config.fields_set == {"sampling.temperature", "sampling.seed"}


@pytest.mark.parametrize("path", LIMITS)
def test_values_outside_the_limits_are_refused(path: str) -> None:
    low, high = LIMITS[path]
    as_type: type[float] = float
    try:
        config_with(path, 0.5)
    except TypeError:
        as_type = int
    # The wire rounds to 32-bit floats, so the values are well outside.
    outside = [low - 1, high + 1] if as_type is int else [low - 1, high * 1.01 + 1, math.nan]
    for value in outside:
        try:
            config = config_with(path, as_type(value))
        except (ValueError, OverflowError):
            continue
        if math.isinf(low) and not math.isnan(value):
            continue
        with pytest.raises(InvalidField) as caught:
            parse_config(config)
        assert caught.value.field == path


@pytest.mark.parametrize("value", [0.25, 1.0])
def test_values_inside_the_limits_pass(value: float) -> None:
    assert parse_config(config_with("sampling.top_p", value)).sampling.top_p == value


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("beam_search.early_stopping", "EARLY_STOPPING_HEURISTIC"),
        ("output.logits_data_type", "DATA_TYPE_BF16"),
        ("guided_decoding.guide_type", "GUIDE_TYPE_REGEX"),
        ("handoff.phase", "GENERATION_PHASE_CONTEXT_ONLY"),
        ("lora.weights.data_type", "DATA_TYPE_FP32"),
    ],
)
def test_enum_numbers_without_a_name_are_refused(path: str, name: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_config(config_with(path, 99))
    assert (caught.value.field, caught.value.value) == (path, "99")
    assert name in caught.value.limit


@pytest.mark.parametrize(
    ("config", "fields", "limit"),
    [
        (
            pb.GenerationConfig(handoff=pb.HandoffConfig(state=b"x")),
            ("handoff.state",),
            "",
        ),
        (
            pb.GenerationConfig(
                handoff=pb.HandoffConfig(phase=pb.GENERATION_PHASE_CONTEXT_ONLY, state=b"x")
            ),
            ("handoff.state",),
            "",
        ),
        (
            pb.GenerationConfig(
                handoff=pb.HandoffConfig(phase=pb.GENERATION_PHASE_GENERATION_ONLY)
            ),
            ("handoff.state",),
            "",
        ),
        (
            pb.GenerationConfig(stopping=pb.StoppingConfig(end_id=1, ignore_end_id=True)),
            ("stopping.end_id", "stopping.ignore_end_id"),
            "",
        ),
        (
            pb.GenerationConfig(sampling=pb.SamplingConfig(embedding_bias_texts=["a"])),
            ("sampling.embedding_bias_texts", "sampling.embedding_bias_weights"),
            "",
        ),
        (
            pb.GenerationConfig(sampling=pb.SamplingConfig(embedding_bias_weights=[1.0])),
            ("sampling.embedding_bias_texts", "sampling.embedding_bias_weights"),
            "",
        ),
        (
            pb.GenerationConfig(
                sampling=pb.SamplingConfig(
                    embedding_bias_texts=["a"], embedding_bias_token_ids=[pb.TokenIds(ids=[4])]
                )
            ),
            (
                "sampling.embedding_bias_texts",
                "sampling.embedding_bias_token_ids",
                "sampling.embedding_bias_weights",
            ),
            "",
        ),
        (
            pb.GenerationConfig(
                sampling=pb.SamplingConfig(num_return_sequences=3),
                beam_search=pb.BeamSearchConfig(beam_width=2),
            ),
            ("sampling.num_return_sequences",),
            "at most 2",
        ),
        (
            pb.GenerationConfig(sampling=pb.SamplingConfig(num_return_sequences=3, best_of=2)),
            ("sampling.best_of",),
            "at least 3",
        ),
        (pb.GenerationConfig(lookahead=pb.LookaheadConfig(window_size=2)), ("lookahead",), ""),
        (
            pb.GenerationConfig(stopping=pb.StoppingConfig(stop_texts=[""])),
            ("stopping.stop_texts",),
            "",
        ),
        (
            pb.GenerationConfig(stopping=pb.StoppingConfig(bad_texts=["x"] * 257)),
            ("stopping.bad_texts",),
            "",
        ),
        (
            pb.GenerationConfig(
                kv_cache=pb.KvCacheConfig(token_ranges=[pb.TokenRangeRetention()] * 257)
            ),
            ("kv_cache.token_ranges",),
            "",
        ),
        (
            pb.GenerationConfig(stopping=pb.StoppingConfig(stop_token_ids=[pb.TokenIds()])),
            ("stopping.stop_token_ids",),
            "",
        ),
        (
            pb.GenerationConfig(
                lora=pb.LoraConfig(
                    weights=pb.Tensor(data_type=pb.DATA_TYPE_FP16, shape=[2, 3], data=b"x")
                )
            ),
            ("lora.weights",),
            "",
        ),
        (
            pb.GenerationConfig(lora=pb.LoraConfig(weights=pb.Tensor(shape=[0]))),
            ("lora.weights.data_type",),
            "a DataType other than 0",
        ),
    ],
)
def test_inconsistent_fields_are_refused(
    config: pb.GenerationConfig, fields: tuple[str, ...], limit: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_config(config)
    assert (caught.value.fields, caught.value.limit) == (fields, limit)


def test_tensor_keeps_its_bytes() -> None:
    weights = pb.Tensor(data_type=pb.DATA_TYPE_FP16, shape=[2], data=b"abcd")
    config = parse_config(pb.GenerationConfig(lora=pb.LoraConfig(weights=weights)))
    assert config.lora
    assert config.lora.weights == Tensor(pb.DATA_TYPE_FP16, (2,), b"abcd")
    assert config.fields_set == {"lora.weights"}


def test_unsupported_fields_are_refused() -> None:
    config = parse_config(pb.GenerationConfig(sampling=pb.SamplingConfig(top_k=3, min_p=0.5)))
    refuse_unsupported(config, {"sampling.top_k", "sampling.min_p"}, "the worker")
    with pytest.raises(UnsupportedField) as caught:
        refuse_unsupported(config, {"sampling.top_k"}, "the worker")
    assert caught.value.fields == ("sampling.min_p",)


class TestPrompt:
    def test_prompt_has_text_or_ids(self) -> None:
        assert parse_prompt(pb.Prompt(text="")).text == ""
        assert parse_prompt(pb.Prompt(token_ids=pb.TokenIds(ids=[1]))).token_ids == array("I", [1])
        assert parse_prompt(pb.Prompt(token_ids=pb.TokenIds())).token_ids == array("I")
        assert (
            parse_prompt(pb.Prompt(text="a", add_special_tokens=False)).add_special_tokens is False
        )

    @pytest.mark.parametrize("content", [{"text": "a"}, {"token_ids": pb.TokenIds(ids=[1])}])
    def test_every_field_of_a_prompt_is_read(self, content: dict[str, Any]) -> None:
        prompt = pb.Prompt(add_special_tokens=False, **content)
        parsed = parse_prompt(prompt)
        read = {each.name for each in fields(Prompt) if getattr(parsed, each.name) != each.default}
        assert read == {field.name for field, _ in prompt.ListFields()}
        known = {"text", "token_ids", "add_special_tokens"}
        assert {field.name for field in pb.Prompt.DESCRIPTOR.fields} == known

    def test_prompt_without_text_and_ids_is_refused(self) -> None:
        with pytest.raises(InvalidField) as caught:
            parse_prompt(pb.Prompt())
        assert caught.value.field == "prompt"


def filled(path: str, count: int) -> pb.GenerationConfig:
    """A config whose list at `path` has `count` entries."""
    config = pb.GenerationConfig()
    *parents, name = path.split(".")
    message: Any = config
    for parent in parents:
        message = getattr(message, parent)
    given = getattr(message, name)
    if isinstance(given, pb.TokenIds):
        given.ids.extend([1] * count)
    elif path == "multimodal.model_inputs":
        for number in range(count):
            given[str(number)].data_type = pb.DATA_TYPE_UINT8
            given[str(number)].shape[:] = [0]
    elif hasattr(given, "add"):
        for _ in range(count):
            added = given.add()
            if isinstance(added, pb.TokenIds):
                added.ids.append(1)
    elif message.DESCRIPTOR.fields_by_name[name].type == FieldDescriptor.TYPE_STRING:
        given.extend(["x"] * count)
    else:
        given.extend([1] * count)
    return config


@pytest.mark.parametrize(
    "path", sorted(path for path in MOST_ENTRIES if not path.startswith("prompt."))
)
def test_lists_are_counted_before_they_are_copied(path: str) -> None:
    most = MOST_ENTRIES[path]
    said = f"has {most + 1} entries but must have at most {most}"
    with pytest.raises(InvalidField, match=said) as refused:
        parse_config(filled(path, most + 1))
    assert refused.value.field == path
    said = ""
    try:
        parse_config(filled(path, most))
    except InvalidField as error:
        said = error.message
    # Some lists need others beside them.
    assert not said or "need a weight for each" in said


@pytest.mark.parametrize("path", MOST_CHARACTERS)
def test_texts_are_limited(path: str) -> None:
    most = MOST_CHARACTERS[path]
    parse_config(config_with(path, "x" * most))
    with pytest.raises(InvalidField, match=f"at most {most} characters") as refused:
        parse_config(config_with(path, "x" * (most + 1)))
    assert refused.value.field == path
    assert len(refused.value.message) < 1000


def test_dimensions_are_counted_before_they_are_multiplied() -> None:
    tensor = pb.Tensor(data_type=pb.DATA_TYPE_UINT8, shape=[1] * MAX_DIMENSIONS, data=b"x")
    parse_config(pb.GenerationConfig(lora=pb.LoraConfig(weights=tensor)))
    tensor.shape.append(2**63)
    with pytest.raises(InvalidField, match="has 17 dimensions but must have at most 16"):
        parse_config(pb.GenerationConfig(lora=pb.LoraConfig(weights=tensor)))
