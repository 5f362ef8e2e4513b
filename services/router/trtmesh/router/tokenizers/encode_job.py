"""Texts on their way to ids."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trtmesh.v1 import tokenizer_pb2 as pb

if TYPE_CHECKING:
    from trtmesh.router.tokenizers.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class EncodeJob:
    """Texts on their way to ids. The handle of `command` is filled in by the tokenizer that takes it."""

    model: str
    command: pb.EncodeCommand
    tokenizer: Tokenizer | None = None
    """Which one has it now."""
    losses: int = 0
    """How many tokenizers were lost while they had it."""
    done: asyncio.Future[pb.Encoded] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
