"""Turns an item's texts into token ids."""

from __future__ import annotations

from dataclasses import dataclass

from trtmesh.chassis.errors import AdapterNotFound, PromptEmpty
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.fleet.adapters import KeptAdapter
from trtmesh.router.kv_index import PromptBlocks, prefix_root
from trtmesh.router.placement import AdapterNeed
from trtmesh.router.requests.context import RequestContext
from trtmesh.router.values.request import ItemRequest
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import tokenizer_pb2 as tokenizer_pb


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """An item in token ids. `word_ids` has the ids of `ItemRequest.words`, in order; `stop_vocabulary` has the stop
    texts of a beam search."""

    token_ids: list[int]
    word_ids: list[tuple[int, ...]]
    blocks: PromptBlocks
    adapter: Adapter | None = None
    kept: KeptAdapter | None = None
    """The adapter with its weights, where a request brought it to this router."""
    stop_vocabulary: pb.StopVocabulary | None = None

    @property
    def need(self) -> AdapterNeed | None:
        """The adapter as placement sees it."""
        if self.adapter is None:
            return None
        return AdapterNeed(self.adapter, deliverable=self.kept is not None)


NOT_ENCODED = EncodedItem([], [], PromptBlocks(None, ()))


async def encode_item(context: RequestContext, item: ItemRequest) -> EncodedItem:
    """Encodes prompt and words in a single exchange. Raises PromptEmpty, AdapterNotFound or the pool's errors."""
    prompt, words = item.prompt, item.words
    token_ids = list(prompt.token_ids or ())
    word_ids: list[tuple[int, ...]] = []
    stop_texts = item.searched_texts
    stop_vocabulary = None
    if prompt.text is not None or words or stop_texts:
        command = tokenizer_pb.EncodeCommand(
            request_id=context.request_id,
            text=prompt.text,
            add_special_tokens=prompt.add_special_tokens,
            words=words,
            stop_texts=stop_texts,
            skip_special_tokens=item.config.output.skip_special_tokens,
        )
        encoded = await context.mesh.tokenizers.encode(context.model, command)
        word_ids = [tuple(word.ids) for word in encoded.words]
        if prompt.text is not None:
            token_ids = list(encoded.token_ids)
        if stop_texts:
            stop_vocabulary = encoded.stop_vocabulary
    if not token_ids:
        raise PromptEmpty("the prompt has no tokens; send at least one token or character")
    lora, fleet = item.config.lora, context.mesh.fleet
    kept = fleet.adapters.find(context.model, lora, item.message.lora) if lora else None
    adapter = kept.identity if kept else fleet.adapter_of(context.model, lora)
    if adapter and not adapter.version:
        raise AdapterNotFound(
            f"is {adapter.id}, an adapter that neither this router nor a worker holds; send it with its weights",
            field="lora.id",
            value=str(adapter.id),
        )
    blocks = PromptBlocks(prefix_root(item.config, adapter), token_ids)
    return EncodedItem(token_ids, word_ids, blocks, adapter, kept, stop_vocabulary)
