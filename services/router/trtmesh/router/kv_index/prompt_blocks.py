"""Names of a prompt's KV blocks."""

from __future__ import annotations

from collections.abc import Sequence

from trtmesh.chassis.block_hashes import chain, root_hash
from trtmesh.chassis.vocabulary import Adapter, GenerationConfig

BEYOND_TOKENS = ("prompt_tuning.", "multimodal.", "encoder_decoder.")
"""Groups of fields with an effect on a prompt's KV beyond the token ids."""


def prefix_root(config: GenerationConfig, adapter: Adapter | None = None) -> int | None:
    """Parent of a prompt's first block; None for KV not reused or not determined by the tokens.

    `adapter` is the config's adapter in the workers' version.
    """
    if not config.kv_cache.reuse:
        return None
    if any(path.startswith(BEYOND_TOKENS) for path in config.fields_set):
        return None
    if config.lora is None:
        return root_hash(config.kv_cache.salt)
    if adapter is None:
        return None
    return root_hash(config.kv_cache.salt, adapter=adapter)


class PromptBlocks:
    """Hashes of a prompt's full blocks, computed on first use for each block size."""

    def __init__(self, root: int | None, token_ids: Sequence[int]) -> None:
        self._root = root
        self._token_ids = token_ids
        self._by_size: dict[int, list[int]] = {}

    @property
    def prompt_tokens(self) -> int:
        return len(self._token_ids)

    def hashes(self, tokens_per_block: int) -> list[int]:
        """A hash per full block; empty without reusable KV."""
        if self._root is None or tokens_per_block < 1:
            return []
        known = self._by_size.get(tokens_per_block)
        if known is None:
            known = chain(self._root, self._token_ids, tokens_per_block)
            self._by_size[tokens_per_block] = known
        return known
