"""Loads the tokenizer of a model directory as transformers' AutoTokenizer does: tokenizer.json with the declarations of
the other files.

Importing transformers would take seconds and hundreds of megabytes. Settings that only transformers supports lead to a
warning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtmesh.chassis.errors import ModelUnusable
from trtmesh.chassis.model_dir import read_optional
from trtmesh.chassis.panics import is_failure

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"

NAMED_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)
EXTRA_TOKENS = ("extra_special_tokens", "additional_special_tokens")
"""The first present file counts."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
PLAIN_CLASSES = ("", "PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers without changes to the components of tokenizer.json."""


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Reads tokenizer.json and the other files. Raises ModelUnusable with the file and the problem."""
    from tokenizers import Tokenizer

    file = model_dir / TOKENIZER_FILE
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except BaseException as error:
        # The library raises plain Exception, or panics.
        if not is_failure(error):
            raise
        raise ModelUnusable(f"{file} is not a usable tokenizer: {error}") from error
    complete(tokenizer, model_dir)
    return tokenizer


def complete(tokenizer: Tokenizer, model_dir: Path) -> None:
    """Applies the declarations of the other files. Raises ModelUnusable unless each is a JSON object."""
    file = model_dir / CONFIG_FILE
    config = read_optional(file)
    _add_tokens(tokenizer, model_dir, config)
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    _apply_prefix_space(tokenizer, file, config)
    if config.get("clean_up_tokenization_spaces") is True and not _cleans_up(tokenizer):
        _warn(file, "clean_up_tokenization_spaces", "the texts stay as the decoder makes them")


def for_words(tokenizer: Tokenizer) -> Tokenizer:
    """Returns the tokenizer of words. Words may name special tokens even if prompts must not."""
    if not tokenizer.encode_special_tokens:
        return tokenizer
    from tokenizers import Tokenizer

    # The text of a tokenizer lacks this setting.
    return Tokenizer.from_str(tokenizer.to_str())


def _add_tokens(tokenizer: Tokenizer, model_dir: Path, config: Mapping[str, Any]) -> None:
    """Adds the tokens missing from tokenizer.json, first the tokens with ids."""
    where, stated = CONFIG_FILE, config.get("added_tokens_decoder")
    if stated is None:
        # As in transformers, older files count only in the absence of this file.
        config = {**config, **read_optional(model_dir / SPECIAL_TOKENS_FILE)}
    named, extra = list(_named_tokens(config)), list(_extra_tokens(config))
    if stated is None:
        where, ids = ADDED_TOKENS_FILE, read_optional(model_dir / ADDED_TOKENS_FILE)
        special = {token.content for token in named + extra}
        stated = {ids[name]: {"content": name, "special": name in special} for name in ids}
    with_ids = dict(_tokens_with_ids(model_dir / where, stated))
    names = {token.content for token in named}
    for token in with_ids.values():
        token.special = token.special or token.content in names
    known = tokenizer.get_added_tokens_decoder().values()
    there = {token.content for token in [*known, *with_ids.values()]}
    others = (token for token in named + extra if token.content not in there)
    tokenizer.add_tokens([*with_ids.values(), *others])
    for token_id, token in with_ids.items():
        if (actual := tokenizer.token_to_id(token.content)) != token_id:
            what = f"{token.content!r} has id {actual}, as with transformers, not {token_id}"
            _warn(model_dir / where, "added_tokens_decoder", what)


def _named_tokens(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Returns the tokens with a name, in transformers' order of addition."""
    own = [
        value
        for key, value in config.items()
        if key.endswith("_token") and key not in NAMED_TOKENS and isinstance(value, str)
    ]
    # A list of them has no names.
    named = config.get(EXTRA_TOKENS[0])
    own += named.values() if isinstance(named, dict) else ()
    for value in [*map(config.get, NAMED_TOKENS), *own]:
        if (token := _token(value, special=True)) is not None:
            yield token


def _extra_tokens(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """The special tokens without a name."""
    extra = next((config[key] for key in EXTRA_TOKENS if config.get(key)), None)
    for value in extra if isinstance(extra, list) else ():
        if (token := _token(value, special=True)) is not None:
            yield token


def _tokens_with_ids(file: Path, stated: Any) -> Iterator[tuple[int, AddedToken]]:
    entries: Iterable[tuple[Any, Any]] = stated.items() if isinstance(stated, dict) else ()
    for token_id, value in sorted(entries, key=lambda entry: int(entry[0])):
        if (token := _token(value, special=False)) is None:
            raise ModelUnusable(f"{file} declares no token for id {token_id}, but {value!r}")
        yield int(token_id), token


def _token(value: Any, *, special: bool) -> AddedToken | None:
    """Returns a token given as a text or an object, or None for anything else."""
    from tokenizers import AddedToken

    if isinstance(value, str):
        value = {"content": value}
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return None
    flags = {"special": special} | {flag: value[flag] for flag in FLAGS if flag in value}
    return AddedToken(value["content"], **flags)


def _apply_prefix_space(tokenizer: Tokenizer, file: Path, config: Mapping[str, Any]) -> None:
    """Makes texts begin with a space or not, by `add_prefix_space`, if the tokenizer's class heeds the option."""
    wanted = config.get("add_prefix_space")
    if wanted is None or config.get("tokenizer_class", "") in PLAIN_CLASSES:
        return
    whole = tokenizer.pre_tokenizer
    part = json.loads(whole.__getstate__()) if whole else {}
    steps = part.get("pretokenizers", [part])
    levels = [step for step in steps if step.get("type") == "ByteLevel"]
    if not levels:
        if wanted != _begins_with_space(tokenizer):
            _warn(
                file,
                "add_prefix_space",
                f"{TOKENIZER_FILE} decides whether a text begins with a space",
            )
        return
    if levels[0]["add_prefix_space"] != wanted:
        from tokenizers.pre_tokenizers import ByteLevel, Sequence

        made = ByteLevel(
            add_prefix_space=wanted,
            trim_offsets=levels[0].get("trim_offsets", True),
            use_regex=levels[0].get("use_regex", True),
        )
        place = steps.index(levels[0])
        if len(steps) == 1:
            tokenizer.pre_tokenizer = made
        else:
            sequence = tokenizer.pre_tokenizer
            tokenizer.pre_tokenizer = Sequence(
                [made if index == place else sequence[index] for index in range(len(steps))]
            )


def _begins_with_space(tokenizer: Tokenizer) -> bool:
    """Whether a text and the same text after a space have the same first token."""
    plain, spaced = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("a", " a"))
    return bool(plain[:1] == spaced[:1])


def _cleans_up(tokenizer: Tokenizer) -> bool:
    """Returns whether texts need no cleaning: transformers does not clean texts of BPE, and some decoders clean
    already."""
    decoder = tokenizer.decoder
    cleans = decoder is not None and json.loads(decoder.__getstate__()).get("cleanup") is True
    return cleans or type(tokenizer.model).__name__ == "BPE"


def _warn(file: Path, key: str, what: str) -> None:
    log.warning("%s: %s is not followed to the letter: %s", file, key, what)
