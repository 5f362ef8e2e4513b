"""Fields of a request's body, under the names of OpenAI and of other servers: each is read once, and unread fields are
refused by name."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import orjson
from trtmesh.chassis.errors import InvalidField, InvalidRequest
from trtmesh.chassis.quoting import quoted
from trtmesh.router.doors.http.json_bodies import MAX_DEPTH, parse_text
from trtmesh.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of JSON value."""

    word: str
    types: tuple[type, ...]

    def has(self, value: Any) -> bool:
        # A boolean is an integer to Python alone.
        return type(value) in self.types


TEXT, BOOLEAN = Kind("a text", (str,)), Kind("true or false", (bool,))
INTEGER, NUMBER = Kind("an integer", (int,)), Kind("a number", (int, float))
LIST, OBJECT = Kind("a list", (list,)), Kind("an object", (dict,))
ANY = Kind("a value", (str, bool, int, float, list, dict))

DIRECT: Mapping[str, tuple[Kind, str]] = MappingProxyType(
    {
        "temperature": (NUMBER, "sampling.temperature"),
        "top_p": (NUMBER, "sampling.top_p"),
        "top_k": (INTEGER, "sampling.top_k"),
        "min_p": (NUMBER, "sampling.min_p"),
        "frequency_penalty": (NUMBER, "sampling.frequency_penalty"),
        "presence_penalty": (NUMBER, "sampling.presence_penalty"),
        "repetition_penalty": (NUMBER, "sampling.repetition_penalty"),
        "n": (INTEGER, "sampling.num_return_sequences"),
        "min_tokens": (INTEGER, "stopping.min_tokens"),
        "ignore_eos": (BOOLEAN, "stopping.ignore_end_id"),
        "include_stop_str_in_output": (BOOLEAN, "stopping.include_stop_text"),
        "skip_special_tokens": (BOOLEAN, "output.skip_special_tokens"),
        "cache_salt": (TEXT, "kv_cache.salt"),
    }
)
"""Fields equal to a field of the config, with the path."""

WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention"),
)
"""Fields about billing, storage and abuse: none changes the answer."""

NAMES: Mapping[str, str] = MappingProxyType(
    {
        **{path: name for name, (_, path) in DIRECT.items()},
        "sampling.seed": "seed",
        "sampling.embedding_bias_token_ids": "logit_bias",
        "sampling.embedding_bias_weights": "logit_bias",
        "stopping.max_tokens": "max_tokens",
        "stopping.stop_texts": "stop",
        "stopping.stop_token_ids": "stop_token_ids",
        "guided_decoding.guide": "response_format",
        "guided_decoding.guide_type": "response_format",
        "output.log_probs": "logprobs",
        "output.top_log_probs": "logprobs",
        "lora.name": "model",
        "draft.token_ids": "prediction",
        "output.perf_metrics": "prediction",
        "chat": "messages",
        "chat.messages": "messages",
        "chat.template_kwargs": "chat_template_kwargs",
        "chat.add_generation_prompt": "add_generation_prompt",
        "chat.continue_final_message": "continue_final_message",
        "chat.documents": "documents",
        "chat.template": "chat_template",
        "items": "prompt",
        "prompt.token_ids": "prompt",
        "prompt.text": "prompt",
        "text": "prompt",
    }
)
"""Fields of errors under the names of this API, for fields with several names."""

LIMITING = re.compile(
    "guid|regex|ebnf|grammar|schema|json|^format$|stop|bad_|allowed_|logit|beam|penalty|min_|max_"
)
"""Matches other servers' names of fields for limiting an answer."""
MOST_DIGITS = 10
"""Most digits of a token id."""
LEAST_BIAS, MOST_BIAS = -100, 100


class Fields:
    """The fields of an object. An explicit null is an absent field."""

    def __init__(self, given: Mapping[str, Any], prefix: str = "") -> None:
        self._prefix = prefix
        self._left = {name: value for name, value in given.items() if value is not None}
        self.names: dict[str, str] = {}
        """The fields of errors, under the names used by the request."""
        self.ignored: list[str] | None = None
        """Collects the names of unknown fields, if they are not to be refused."""

    def take(self, name: str, kind: Kind) -> Any:
        """Returns the value of a field, or None for an absent field. Raises InvalidField for another kind of value."""
        value = self._left.pop(name, None)
        if value is not None and not kind.has(value):
            raise InvalidField(f"must be {kind.word}", field=self._prefix + name)
        return value

    def peek(self, *names: str) -> dict[str, Any]:
        """Returns the values of the given fields, and leaves the fields to be taken."""
        return {name: self._left[name] for name in names if name in self._left}

    def among(self, known: Container[str]) -> list[str]:
        """The names of given fields that are among the known."""
        return [name for name in self._left if name in known]

    def need(self, name: str, kind: Kind) -> Any:
        """Returns the value of a required field. Raises InvalidField."""
        value = self.take(name, kind)
        if value is None:
            raise InvalidField("is required", field=self._prefix + name)
        return value

    def take_flag(self, name: str, *, default: bool = False) -> bool:
        value = self.take(name, BOOLEAN)
        return default if value is None else bool(value)

    def take_list(self, name: str, kind: Kind) -> list[Any]:
        """Returns a list of values of one kind; empty for an absent field. Raises InvalidField."""
        values: list[Any] = self.take(name, LIST) or []
        check_all(self._prefix + name, values, kind)
        return values

    def refuse(self, name: str, why: str, neutral: Any = None) -> None:
        """Raises InvalidField for a field with another value than the one without effect."""
        value = self.take(name, ANY)
        if value is not None and value != neutral:
            raise InvalidField(why, field=self._prefix + name)

    def put(self, config: pb.GenerationConfig, path: str, name: str, value: Any) -> None:
        """Sets the field of a config according to a field. Raises InvalidField for a number out of range."""
        self.names[path] = name
        *groups, last = path.split(".")
        owner: Any = config
        for group in groups:
            owner = getattr(owner, group)
        try:
            setattr(owner, last, value)
        except (ValueError, OverflowError):
            limit = "in the range of 32 bits, and not negative"
            raise InvalidField.of(name, value, limit) from None

    def call(self, name: str, *paths: str) -> None:
        """Errors in any of the fields at `paths` name this field of the request."""
        self.names |= dict.fromkeys(paths, name)

    def refuse_rest(self) -> None:
        """Raises InvalidRequest for an unread field, since the field may change the expected answer."""
        for name in self._left:
            if self.ignored is not None and not LIMITING.search(name):
                self.ignored.append(name)
                continue
            self.call(name, name)
            raise InvalidRequest(
                "is a field that this endpoint does not know; leave it out",
                field=self._prefix + name,
            )


def check_all(name: str, values: Iterable[Any], kind: Kind) -> None:
    """Raises InvalidField for a list with another kind of value."""
    if not all(map(kind.has, values)):
        raise InvalidField(f"must be a list, and each of it {kind.word}", field=name)


def read_config(fields: Fields, defaults: pb.GenerationConfig | None) -> pb.GenerationConfig:
    """The config of a request, but for the number of tokens and for log-probabilities. Raises InvalidField."""
    # Unset, all of them would mean greedy decoding.
    config = pb.GenerationConfig(sampling=pb.SamplingConfig(temperature=1.0))
    if defaults is not None:
        config.MergeFrom(defaults)
    for name in fields.among(DIRECT):
        kind, path = DIRECT[name]
        value = fields.take(name, kind)
        # Other servers' way to turn the field off.
        is_off = name == "top_k" and value < 0
        fields.put(config, path, name, 0 if is_off else value)
    if (seed := fields.take("seed", INTEGER)) is not None:
        config.sampling.seed = seed % 2**64
    if (priority := fields.take("priority", INTEGER)) is not None:
        if abs(priority) >= 2**31:
            raise InvalidField.of("priority", priority, "in the range of 32 bits")
        # Lower is earlier, as in vLLM.
        fields.put(config, "priority", "priority", -priority)
    _read_stops(fields, config.stopping)
    _read_format(fields, config)
    _read_structure(fields, config.guided_decoding)
    _read_bias(fields, config.sampling)
    for name in fields.among(WITHOUT_EFFECT):
        fields.take(name, ANY)
    return config


def _read_stops(fields: Fields, stopping: pb.StoppingConfig) -> None:
    stop = fields.take("stop", Kind("a text or a list of texts", (str, list)))
    texts = [stop] if isinstance(stop, str) else stop or []
    check_all("stop", texts, TEXT)
    stopping.stop_texts.extend(texts)
    for token_id in fields.take_list("stop_token_ids", INTEGER):
        stopping.stop_token_ids.append(pb.TokenIds(ids=checked_ids("stop_token_ids", [token_id])))


def checked_ids(name: str, ids: list[Any]) -> list[int]:
    """Token ids as they are. Raises InvalidField."""
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < 2**32:
            raise InvalidField(f"has {quoted(str(token_id))}, which is no token id", field=name)
    return ids


def _read_format(fields: Fields, config: pb.GenerationConfig) -> None:
    """Reads `response_format` into the guide."""
    if (given := fields.take("response_format", OBJECT)) is None:
        return
    told = Fields(given, "response_format.")
    match told.need("type", TEXT):
        case "text":
            pass
        case "json_object":
            config.guided_decoding.guide_type = pb.GUIDE_TYPE_JSON
        case "json_schema":
            named = Fields(told.need("json_schema", OBJECT), "response_format.json_schema.")
            schema = named.need("schema", OBJECT)
            config.guided_decoding.guide_type = pb.GUIDE_TYPE_JSON_SCHEMA
            config.guided_decoding.guide = orjson.dumps(schema).decode()
            # Labels of the schema; and schemas are always strict.
            for name in ("name", "description", "strict"):
                named.take(name, ANY)
            named.refuse_rest()
        case kind:
            limit = "text, json_object or json_schema"
            raise InvalidField.of("response_format.type", kind, limit)
    told.refuse_rest()


def read_prediction(fields: Fields) -> str | None:
    """The form of the answer asked for by the client. Raises InvalidField."""
    if (given := fields.take("prediction", OBJECT)) is None:
        return None
    told = Fields(given, "prediction.")
    if (kind := told.need("type", TEXT)) != "content":
        raise InvalidField.of("prediction.type", kind, "content")
    content = told.need("content", Kind("a text or a list of parts", (str, list)))
    told.refuse_rest()
    return content if isinstance(content, str) else joined("prediction.content", content)


def joined(name: str, parts: list[Any]) -> str:
    """The text of a content in parts. Raises InvalidField."""
    texts = []
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal") or not TEXT.has(part.get(kind)):
            problem = "must be a part with a text: models here read text alone"
            raise InvalidField(problem, field=f"{name}[{number}]")
        texts.append(part[kind])
    return "\n".join(texts)


GUIDES = (
    ("json", pb.GUIDE_TYPE_JSON_SCHEMA, Kind("a schema or its text", (dict, str))),
    ("regex", pb.GUIDE_TYPE_REGEX, TEXT),
    ("choice", pb.GUIDE_TYPE_CHOICE, LIST),
    ("grammar", pb.GUIDE_TYPE_EBNF_GRAMMAR, TEXT),
)
"""Guides of vLLM's `structured_outputs`."""


def _read_structure(fields: Fields, guide: pb.GuidedDecodingConfig) -> None:
    """Reads vLLM's `structured_outputs` into the guide."""
    if (given := fields.take("structured_outputs", OBJECT)) is None:
        return
    told = Fields(given, "structured_outputs.")
    fields.call("structured_outputs", "guided_decoding.guide", "guided_decoding.guide_type")
    if TEXT.has(schema := given.get("json")):
        try:
            parse_text(schema)
        except InvalidRequest:
            problem = f"must be JSON, nested at most {MAX_DEPTH} levels deep"
            raise InvalidField(problem, field="structured_outputs.json") from None
    guides = {kind: told.take(name, value) for name, kind, value in GUIDES}
    asked = {kind: value for kind, value in guides.items() if value is not None}
    check_all("structured_outputs.choice", asked.get(pb.GUIDE_TYPE_CHOICE, ()), TEXT)
    is_json = told.take_flag("json_object")
    told.refuse_rest()
    if guide.guide_type or len(asked) + is_json != 1:
        raise InvalidField("must be one guide, and the only one", field="structured_outputs")
    guide.guide_type = pb.GUIDE_TYPE_JSON
    for kind, value in asked.items():
        guide.guide_type = kind
        guide.guide = value if isinstance(value, str) else orjson.dumps(value).decode()


def _read_bias(fields: Fields, sampling: pb.SamplingConfig) -> None:
    """Adds weights to the scores of ids."""
    for key, weight in (fields.take("logit_bias", OBJECT) or {}).items():
        is_id = key.isascii() and key.isdecimal() and len(key) <= MOST_DIGITS
        if not is_id or not NUMBER.has(weight):
            raise InvalidField("must have a number for each token id", field="logit_bias")
        if not LEAST_BIAS <= weight <= MOST_BIAS:
            raise InvalidField.of("logit_bias", weight, f"in [{LEAST_BIAS}, {MOST_BIAS}]")
        ids = checked_ids("logit_bias", [int(key)])
        sampling.embedding_bias_token_ids.append(pb.TokenIds(ids=ids))
        sampling.embedding_bias_weights.append(weight)
