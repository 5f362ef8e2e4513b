"""Maps KV blocks to workers, from the workers' own events and from this router's latest placements."""

from trtmesh.router.kv_index.feed import KvFeed
from trtmesh.router.kv_index.index import KvIndex, PromptBlocks, prefix_root

__all__ = ["KvFeed", "KvIndex", "PromptBlocks", "prefix_root"]
