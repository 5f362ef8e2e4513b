"""Turns an item's texts into token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trtmesh.chassis.errors import AdapterNotFound, PromptEmpty, SchemaMismatch
from trtmesh.chassis.frozen import frozen
from trtmesh.chassis.vocabulary import Adapter, GenerationConfig, Lora
from trtmesh.router.adapters.adapters import ItemAdapter
from trtmesh.router.kv_index import PromptBlocks, prefix_root
from trtmesh.router.placement import AdapterNeed
from trtmesh.router.requests.context import RequestContext
from trtmesh.router.values.request import ItemRequest
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import tokenizer_pb2 as tokenizer_pb


@frozen
class EncodedItem:
    """An item in token ids. `word_ids` has the ids of the bias texts, in order, and `spelled_ids` all spellings of the
    bad texts; `stop_vocabulary` has the stop texts of a beam search."""

    token_ids: Sequence[int]
    word_ids: list[tuple[int, ...]]
    spelled_ids: list[tuple[int, ...]]
    blocks: PromptBlocks
    adapter: ItemAdapter | None = None
    stop_vocabulary: pb.StopVocabulary | None = None
    end_ids: tuple[int, ...] = ()
    """The tokenizer's, where they end the item besides the model's."""

    @property
    def identity(self) -> Adapter | None:
        """The adapter with its version."""
        return None if self.adapter is None else self.adapter.identity

    @property
    def need(self) -> AdapterNeed | None:
        """The adapter as placement sees it."""
        if self.adapter is None:
            return None
        deliverable = self.adapter.version is not None
        return AdapterNeed(self.adapter.identity, self.adapter.rank, deliverable)


LONG_TEXT = 2**14
"""Characters of a text that may have more ids than a worker takes."""

HUGE_TEXT = 2**18
"""Characters of a text that takes milliseconds to copy."""

BEGINNINGS = 3
"""Only a text so many times as long as a worker's limit has a beginning encoded first: six characters for each token
taken by a worker. English has four or five."""

MOST_NAMES = 8
"""Most registered adapters that an error lists."""

NOT_ENCODED = EncodedItem([], [], [], PromptBlocks(None, ()))


async def encode_item(
    context: RequestContext, item: ItemRequest, traceparent: str = ""
) -> EncodedItem:
    """Encodes prompt and words in a single exchange, traced below a span if any. Raises UnsupportedField, before the
    item costs a tokenizer anything, PromptEmpty, AdapterNotFound or the pool's errors."""
    context.mesh.fleet.check_fields(context.model, item.worker_fields)
    prompt, config, stopping = item.prompt, item.config, item.config.stopping
    words, spelled_words = config.sampling.embedding_bias_texts, stopping.bad_texts
    token_ids: Sequence[int] = prompt.token_ids or ()
    word_ids: list[tuple[int, ...]] = []
    spelled_ids: list[tuple[int, ...]] = []
    # Only where they take part in a beam search.
    stop_texts = stopping.stop_texts if config.beam_search.beam_width > 1 else ()
    stop_vocabulary = None
    if prompt.text is not None or words or spelled_words or stop_texts:
        # A rendered conversation is about as long.
        text = prompt.text or "" if item.chat is None else item.chat.messages
        texts = (text, *words, *spelled_words)
        context.mesh.tokenizers.check_size(context.model, *texts)
        most = 0
        if len(text) >= LONG_TEXT:
            most = context.mesh.fleet.most_prompt_tokens(context.model)
            if item.chat is None:
                await _check_beginnings(context, text, most)
        command = tokenizer_pb.EncodeCommand(
            request_id=context.request_id,
            text=prompt.text,
            add_special_tokens=prompt.add_special_tokens,
            skip_special_tokens=config.output.skip_special_tokens,
            max_token_ids=most,
        )
        if words or spelled_words or stop_texts:
            command.words.extend(words)
            command.spelled_words.extend(spelled_words)
            command.stop_texts.extend(stop_texts)
        if item.chat is not None:
            command.chat.CopyFrom(item.chat)
        if traceparent:
            command.traceparent = traceparent
        if len(text) >= HUGE_TEXT:
            # To copy it again, to send it, is work of another turn.
            await context.starting.turn_before_rest()
        encoded = await context.mesh.tokenizers.encode(context.model, command)
        if encoded.omitted_token_ids:
            count = encoded.omitted_token_ids
            context.mesh.fleet.check_length(context.model, count, or_more=True)
            # A worker that takes more has joined meanwhile.
            return await encode_item(context, item, traceparent)
        if words:
            word_ids = [tuple(word.ids) for word in encoded.words]
        if len(encoded.spelled_words) != len(spelled_words):
            # What is forbidden must not be generated after all.
            raise SchemaMismatch("the tokenizer cannot spell bad_texts; run the same release")
        if spelled_words:
            spelled_ids = [
                tuple(ids.ids) for spelled in encoded.spelled_words for ids in spelled.spellings
            ]
        if prompt.text is not None:
            # A slice, since a list made by iteration takes half as long again.
            token_ids = encoded.token_ids[:]
        if stop_texts:
            stop_vocabulary = encoded.stop_vocabulary
    if not token_ids:
        raise PromptEmpty("the prompt has no tokens; send at least one token or character")
    adapter = None if config.lora is None else await _adapter_of(context, config.lora)
    root = prefix_root(config, adapter.identity if adapter else None)
    blocks = PromptBlocks(root, token_ids)
    has_text = prompt.text is not None or config.output.text
    end_ids = context.mesh.tokenizers.end_ids_of(context.model) if has_text else ()
    return EncodedItem(token_ids, word_ids, spelled_ids, blocks, adapter, stop_vocabulary, end_ids)


async def _check_beginnings(context: RequestContext, text: str, most: int) -> None:
    """Raises PromptTooLong if a beginning of the text has twice the `most` tokens of a worker. The whole text may have
    a few tokens fewer, and is not copied or sent. 0 is no limit.

    A text of ordinary length is not looked at: the tokenizer would encode the text twice.
    """
    # Four ids for a character, as those that are none's word have, are more than twice as many as a worker takes.
    size = most * 5 // 8
    while 0 < size < len(text) // BEGINNINGS:
        command = tokenizer_pb.EncodeCommand(
            request_id=context.request_id, text=text[:size], max_token_ids=2 * most
        )
        encoded = await context.mesh.tokenizers.encode(context.model, command)
        if count := encoded.omitted_token_ids:
            context.mesh.fleet.check_length(context.model, count, or_more=True)
        size *= 4


async def with_adapter_of_now(
    context: RequestContext, config: GenerationConfig, encoded: EncodedItem
) -> EncodedItem:
    """Returns the item with the present version of its adapter. Raises AdapterNotFound or InvalidField."""
    assert config.lora is not None
    adapter = await _adapter_of(context, config.lora)
    blocks = PromptBlocks(prefix_root(config, adapter.identity), encoded.token_ids)
    return replace(encoded, adapter=adapter, blocks=blocks)


async def _adapter_of(context: RequestContext, asked: Lora) -> ItemAdapter:
    """The version of an adapter that the item keeps. Raises AdapterNotFound or InvalidField."""
    mesh, model = context.mesh, context.model
    found = await mesh.adapters.find(model, asked, context.request_id)
    found = found or mesh.fleet.reported_adapter(model, asked, mesh.adapters.removed)
    if found is None:
        # Another router of the directory may have registered it since the last look.
        await mesh.adapters.refresh()
        found = await mesh.adapters.find(model, asked, context.request_id)
    if found is not None:
        return found
    field, value = ("lora.name", repr(asked.name)) if asked.id is None else ("lora.id", asked.id)
    version = f" in version {asked.version}" if asked.version else ""
    names = mesh.adapters.names(model, MOST_NAMES)
    known = f" (registered: {', '.join(names)})" if names else ""
    raise AdapterNotFound(
        f"is {value}, an adapter that neither this router nor a worker holds{version}{known}; send it with its"
        " weights, or register it with `trtmesh adapters add`",
        field=field,
        value=str(value),
    )
