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
    "kv": "self.cached_prompt_tokens",
    "adapter": "self.adapter is not None",
    "checksum": "self.submitted_tokens > self.prompt_tokens",
}
"""Sequences whose tokens a fault changes: all, those that reuse KV, those of adapters, those continued from the KV of
another worker."""

OTHER_DEVICE = """
from dataclasses import replace
from trtmesh.engine.backends.simulated import backend

described = backend._info
backend._info = lambda settings: replace(described(settings), computation={"device": "another"})
"""
"""A worker that tells of another device."""

PACED = """
import time
import torch

def wait(module, positional):
    if isinstance(module, torch.nn.Embedding):
        time.sleep({seconds})

torch.nn.modules.module.register_module_forward_pre_hook(wait)
"""
"""No fault: steps of a real model last, and cost nothing, so that no stream ends before a test wants it to."""

TORCH_FAULT = """
import os
import torch
from trtmesh.engine.backends.torch.memory.kvcache import KvCache
from trtmesh.engine.backends.torch.model.lora_layers import UpdateTable

caches, tables, begin, make = [], [], KvCache.__init__, UpdateTable.__init__

def kept(self, *given, **named):
    begin(self, *given, **named)
    caches.append(self)

def made(self, *given, **named):
    make(self, *given, **named)
    tables.append(self)

KvCache.__init__, UpdateTable.__init__ = kept, made
# The first value of the first token of each block; the last token's row of the embedding; a rank of all slots.
places = {{
    "kv": lambda embedding: [cache.pool[:, 0, 1, 0, 0, 0] for cache in caches],
    "weights": lambda embedding: [embedding.weight[{token}, 0]],
    "adapter": lambda embedding: [tables[0].b[:, 0, 0]],
}}
flipped = ""

def hook(module, positional):
    global flipped
    if isinstance(module, torch.nn.Embedding):
        with open({flag!r}) as file:
            asked = file.read()
        for name in {{flipped, asked}} - {{""}} if asked != flipped else ():
            for values in places[name](module):
                values.copy_((values.clone().view(torch.int32) ^ 1 << 30).view(torch.float32))
        flipped = asked

torch.nn.modules.module.register_module_forward_pre_hook(hook)
"""
"""Flips the highest bit of an exponent in what a file names, and back once it names another: such a bit changes tokens,
most others of one weight do not."""

FIRST_CHANGED = 7
"""The first offset that the change of the token kernel changes."""

OTHER_DEFAULT = """
from dataclasses import fields
from trtmesh.chassis.vocabulary import Sampling

begin = Sampling.__init__
defaults = dict(zip([field.name for field in fields(Sampling)], begin.__defaults__, strict=True))
begin.__defaults__ = tuple((defaults | {"repetition_penalty": 1.4}).values())
"""
"""Another default of a field that clients leave out."""

CHANGES = {
    "simulated": {
        "token kernel": f"""
from trtmesh.engine.backends.simulated.sequence import SimulatedSequence

allowed = SimulatedSequence._allowed

def changed(self, run, source):
    first = len(self.tokens) - self.prompt_tokens
    return [token ^ (at >= {FIRST_CHANGED}) for at, token in enumerate(allowed(self, run, source), first)]

SimulatedSequence._allowed = changed
""",
        "default": OTHER_DEFAULT,
    },
    "torch": {
        "norm kernel": """
import torch

rsqrt = torch.rsqrt
torch.rsqrt = lambda values: 1.02 * rsqrt(values)
""",
        "default": OTHER_DEFAULT,
    },
}
"""A change of one kernel, or of one default, for all workers of a release."""


def corrupted(folder: Path, code: str) -> dict[str, str]:
    """The environment of a process that runs `code` at its start."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
