"""The prompt of an item in ids, and the ids of its words."""

from __future__ import annotations

from dataclasses import dataclass

from trtmesh.chassis.errors import PromptEmpty
from trtmesh.router.kv_index import PromptBlocks, prefix_root
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.router.values.request import ItemRequest
from trtmesh.v1 import tokenizer_pb2 as tokenizer_pb


@dataclass(frozen=True, slots=True)
class EncodedItem:
    """What a worker gets of an item's texts. `word_ids` has the ids of `ItemRequest.words`, in their order."""

    token_ids: list[int]
    word_ids: list[tuple[int, ...]]
    blocks: PromptBlocks


NOT_ENCODED = EncodedItem([], [], PromptBlocks(None, ()))
"""Of an item that was not encoded yet."""


async def encode_item(
    item: ItemRequest, tokenizers: TokenizerPool, model: str, request_id: str
) -> EncodedItem:
    """Texts to ids, all in one exchange with a tokenizer; ids need none. Raises PromptEmpty, or what the pool does."""
    prompt, words = item.prompt, item.words
    token_ids = list(prompt.token_ids or ())
    word_ids: list[tuple[int, ...]] = []
    if prompt.text is not None or words:
        command = tokenizer_pb.EncodeCommand(
            request_id=request_id,
            text=prompt.text,
            add_special_tokens=prompt.add_special_tokens,
            words=words,
        )
        encoded = await tokenizers.encode(model, command)
        word_ids = [tuple(word.ids) for word in encoded.words]
        if prompt.text is not None:
            token_ids = list(encoded.token_ids)
    if not token_ids:
        raise PromptEmpty("the prompt has no tokens; send at least one token or character")
    return EncodedItem(token_ids, word_ids, PromptBlocks(prefix_root(item.config), token_ids))
