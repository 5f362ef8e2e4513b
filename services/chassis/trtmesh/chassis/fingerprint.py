"""Fingerprint of a tokenizer: processes with equal fingerprints encode and decode identically.

The hash covers the parts with an effect on ids and text. A reformatted file, a new chat template or another
`model_max_length` keeps the fingerprint. No tokenizer is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from trtmesh.chassis.model_dir import read_object

VOCABULARY_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")
"""Tokenizer files of models without tokenizer.json."""

TOKENIZER_PARTS = (
    "added_tokens",
    "decoder",
    "model",
    "normalizer",
    "post_processor",
    "pre_tokenizer",
)

SPECIAL_TOKENS = (
    "additional_special_tokens",
    "bos_token",
    "cls_token",
    "eos_token",
    "extra_special_tokens",
    "mask_token",
    "pad_token",
    "sep_token",
    "unk_token",
)

CONFIG_PARTS = (
    *SPECIAL_TOKENS,
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "added_tokens_decoder",
    "clean_up_tokenization_spaces",
    "do_lower_case",
    "legacy",
    "spaces_between_special_tokens",
    "split_special_tokens",
    "strip_accents",
    "tokenize_chinese_chars",
    "tokenizer_class",
)


ANY_TOKENIZER = "any"
"""Reported by a worker without a model, suitable for every tokenizer."""


def tokenizer_fits(worker: str, mesh: str) -> bool:
    """Returns whether a worker takes ids of the mesh's tokenizer. A mesh without a tokenizer passes on ids of clients;
    a worker with an unknown tokenizer fits no tokenizer."""
    return not mesh or worker in (mesh, ANY_TOKENIZER)


def tokenizer_fingerprint(model_dir: Path) -> str:
    """64 hexadecimal digits, or "" without a tokenizer. Raises ModelUnusable for an invalid file."""
    parts = list(_vocabulary(model_dir))
    if not parts:
        return ""
    parts += _chosen(model_dir / "tokenizer_config.json", _is_config_part)
    parts += _chosen(model_dir / "special_tokens_map.json", SPECIAL_TOKENS.__contains__)
    parts += _chosen(model_dir / "added_tokens.json", lambda token: True)  # noqa: ARG005 - every one
    digest = sha256()
    for name, content in parts:
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _vocabulary(model_dir: Path) -> Iterator[tuple[str, bytes]]:
    chosen = _chosen(model_dir / "tokenizer.json", TOKENIZER_PARTS.__contains__)
    if chosen:
        yield from chosen
        return
    for name in VOCABULARY_FILES:
        file = model_dir / name
        if file.is_file():
            yield name, file.read_bytes()


def _is_config_part(key: str) -> bool:
    # Models have special tokens with names of their own.
    return key in CONFIG_PARTS or key.endswith("_token")


def _chosen(file: Path, is_part: Callable[[str], bool]) -> list[tuple[str, bytes]]:
    """The parts of a JSON file in canonical form; empty without the file."""
    if not file.is_file():
        return []
    content = read_object(file)
    parts = {key: content[key] for key in content if is_part(key) and content[key] is not None}
    _join_merges(parts.get("model"))
    return [(file.name, json.dumps(parts, sort_keys=True, ensure_ascii=False).encode())]


def _join_merges(model: Any) -> None:
    """Unifies merges written as "a b" and as ["a", "b"]."""
    if isinstance(model, dict) and isinstance(model.get("merges"), list):
        model["merges"] = [
            merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]
        ]
