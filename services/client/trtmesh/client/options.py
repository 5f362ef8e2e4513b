"""Python arguments of `Client.generate` to a GenerateRequest.

Every field of `GenerationConfig` has a keyword. Keywords of the common groups are flat (`max_tokens` for
`stopping.max_tokens`); the others take their message (`draft=DraftConfig(...)`). The field `lora` is the keyword
`adapter`: a name, a number or a LoraConfig. `guided_decoding` takes a mapping as a JSON schema, a list of texts as a
choice, and a compiled regular expression too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message
from trtmesh.chassis.errors import InvalidField
from trtmesh.v1 import chat_pb2, router_pb2
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1.generation_fields import FLAT_GROUPS, NEGATIVE_IS_UNSET

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})

PromptLike = str | Sequence[int] | pb.Prompt | router_pb2.GenerateItem
"""A prompt: a text, token ids, or a message."""


def _groups_by_option() -> dict[str, str]:
    fields = pb.GenerationConfig.DESCRIPTOR.fields_by_name
    flat = {
        option.name: group for group in FLAT_GROUPS for option in fields[group].message_type.fields
    }
    return flat | {name: "" for name in (*fields, "adapter") if name not in (*FLAT_GROUPS, "lora")}


GROUP_OF: Mapping[str, str] = _groups_by_option()
"""Group of each keyword; '' for direct fields of GenerationConfig."""


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
        if name in NEGATIVE_IS_UNSET and isinstance(value, int | float) and value < 0:
            _clear(config.sampling, name)
            continue
        with encodable(f"{group}.{name}" if group else name):
            if name == "adapter":
                _assign(config, "lora", _lora(value))
            elif name == "guided_decoding":
                _assign(config, name, _guide(value))
            else:
                _assign(getattr(config, group) if group else config, name, value)
    return config


def _lora(adapter: object) -> object:
    """Returns the message for an adapter by name or number; passes anything else through."""
    match adapter:
        case str():
            return pb.LoraConfig(name=adapter)
        case int():
            return pb.LoraConfig(id=adapter)
        case _:
            return adapter


def _guide(guide: object) -> object:
    """Returns the message for a schema, a choice or an expression; passes anything else through."""
    match guide:
        case Mapping():
            kind, text = pb.GUIDE_TYPE_JSON_SCHEMA, _json(guide)
        case list() | tuple():
            kind, text = pb.GUIDE_TYPE_CHOICE, _json(guide)
        case re.Pattern():
            if guide.flags & ~re.UNICODE:
                raise TypeError(
                    "guided_decoding has flags; write them into the expression: (?i)..."
                )
            kind, text = pb.GUIDE_TYPE_REGEX, guide.pattern
        case _:
            return guide
    return pb.GuidedDecodingConfig(guide_type=kind, guide=text)


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


def chat_item(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    documents: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] = NO_VARIABLES,
    template_name: str = "",
    template: str = "",
    continue_final_message: bool = False,
) -> router_pb2.GenerateItem:
    """A conversation as a prompt of `Client.generate`. The tokenizer renders it with the model's chat template, or with
    `template` where its operator allows that, up to the beginning of an answer or, with `continue_final_message`,
    within the last message."""
    chat = chat_pb2.Chat(messages=_json(messages), continue_final_message=continue_final_message)
    for name, value in (
        ("tools", tools),
        ("documents", documents),
        ("template_kwargs", template_kwargs),
    ):
        if value:
            setattr(chat, name, _json(value))
    if template_name:
        chat.template_name = template_name
    if template:
        chat.template = template
    return router_pb2.GenerateItem(chat=chat)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def build_items(prompts: Sequence[PromptLike]) -> list[router_pb2.GenerateItem]:
    """Returns an item per prompt. Raises TypeError for a bare text instead of a list."""
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
    """Raises InvalidField for a text with a surrogate: UTF-8 has no encoding."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise InvalidField(
            f"has text outside Unicode: {error}",
            field=field,
            value=repr(error.object[error.start : error.end]),
            batch_index=batch_index,
        ) from error
