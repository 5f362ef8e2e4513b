"""Which worker has which KV blocks: fed by the workers' own events, so that routers over the same workers agree, and by
what this router has just sent where."""

from trtmesh.router.kv_index.feed import KvFeed
from trtmesh.router.kv_index.index import KvIndex
from trtmesh.router.kv_index.prompt_blocks import PromptBlocks, prefix_root

__all__ = ["KvFeed", "KvIndex", "PromptBlocks", "prefix_root"]
