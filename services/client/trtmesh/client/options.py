"""Python arguments of `Client.generate` to a GenerateRequest.

Every field of `GenerationConfig` has a keyword. Those of the common groups are flat (`max_tokens` for
`stopping.max_tokens`); the others take their message (`draft=DraftConfig(...)`). The field `lora` is the keyword
`adapter`: a name, a number or a LoraConfig.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

from google.protobuf.message import Message
from trtmesh.chassis.errors import InvalidField
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2

PromptLike = str | Sequence[int] | pb.Prompt | router_pb2.GenerateItem
"""One prompt: a text, token ids, or a message."""


class Options(TypedDict, total=False):
    """Keywords; generation.proto documents each under the same name."""

    # StoppingConfig
    max_tokens: int
    min_tokens: int
    end_id: int
    ignore_end_id: bool
    pad_id: int
    stop_texts: Sequence[str]
    stop_token_ids: Sequence[Sequence[int]]
    include_stop_text: bool
    bad_texts: Sequence[str]
    bad_token_ids: Sequence[Sequence[int]]
    # SamplingConfig
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    top_p_min: float
    top_p_decay: float
    top_p_reset_id: int
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    prompt_ignore_length: int
    no_repeat_ngram_size: int
    embedding_bias: Sequence[float]
    embedding_bias_texts: Sequence[str]
    embedding_bias_weights: Sequence[float]
    embedding_bias_token_ids: Sequence[Sequence[int]]
    num_return_sequences: int
    best_of: int
    logits_post_processor: str
    # BeamSearchConfig
    beam_width: int
    length_penalty: float
    early_stopping: pb.EarlyStopping.ValueType
    diversity_rate: float
    # OutputConfig
    text: bool
    skip_special_tokens: bool
    exclude_prompt: bool
    log_probs: bool
    top_log_probs: int
    prompt_log_probs: bool
    context_logits: bool
    generation_logits: bool
    logits_data_type: pb.DataType.ValueType
    perf_metrics: bool
    stream: bool
    normalize_log_probs: bool
    # Messages and numbers of GenerationConfig itself
    adapter: str | int | pb.LoraConfig
    prompt_tuning: pb.PromptTuningConfig
    draft: pb.DraftConfig
    lookahead: pb.LookaheadConfig
    guided_decoding: pb.GuidedDecodingConfig
    kv_cache: pb.KvCacheConfig
    encoder_decoder: pb.EncoderDecoderConfig
    multimodal: pb.MultimodalConfig
    handoff: pb.HandoffConfig
    priority: int


FLAT_GROUPS = ("stopping", "sampling", "beam_search", "output")


def _groups_by_option() -> dict[str, str]:
    fields = pb.GenerationConfig.DESCRIPTOR.fields_by_name
    flat = {
        option.name: group for group in FLAT_GROUPS for option in fields[group].message_type.fields
    }
    return flat | {name: "" for name in (*fields, "adapter") if name not in (*FLAT_GROUPS, "lora")}


GROUP_OF: Mapping[str, str] = _groups_by_option()
"""Group of each keyword; '' for the fields of GenerationConfig itself."""


OFF_BELOW_ZERO = ("top_k", "top_p")
"""Keywords that a value below 0 leaves unset, as in other clients."""


def build_config(
    base: pb.GenerationConfig | None, options: Mapping[str, object]
) -> pb.GenerationConfig:
    """A copy of `base` with `options` set. Raises TypeError for an unknown keyword or a wrong type."""
    config = pb.GenerationConfig()
    if base is not None:
        config.CopyFrom(base)
    for name, value in options.items():
        if name not in GROUP_OF:
            raise TypeError(f"{name!r} is no option of generate; Options lists them")
        group = GROUP_OF[name]
        if name in OFF_BELOW_ZERO and isinstance(value, int | float) and value < 0:
            _clear(config.sampling, name)
            continue
        with encodable(f"{group}.{name}" if group else name):
            if name == "adapter":
                _assign(config, "lora", _lora(value))
            else:
                _assign(getattr(config, group) if group else config, name, value)
    return config


def _lora(adapter: object) -> object:
    """An adapter by name or number as its message; passes anything else through."""
    match adapter:
        case str():
            return pb.LoraConfig(name=adapter)
        case int():
            return pb.LoraConfig(id=adapter)
        case _:
            return adapter


def _clear(message: Message, name: str) -> None:
    message.ClearField(name)


def _assign(message: Message, name: str, value: Any) -> None:
    field = message.DESCRIPTOR.fields_by_name[name]
    message.ClearField(name)
    if field.is_repeated and isinstance(value, (str, bytes)):
        raise TypeError(f"{name} is {value!r} but must be a list")
    if field.is_repeated and field.message_type is not None:
        getattr(message, name).extend(pb.TokenIds(ids=ids) for ids in value)
    elif field.is_repeated:
        getattr(message, name).extend(value)
    elif field.message_type is not None:
        getattr(message, name).CopyFrom(value)
    else:
        setattr(message, name, value)


def build_items(prompts: Sequence[PromptLike]) -> list[router_pb2.GenerateItem]:
    """One item per prompt. Raises TypeError for a bare text instead of a list."""
    if isinstance(prompts, str):
        raise TypeError("prompts is a text but must be a list of prompts; write [text]")
    return [_item(batch_index, prompt) for batch_index, prompt in enumerate(prompts)]


def _item(batch_index: int, prompt: PromptLike) -> router_pb2.GenerateItem:
    match prompt:
        case router_pb2.GenerateItem():
            return prompt
        case pb.Prompt():
            return router_pb2.GenerateItem(prompt=prompt)
        case str():
            with encodable("prompt.text", batch_index):
                return router_pb2.GenerateItem(prompt=pb.Prompt(text=prompt))
        case _:
            return router_pb2.GenerateItem(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt)))


@contextmanager
def encodable(field: str, batch_index: int | None = None) -> Iterator[None]:
    """Raises InvalidField for a text with a surrogate, which UTF-8 cannot encode."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidField(
            f"has text outside Unicode: {error}",
            field=field,
            value=repr(error.object[error.start : error.end]),
            batch_index=batch_index,
        ) from error
