"""The names of a prompt's KV blocks."""

from __future__ import annotations

from collections.abc import Sequence

from trtmesh.chassis.block_hashes import chain, root_hash
from trtmesh.chassis.vocabulary import GenerationConfig

BEYOND_TOKENS = ("prompt_tuning.", "multimodal.", "encoder_decoder.")
"""Groups of fields that change a prompt's KV in ways that its token ids do not tell."""


def prefix_root(config: GenerationConfig) -> int | None:
    """Parent of the first block of an item's prompt; None where its KV is not reused or not known by its tokens."""
    if not config.kv_cache.reuse:
        return None
    if any(path.startswith(BEYOND_TOKENS) for path in config.fields_set):
        return None
    if config.lora is None:
        return root_hash(config.kv_cache.salt)
    if config.lora.id is None or config.lora.weights is not None:
        return None
    return root_hash(config.kv_cache.salt, adapter=(config.lora.id, ""))


class PromptBlocks:
    """Hashes of a prompt's full blocks, by the number of tokens in a block, computed when first asked for."""

    def __init__(self, root: int | None, token_ids: Sequence[int]) -> None:
        self._root = root
        self._token_ids = token_ids
        self._by_size: dict[int, list[int]] = {}

    def hashes(self, tokens_per_block: int) -> list[int]:
        """One for each full block; none where the KV cannot be reused."""
        if self._root is None or tokens_per_block < 1:
            return []
        known = self._by_size.get(tokens_per_block)
        if known is None:
            known = chain(self._root, self._token_ids, tokens_per_block)
            self._by_size[tokens_per_block] = known
        return known
