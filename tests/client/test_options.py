from __future__ import annotations

import re
from typing import Any

import pytest
from trtmesh.chassis.errors import InvalidField
from trtmesh.client import GenerationConfig, LoraConfig, Options
from trtmesh.client.options import GROUP_OF, build_config, build_items
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1.generation_fields import FLAT_GROUPS


def test_keywords_are_the_fields_of_the_proto() -> None:
    """A field added to GenerationConfig or to a flat group must be given a keyword."""
    fields = pb.GenerationConfig.DESCRIPTOR.fields_by_name
    names = ["adapter" if name == "lora" else name for name in fields if name not in FLAT_GROUPS]
    for group in FLAT_GROUPS:
        names += [option.name for option in fields[group].message_type.fields]
    assert len(names) == len(set(names)), "two keywords would have one name"
    assert set(Options.__annotations__) == set(names) == set(GROUP_OF)


@pytest.mark.parametrize(
    ("guide", "kind", "text"),
    [
        ({"type": "object"}, pb.GUIDE_TYPE_JSON_SCHEMA, '{"type": "object"}'),
        (["yes", "no"], pb.GUIDE_TYPE_CHOICE, '["yes", "no"]'),
        (re.compile(r"\d+"), pb.GUIDE_TYPE_REGEX, r"\d+"),
    ],
)
def test_guides_are_plain_values(guide: Any, kind: pb.GuideType.ValueType, text: str) -> None:
    config = build_config(None, Options(guided_decoding=guide))
    assert config.guided_decoding == pb.GuidedDecodingConfig(guide_type=kind, guide=text)


def test_flags_of_an_expression_are_not_ignored() -> None:
    with pytest.raises(TypeError, match="has flags"):
        build_config(None, Options(guided_decoding=re.compile("a", re.IGNORECASE)))


def test_keywords_set_fields_and_nothing_else() -> None:
    config = build_config(
        None,
        Options(
            max_tokens=3,
            stop_texts=["a", "b"],
            bad_token_ids=[[1, 2], [3]],
            temperature=0.0,
            embedding_bias=[0.5],
            beam_width=2,
            text=False,
            adapter=LoraConfig(id=7, version="ab"),
            priority=-1,
        ),
    )
    assert config == GenerationConfig(
        stopping=pb.StoppingConfig(
            max_tokens=3,
            stop_texts=["a", "b"],
            bad_token_ids=[pb.TokenIds(ids=[1, 2]), pb.TokenIds(ids=[3])],
        ),
        sampling=pb.SamplingConfig(temperature=0.0, embedding_bias=[0.5]),
        beam_search=pb.BeamSearchConfig(beam_width=2),
        output=pb.OutputConfig(text=False),
        lora=LoraConfig(id=7, version="ab"),
        priority=-1,
    )


@pytest.mark.parametrize(
    ("adapter", "message"),
    [("tests", LoraConfig(name="tests")), ("7", LoraConfig(name="7")), (7, LoraConfig(id=7))],
)
def test_adapter_is_a_name_or_a_number(adapter: str | int, message: LoraConfig) -> None:
    base = GenerationConfig(lora=LoraConfig(id=1, version="old"))
    assert build_config(base, Options(adapter=adapter)).lora == message


def test_keywords_override_the_config_without_changing_it() -> None:
    base = GenerationConfig(
        stopping=pb.StoppingConfig(max_tokens=3, stop_texts=["a"]),
        sampling=pb.SamplingConfig(top_k=4),
    )
    config = build_config(base, {"stop_texts": ["b"], "max_tokens": 5})
    assert list(config.stopping.stop_texts) == ["b"]
    assert (config.stopping.max_tokens, config.sampling.top_k) == (5, 4)
    assert list(base.stopping.stop_texts) == ["a"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_tokenz": 3}, "max_tokenz"),
        ({"stopping": pb.StoppingConfig()}, "stopping"),
        ({"stop_texts": "END"}, "list"),
        ({"max_tokens": "3"}, "int"),
        ({"adapter": 1.5}, "LoraConfig"),
        ({"lora": LoraConfig(id=7)}, "lora"),
    ],
)
def test_unknown_keyword_or_type_is_a_type_error(
    options: dict[str, object], complaint: str
) -> None:
    with pytest.raises(TypeError, match=complaint):
        build_config(None, options)


def test_bare_text_is_refused_as_prompts() -> None:
    with pytest.raises(TypeError, match=r"write \[text\]"):
        build_items("hello")


def test_text_outside_unicode_is_refused_by_field() -> None:
    with pytest.raises(InvalidField) as refused:
        build_items(["fine", "half \ud83d"])
    error = refused.value
    assert (error.field, error.value, error.batch_index) == ("prompt.text", r"'\ud83d'", 1)
    with pytest.raises(InvalidField) as refused:
        build_config(None, Options(stop_texts=["\udcff"]))
    assert refused.value.field == "stopping.stop_texts"


def test_negative_filters_are_off() -> None:
    base = pb.GenerationConfig(sampling=pb.SamplingConfig(top_k=4, top_p=0.5))
    config = build_config(base, {"top_k": -1, "top_p": -0.1, "seed": 3})
    assert config.sampling == pb.SamplingConfig(seed=3)
