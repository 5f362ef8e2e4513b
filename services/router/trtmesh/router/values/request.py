"""Parses a GenerateRequest into a request valid by construction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from os import urandom
from types import MappingProxyType
from typing import TypeAlias

from trtmesh.chassis.errors import InvalidField, TrtmeshError, forget_frames
from trtmesh.chassis.frozen import frozen
from trtmesh.chassis.parsing import parse_config, parse_prompt
from trtmesh.chassis.vocabulary import Adapter, GenerationConfig, Lora, Prompt
from trtmesh.router.values.handoff_state import HandoffState, read_state
from trtmesh.v1 import chat_pb2 as chat_pb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

MAX_REQUEST_ID_LENGTH = 256
MAX_MODEL_CHARACTERS = 1024
MAX_ITEMS = 1024
"""Most prompts of one request."""
MAX_REQUEST_TOKENS = 2**21
"""Limit for the token ids of all prompts of a request together."""
MEMO_ENTRIES, MEMO_BYTES = 256, 256
"""Parsed configs kept, and the size of the largest: most requests of a client have the options of the one before."""
ADAPTER_ENTRIES = 2**14
"""Parsed names of adapters kept, of half a kilobyte each: clients have few options, and may ask for many adapters."""
NONE_REFUSED: Mapping[int, TrtmeshError] = MappingProxyType({})

OF_CHAT = Prompt(text="", add_special_tokens=False)
"""The prompt of a conversation that is not rendered yet."""

HALVES = frozenset({pb.GENERATION_PHASE_CONTEXT_ONLY, pb.GENERATION_PHASE_GENERATION_ONLY})
"""Phases of items that a client hands over by itself. Neither half has a receipt, since no one call has all tokens."""

PHASE, STATE = "handoff.phase", "handoff.state"

ROUTER_FIELDS = frozenset(
    {
        PHASE,
        STATE,
        "output.exclude_prompt",
        "output.receipt",
        "output.skip_special_tokens",
        "output.stream",
        "output.text",
        "sampling.embedding_bias_texts",
        "stopping.bad_texts",
        "stopping.include_stop_text",
        "stopping.stop_texts",
    }
)
"""Config fields for router and tokenizers; workers never see them."""

IDS_OF_TEXTS = {
    "stopping.bad_texts": "stopping.bad_token_ids",
    "sampling.embedding_bias_texts": "sampling.embedding_bias_token_ids",
}
"""Fields of texts, with the fields of their ids for the worker."""


UNSENT_FIELDS = (ROUTER_FIELDS - IDS_OF_TEXTS.keys()) | {"lora.weights", "lora.config"}
"""Fields that a worker need not support: adapters arrive apart from items."""


def with_texts(supported: Iterable[str]) -> frozenset[str]:
    """A worker's supported fields, plus text fields supported after tokenization."""
    fields = frozenset(supported)
    return fields | {texts for texts, ids in IDS_OF_TEXTS.items() if ids in fields}


Config: TypeAlias = tuple[GenerationConfig, pb.GenerationConfig]
"""A config, and its message for the worker."""

UNCONFIGURED: Config = GenerationConfig(), pb.GenerationConfig()
"""Of requests without a config."""


@frozen
class ItemRequest:
    """A prompt with a config. `message` is the unparsed config, for the worker."""

    batch_index: int
    prompt: Prompt
    config: GenerationConfig
    message: pb.GenerationConfig
    draw_index: int | None = None
    """The batch_index of the draws, if another."""
    state: HandoffState | None = None
    """The first half of a generation_only item."""
    chat: chat_pb.Chat | None = None
    """The conversation of which a tokenizer makes the prompt's text, which is empty until then."""
    sequences: int = field(init=False)
    """Number of returned sequences."""
    is_context_only: bool = field(init=False)
    """Whether the item ends after its first token, with KV for the client to bring back."""
    worker_fields: frozenset[str] = field(init=False)
    """Fields for the worker to support, under the client's names."""

    def __post_init__(self) -> None:
        config = self.config
        handoff, fields = config.handoff, config.fields_set - UNSENT_FIELDS
        is_half = handoff is not None and handoff.phase == pb.GENERATION_PHASE_CONTEXT_ONLY
        object.__setattr__(self, "is_context_only", is_half)
        object.__setattr__(self, "sequences", config.sequences)
        object.__setattr__(self, "worker_fields", fields | {PHASE} if is_half else fields)

    @property
    def told_prompt_tokens(self) -> int | None:
        """Length of a prompt sent as token ids; None for a text."""
        return None if self.prompt.token_ids is None else len(self.prompt.token_ids)

    def has_kv_to_share(self, prompt_tokens: int) -> bool:
        """Whether a prefill has KV to hand over: that of all prompt tokens but the last for several sequences."""
        return self.sequences == 1 or prompt_tokens > 1


@dataclass(frozen=True, slots=True)
class RefusedItem:
    """An invalid item; it fails alone."""

    batch_index: int
    error: TrtmeshError


@frozen
class GenerationRequest:
    """A request with at least one valid item."""

    request_id: str
    model: str
    items: tuple[ItemRequest, ...]
    refused: tuple[RefusedItem, ...] = ()
    default_seed: int | None = None
    """Seed of items without a seed; None draws one."""
    is_chat: bool = False
    """Whether it is a conversation, maybe rendered already."""

    @property
    def size(self) -> int:
        """Number of items, refused ones included."""
        return len(self.items) + len(self.refused)


def parse_request(
    message: router_pb.GenerateRequest,
    metadata_request_id: str,
    refused: Mapping[int, TrtmeshError] = NONE_REFUSED,
    *,
    is_large: bool = False,
    by_seed: bool = False,
    default_seed: int | None = None,
) -> GenerationRequest:
    """Parses a request. Items of `refused` are known to be invalid. With `is_large`, the configs are not measured,
    because measuring would hold the interpreter as long as serialising. With `by_seed`, draws depend on the seed alone,
    and not on the item, where the item has a seed or there is a `default_seed`. Raises InvalidRequest with the field
    and, without any valid item, the first batch_index."""
    request_id = message.request_id or metadata_request_id or urandom(8).hex()
    if len(message.model) > MAX_MODEL_CHARACTERS:
        limit = f"the name of a model, with at most {MAX_MODEL_CHARACTERS} characters"
        raise InvalidField.of("model", message.model, limit)
    if len(request_id) > MAX_REQUEST_ID_LENGTH or not request_id.isprintable():
        limit = f"printable and have at most {MAX_REQUEST_ID_LENGTH} characters"
        raise InvalidField.of("request_id", request_id, limit)
    if not 1 <= len(message.items) <= MAX_ITEMS:
        raise InvalidField(
            f"has {len(message.items)} prompts but must have 1 to {MAX_ITEMS}",
            field="items",
            value=str(len(message.items)),
            limit=f"1 to {MAX_ITEMS}",
        )
    if len(message.items) > 1:
        _check_tokens(message.items)
    read_config = _read_large_config if is_large else _read_config
    shared = read_config(message.config) if message.HasField("config") else UNCONFIGURED
    errors = dict(refused)
    items: list[ItemRequest] = []
    for batch_index, item in enumerate(message.items):
        if batch_index not in errors:
            try:
                items.append(
                    _parse_item(
                        batch_index,
                        item,
                        shared,
                        read_config,
                        by_seed=by_seed,
                        is_seeded=default_seed is not None,
                    )
                )
            except TrtmeshError as error:
                forget_frames(error)
                errors[batch_index] = error
    if not items:
        raise errors[0].of_item(0)
    invalid: tuple[RefusedItem, ...] = ()
    if errors:
        invalid = tuple(RefusedItem(index, error) for index, error in sorted(errors.items()))
    is_chat = items[0].chat is not None
    return GenerationRequest(
        request_id, message.model, tuple(items), invalid, default_seed, is_chat
    )


def _read_config(message: pb.GenerationConfig) -> Config:
    """Parses a config: once for all requests of a client with one set of options."""
    if message.ByteSize() > MEMO_BYTES:
        return parse_config(message), message
    if message.HasField("lora"):
        return _with_lora(message), message
    return _parsed(message.SerializeToString()), message


def _read_large_config(message: pb.GenerationConfig) -> Config:
    """Copies the message: a part of a message keeps the memory of the whole, prompts included, as long as it lives."""
    copy = pb.GenerationConfig()
    copy.CopyFrom(message)
    return parse_config(message), copy


def _with_lora(message: pb.GenerationConfig) -> GenerationConfig:
    """Parses the adapter and all else apart: clients have few options, and may ask for many adapters."""
    rest = pb.GenerationConfig()
    rest.CopyFrom(message)
    rest.ClearField("lora")
    try:
        config = _parsed(rest.SerializeToString())
        lora, fields = _parsed_lora(message.lora.SerializeToString())
    except TrtmeshError:
        # Of several errors the first field's is told.
        return parse_config(message)
    return replace(config, lora=lora, fields_set=config.fields_set | fields)


@lru_cache(maxsize=MEMO_ENTRIES)
def _parsed(serialized: bytes) -> GenerationConfig:
    return parse_config(pb.GenerationConfig.FromString(serialized))


@lru_cache(maxsize=ADAPTER_ENTRIES)
def _parsed_lora(serialized: bytes) -> tuple[Lora | None, frozenset[str]]:
    lora = pb.LoraConfig.FromString(serialized)
    config = parse_config(pb.GenerationConfig(lora=lora))
    return config.lora, config.fields_set


def _check_tokens(items: Sequence[router_pb.GenerateItem]) -> None:
    tokens = sum(len(item.prompt.token_ids.ids) for item in items)
    if tokens > MAX_REQUEST_TOKENS:
        raise InvalidField(
            f"have {tokens} token ids together but must have at most {MAX_REQUEST_TOKENS}",
            field="items",
            value=f"{tokens} token ids",
            limit=f"at most {MAX_REQUEST_TOKENS}",
        )


def parse_stopped(message: router_pb.StopRequest) -> frozenset[int]:
    """The named items of a stop, counted before they are copied. Raises InvalidField."""
    if len(message.batch_indexes) > MAX_ITEMS:
        raise InvalidField(
            f"has {len(message.batch_indexes)} entries but must have at most {MAX_ITEMS}",
            field="batch_indexes",
            value=f"{len(message.batch_indexes)} entries",
            limit=f"at most {MAX_ITEMS}",
        )
    return frozenset(message.batch_indexes)


def _parse_item(
    batch_index: int,
    item: router_pb.GenerateItem,
    shared: Config,
    read_config: Callable[[pb.GenerationConfig], Config],
    *,
    by_seed: bool,
    is_seeded: bool,
) -> ItemRequest:
    chat = item.chat if item.HasField("chat") else None
    if chat is not None and item.HasField("prompt"):
        raise InvalidField("exclude each other; set one of them", fields=("prompt", "chat"))
    prompt = parse_prompt(item.prompt) if chat is None else OF_CHAT
    config, message = read_config(item.config) if item.HasField("config") else shared
    handoff = config.handoff
    if config.output.receipt and handoff is not None and handoff.phase in HALVES:
        raise InvalidField(
            "is not given for a half of an item; send it whole, or without",
            field="output.receipt",
            limit_field="handoff.phase",
        )
    draw_index = 0 if by_seed and (is_seeded or config.sampling.seed is not None) else None
    state = None if handoff is None or handoff.state is None else read_state(handoff.state)
    return ItemRequest(batch_index, prompt, config, message, draw_index, state, chat)


def fill_worker_config(
    config: pb.GenerationConfig,
    item: ItemRequest,
    prompt_tokens: int,
    word_ids: list[tuple[int, ...]],
    spelled_ids: list[tuple[int, ...]],
    drawn_seed: int,
    adapter: Adapter | None = None,
) -> None:
    """Writes the worker's config: without the router's fields, with ids for texts, a seed, and the adapter's version.

    `word_ids` are the ids of the bias texts in order; empty entries are dropped. `spelled_ids` are all spellings of
    the bad texts. `drawn_seed` replaces a missing seed. A single extra id of a text prompt is repeated for each token.
    """
    config.CopyFrom(item.message if adapter is None else versioned_config(item.message, adapter))
    for path in item.config.fields_set & ROUTER_FIELDS:
        group, name = path.split(".")
        getattr(config, group).ClearField(name)
    for ids in spelled_ids:
        config.stopping.bad_token_ids.add(ids=ids)
    if word_ids:
        _replace_bias_texts(config.sampling, word_ids)
    extra_ids = config.prompt_tuning.extra_ids
    if item.prompt.text is not None and len(extra_ids) == 1:
        # The sender of a text does not know the number of tokens.
        extra_ids.extend([extra_ids[0]] * (prompt_tokens - 1))
    seed = item.config.sampling.seed
    config.sampling.seed = drawn_seed if seed is None else seed


def versioned_config(message: pb.GenerationConfig, adapter: Adapter) -> pb.GenerationConfig:
    """Returns a copy with name and version of the adapter, without the weights, which may be large."""
    copied = {each.name: value for each, value in message.ListFields() if each.name != "lora"}
    lora = pb.LoraConfig(id=adapter.id, name=adapter.name, version=adapter.version)
    return pb.GenerationConfig(**copied, lora=lora)


def _replace_bias_texts(sampling: pb.SamplingConfig, word_ids: list[tuple[int, ...]]) -> None:
    """Puts the ids of bias texts before the client's lists of ids, in the order of the weights."""
    lists = word_ids + [tuple(given.ids) for given in sampling.embedding_bias_token_ids]
    weighted = [
        (ids, w) for ids, w in zip(lists, sampling.embedding_bias_weights, strict=True) if ids
    ]
    del sampling.embedding_bias_token_ids[:]
    sampling.embedding_bias_token_ids.extend(pb.TokenIds(ids=ids) for ids, _ in weighted)
    sampling.embedding_bias_weights[:] = [weight for _, weight in weighted]
