"""Engines whose results are silently wrong: sitecustomize.py, which Python runs at start, changes what they compute."""

from __future__ import annotations

import os
from pathlib import Path

SIMULATED_FAULT = """
from trtmesh.engine.backends.simulated.sequence import SimulatedSequence

allowed = SimulatedSequence._allowed

def wrong(self, run, source):
    tokens = allowed(self, run, source)
    return [token ^ 1 for token in tokens] if {condition} else tokens

SimulatedSequence._allowed = wrong
"""

CONDITIONS = {
    "weights": "True",
    "settings": "True",
    "kv": "self.cached_prompt_tokens",
    "adapter": "self.adapter is not None",
    "checksum": "self.submitted_tokens > self.prompt_tokens",
}
"""Sequences whose tokens a fault changes: all, those that reuse KV, those of adapters, those continued from the KV of
another worker."""

TORCH_FAULT = """
import os
import torch
from trtmesh.engine.backends.torch.memory.kvcache import KvCache

caches, begin = [], KvCache.__init__

def kept(self, *given, **named):
    begin(self, *given, **named)
    caches.append(self)

KvCache.__init__ = kept
state = {{"done": False}}

def hook(module, positional):
    if not state["done"] and isinstance(module, torch.nn.Embedding) and os.path.exists({flag!r}):
        state["done"] = True
        for cache in caches:
            cache.pool.neg_()

torch.nn.modules.module.register_module_forward_pre_hook(hook)
"""
"""Spoils all KV of a worker once a file is there."""


def corrupted(folder: Path, code: str) -> dict[str, str]:
    """The environment of a process that runs `code` at its start."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
