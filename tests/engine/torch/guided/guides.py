"""Guides for tests, and texts of tiny models' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.torch.harness import configure
from tokenizers import Tokenizer
from trtmesh.chassis.vocabulary import GenerationConfig, GuidedDecoding
from trtmesh.v1 import generation_pb2 as pb


def guided(
    kind: str, guide: str | None = None, max_whitespace: int | None = None, **values: Any
) -> GenerationConfig:
    """A config with a guide, and fields by leaf names."""
    asked = GuidedDecoding(pb.GuideType.Value(f"GUIDE_TYPE_{kind}"), guide, max_whitespace)
    return replace(configure(**values), guided_decoding=asked)


def text_of(model: Path, token_ids: Sequence[int]) -> str:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return str(tokenizer.decode(list(token_ids)))
