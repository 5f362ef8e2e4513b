"""Loads tokenizer, special ids and chat templates of a model directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.chassis.fingerprint import VOCABULARY_FILES, tokenizer_fingerprint
from trtmesh.chassis.model_dir import check_model_dir, read_optional
from trtmesh.chassis.stop_texts import SpecialTokens
from trtmesh.chassis.tokenizer_loading import (
    CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_FILE,
    complete,
    load_tokenizer,
)
from trtmesh.tokenizer.chat.templates import SPECIAL_TOKENS, ChatTemplates, read_templates
from trtmesh.tokenizer.conversion import convert
from trtmesh.tokenizer.defaults import read_defaults
from trtmesh.tokenizer.detokenizers.base import Detokenizer
from trtmesh.tokenizer.detokenizers.choice import choose_detokenizer
from trtmesh.tokenizer.detokenizers.continuation import Continuations
from trtmesh.v1 import generation_pb2 as pb

_SPECIAL_TOKEN_FILES = (CONFIG_FILE, SPECIAL_TOKENS_FILE)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer and its metadata."""

    model: str
    fingerprint: str
    kind: str
    size: int
    """The largest id plus 1; ids may have gaps."""
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    special_ids: tuple[int, ...]
    special_tokens: SpecialTokens
    chat_templates: ChatTemplates
    defaults: pb.GenerationConfig
    """What the model recommends for requests."""
    tokenizer: Tokenizer
    detokenizer: Detokenizer
    continuations: Continuations

    @property
    def door_fingerprint(self) -> str:
        """Equal where chat templates and defaults are."""
        given = self.chat_templates
        own = [given.response_template] if given.response_template else []
        templates = json.dumps([dict(given.by_name), *own], sort_keys=True).encode()
        return sha256(templates + self.defaults.SerializeToString(deterministic=True)).hexdigest()


def load_vocabulary(model_dir: Path) -> Vocabulary:
    """Reads a model directory; takes seconds if files must be converted. Raises ModelUnusable with file and
    problem."""
    tokenizer = _load_tokenizer(model_dir)
    # Texts are encoded whole or refused: truncation and padding of the file do not apply.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if not tokenizer.get_vocab_size(with_added_tokens=False):
        raise ModelUnusable(f"{model_dir / TOKENIZER_FILE}: the vocabulary is empty")
    configs = [read_optional(model_dir / name) for name in _SPECIAL_TOKEN_FILES]
    added = tokenizer.get_added_tokens_decoder()
    detokenizer = choose_detokenizer(tokenizer)
    return Vocabulary(
        model=model_dir.resolve().name,
        fingerprint=tokenizer_fingerprint(model_dir),
        kind=type(tokenizer.model).__name__,
        size=size,
        bos_id=_special_id(tokenizer, configs, "bos_token"),
        eos_id=_special_id(tokenizer, configs, "eos_token"),
        pad_id=_special_id(tokenizer, configs, "pad_token"),
        special_ids=tuple(sorted(i for i, token in added.items() if token.special)),
        special_tokens=SpecialTokens.of(tokenizer),
        chat_templates=read_templates(model_dir, configs[0], _named_of(configs)),
        defaults=read_defaults(model_dir),
        tokenizer=tokenizer,
        detokenizer=detokenizer,
        continuations=Continuations(tokenizer, detokenizer),
    )


def _load_tokenizer(model_dir: Path) -> Tokenizer:
    check_model_dir(model_dir)
    file = model_dir / TOKENIZER_FILE
    if file.is_file():
        return load_tokenizer(model_dir)
    if any((model_dir / name).is_file() for name in VOCABULARY_FILES):
        tokenizer = convert(model_dir)
        complete(tokenizer, model_dir)
        return tokenizer
    raise ModelUnusable(
        f"model directory {model_dir} has neither {TOKENIZER_FILE} nor any of {', '.join(VOCABULARY_FILES)}"
    )


def _special_id(tokenizer: Tokenizer, configs: list[dict[str, Any]], name: str) -> int | None:
    """Id of the first token named `name` in a file and known to the vocabulary."""
    ids = (tokenizer.token_to_id(token) for token in _named_tokens(configs, name))
    return next((token_id for token_id in ids if token_id is not None), None)


def _named_tokens(configs: list[dict[str, Any]], name: str) -> Iterator[str]:
    for config in configs:
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            yield content


def _named_of(configs: list[dict[str, Any]]) -> dict[str, str]:
    """The special tokens by the names that templates know."""
    tokens = {name: next(_named_tokens(configs, name), None) for name in SPECIAL_TOKENS}
    return {name: token for name, token in tokens.items() if token is not None}
