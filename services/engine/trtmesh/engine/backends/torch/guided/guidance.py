"""Grammars by llguidance. Nothing else than this file and `trial.py` imports the library."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.vocabulary import GuidedDecoding
from trtmesh.engine.backends.torch.guided.grammars import Check, Row
from trtmesh.engine.backends.torch.guided.schemas import may_take_long, place_of, read_schema
from trtmesh.engine.backends.torch.guided.structural_tags import Readers, TagGrammar, tag_grammar
from trtmesh.engine.backends.torch.guided.trial import (
    MAX_ROW_ITEMS,
    SMALL_BYTES,
    SMALL_TAG_BYTES,
    limits,
    problem_of_trial,
)
from trtmesh.engine.guides import FIELD, plain
from trtmesh.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

MOST_BYTES, MOST_TAG_BYTES = 65_536, 262_144
"""Most bytes of a guide, and of structural tags: the library's limits bound what all schemas in them take together."""
QUOTED = re.compile(r'"(\\.|[^"\\])*"?|(#|//)[^\n]*|/(\\.|[^/\\])+/?|<[^<>\s]+>')
"""Matches what has no names in Lark's notation: a text, a comment, an expression, a special token. Ends are optional: a
search for each missing one would take long, and the library refuses such a grammar."""
TEMPERATURE = re.compile(r"\btemperature\s*=")
CAPTURE = re.compile(r"capture\s*(=|,|\]\s*:)")
"""Matches the attribute of a rule, or `stop_capture`; an optional part by this name ends in `]` without a colon."""
SLICES = [rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (8, 15, 20, 25)]
"""Tokens that the library allows at once where the rest of a string may be so long, beside its own lengths, 10 and 30:
a string near its limit takes it through the vocabulary, which is a hundred times as long."""
JSON_TYPES = (pb.GUIDE_TYPE_JSON, pb.GUIDE_TYPE_JSON_SCHEMA, pb.GUIDE_TYPE_STRUCTURAL_TAG)


class GuidanceMatcher:
    """Implements Matcher. Copies share an automaton, which the library locks: they wait here instead, where others have
    Python's lock meanwhile."""

    def __init__(
        self,
        own: LLMatcher,
        end_ids: Sequence[int],
        vocabulary_size: int,
        automaton: threading.Lock | None = None,
    ) -> None:
        """`end_ids` are the tokenizer's."""
        self.own = own
        self.end_ids = end_ids
        self._vocabulary_size = vocabulary_size
        self.automaton = automaton or threading.Lock()

    def copy(self) -> GuidanceMatcher:
        own = self.own.deep_copy()
        return GuidanceMatcher(own, self.end_ids, self._vocabulary_size, self.automaton)

    @property
    def mask_bytes(self) -> int:
        # Words of 32 bits.
        return -(-self._vocabulary_size // 32) * 4

    def accept(self, token_ids: Sequence[int]) -> int:
        with self.automaton:
            return self.own.try_consume_tokens(list(token_ids))

    def forced(self) -> Sequence[int]:
        with self.automaton:
            return self.own.compute_ff_tokens()

    def fill(self, row: Row) -> str:
        with self.automaton:
            self.own.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        for token in self.end_ids:
            row[token >> 3] &= 0xFF ^ (1 << (token & 7))
        return self.problem

    @property
    def may_end(self) -> bool:
        with self.automaton:
            return self.own.is_accepting()

    @property
    def problem(self) -> str:
        return _sentence(self.own.get_error()) if self.own.is_error() else ""


MOST_PASSED = 8
"""Grammars that need no second trial."""
MAX_WHITESPACE = 8
"""Most blanks and line ends in a row between the parts of JSON, where an item does not say otherwise: models that may
write any number sometimes write nothing else."""


class GuidanceCompiler:
    """Compiles guides for a tokenizer."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._passed = deque[str](maxlen=MOST_PASSED)

    def __call__(self, asked: GuidedDecoding, check: Check = lambda: None) -> GuidanceMatcher:
        """Implements Compile."""
        most = MAX_WHITESPACE if asked.max_whitespace is None else asked.max_whitespace
        try:
            return Compilation(self._tokenizer, most, check, self._passed).of(plain(asked))
        except (ValueError, ArithmeticError) as error:
            # Numbers of thousands of digits, NaN, halves of surrogate pairs.
            raise InvalidField(f"cannot be read: {_sentence(str(error))}", field=FIELD) from None


class Compilation:
    """The work for a guide. Each part is bounded, because no part can be interrupted."""

    def __init__(
        self, tokenizer: LLTokenizer, max_whitespace: int, check: Check, passed: deque[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._passed = passed
        """The last grammars that a process has compiled: each further automaton of one is compiled here alone."""
        self._check = check
        most = max_whitespace
        self._options: dict[str, object] = {
            "whitespace_flexible": most > 0,
            "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{most}}}" if most else None,
            "lenient": False,
            # Without \\u, which would be another spelling of a name that the schema has a property for.
            "json_allowed_escapes": 'nrbtf\\"',
        }
        """The library's options for JSON."""

    def of(self, asked: GuidedDecoding) -> GuidanceMatcher:
        """Raises InvalidField."""
        guide = asked.guide or ""
        is_tag = asked.guide_type == pb.GUIDE_TYPE_STRUCTURAL_TAG
        most = MOST_TAG_BYTES if is_tag else MOST_BYTES
        if len(guide.encode()) > most:
            raise InvalidField.of(FIELD, f"{len(guide.encode())} bytes", f"at most {most}")
        if asked.max_whitespace is not None and asked.guide_type not in JSON_TYPES:
            field = "guided_decoding.max_whitespace"
            raise InvalidField("is set, but only guides of JSON have white space", field=field)
        match asked.guide_type:
            case pb.GUIDE_TYPE_JSON:
                return self._of_schema({"type": "object"})
            case pb.GUIDE_TYPE_JSON_SCHEMA:
                return self._of_schema(read_schema(guide))
            case pb.GUIDE_TYPE_REGEX:
                return self._compiled(_one(f"start: {_regex(guide)}"))
            case pb.GUIDE_TYPE_EBNF_GRAMMAR:
                grammar = _one(_lark(guide))
                # What two dozen expressions have in common takes minutes to find.
                self._try_apart(grammar, SMALL_BYTES if {"&", "~"}.isdisjoint(guide) else 0)
                return self._compiled(grammar, MAX_ROW_ITEMS)
            case pb.GUIDE_TYPE_STRUCTURAL_TAG:
                readers = Readers(self._options, _lark, _regex, self._special)
                return self._of_tag(tag_grammar(guide, readers))
        kinds = "JSON, JSON_SCHEMA, REGEX, CHOICE, EBNF_GRAMMAR or STRUCTURAL_TAG"
        name = pb.GuideType.Name(pb.GuideType.ValueType(asked.guide_type))
        raise InvalidField.of("guided_decoding.guide_type", name, f"{kinds} on this worker")

    def _special(self, name: str) -> int | None:
        ids = self._tokenizer.tokenize_str(name, parse_special=True)
        is_special = len(ids) == 1 and self._tokenizer.is_special_token(ids[0])
        return ids[0] if is_special else None

    def _of_tag(self, tag: TagGrammar) -> GuidanceMatcher:
        is_hard = tag.is_ambiguous or any(may_take_long(schema) for _, schema in tag.schemas)
        self._try_apart(tag.text, 0 if is_hard else SMALL_TAG_BYTES)
        try:
            return self._compiled(tag.text, MAX_ROW_ITEMS if tag.is_ambiguous else None)
        except InvalidField:
            for path, schema in tag.schemas:
                if not may_take_long(schema):
                    self._follow(schema, path)
            # Only together are they too much, or one that takes long.
            raise

    def _of_schema(self, schema: dict[str, object]) -> GuidanceMatcher:
        if may_take_long(schema):
            self._try_apart(_schema_grammar(schema, self._options))
        return self._begun(self._follow(schema))

    def _follow(self, schema: dict[str, object], base: str = "") -> LLMatcher:
        """The grammar of a schema at its start. Raises InvalidField with the path of the problem below `base`."""
        grammar_of = partial(_schema_grammar, options=self._options)

        def problem_of(part: dict[str, object]) -> str:
            return self._try(grammar_of(part))[1]

        own, problem = self._try(grammar_of(schema))
        if problem:
            place = place_of(problem, schema, problem_of)
            place = base + place.removesuffix("/") or "/"
            raise InvalidField(f"at {place} cannot be followed: {problem}", field=FIELD)
        return own

    def _try_apart(self, grammar: str, small_bytes: int = 0) -> None:
        """Compiles a grammar of more than `small_bytes` in a process. Raises InvalidField if it takes too long."""
        if len(grammar.encode()) > small_bytes and grammar not in self._passed:
            if problem := problem_of_trial(grammar, self._check):
                raise InvalidField(f"cannot be followed: {problem}", field=FIELD)
            self._passed.append(grammar)

    def _compiled(self, grammar: str, max_row_items: int | None = None) -> GuidanceMatcher:
        own, problem = self._try(grammar, max_row_items)
        if problem:
            raise InvalidField(f"cannot be followed: {problem}", field=FIELD)
        return self._begun(own)

    def _begun(self, own: LLMatcher) -> GuidanceMatcher:
        """The first mask may take as long as a thousand others, and copies share the results. A second mask fails if
        the first met a limit."""
        for _ in range(2):
            self._check()
            first = own.deep_copy()
            first.compute_bitmask()
            if first.is_error():
                problem = _sentence(first.get_error())
                raise InvalidField(f"cannot be followed: {problem}", field=FIELD)
        return GuidanceMatcher(own, self._tokenizer.eos_tokens, self._tokenizer.vocab_size)

    def _try(self, grammar: str, max_row_items: int | None = None) -> tuple[LLMatcher, str]:
        """Returns a grammar at the start, and why the grammar cannot be followed, at least in part."""
        from llguidance import LLMatcher

        self._check()
        own = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits(max_row_items))
        problem = own.get_error() or "; ".join(own.get_grammar_warnings())
        return own, _sentence(problem)


def compiler_for(
    model_dir: Path, vocabulary_size: int, end_ids: Sequence[int]
) -> GuidanceCompiler | None:
    """Returns the compiler for a model's tokenizer, or None, with the reason in the log. Takes seconds for 100,000 ids.
    `vocabulary_size` is the size of the logits."""
    file = model_dir / "tokenizer.json"
    if find_spec("llguidance") is None or not file.is_file():
        log.info("guided decoding needs llguidance and the model's tokenizer.json; it is refused")
        return None
    from llguidance import LLTokenizer

    try:
        text = file.read_text(encoding="utf-8")
        tokenizer = LLTokenizer(
            text,
            n_vocab=vocabulary_size,
            eos_token=list(end_ids) or None,
            slices=[*LLTokenizer.json_slices(), *SLICES],
        )
    except (OSError, ValueError) as error:
        log.warning("guided decoding is refused, since llguidance cannot use %s: %s", file, error)
        return None
    return GuidanceCompiler(tokenizer)


def _schema_grammar(schema: dict[str, object], options: Any) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def _one(grammar: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(grammar)


def _regex(expression: str) -> str:
    """An expression in Lark's notation."""
    from llguidance import LLMatcher

    (grammar,) = json.loads(LLMatcher.grammar_from_regex(expression))["grammars"]
    # Without characters it would begin a comment.
    return str(grammar["lark_grammar"]).removeprefix("start: ") if expression else '""'


def _lark(text: str) -> str:
    """Returns a grammar in Lark's notation, from Lark's or GBNF's notation."""
    from llguidance.gbnf_to_lark import is_lark_syntax

    grammar = text if is_lark_syntax(text) else _lark_of_gbnf(text)
    bare = QUOTED.sub(" ", grammar)
    if "%json" in bare:
        # Beyond the limits of schemas.
        raise InvalidField("has %json, which a grammar must not contain", field=FIELD)
    if TEMPERATURE.search(bare):
        # The library leaves the temperature to the caller.
        raise InvalidField("has a temperature, which is that of the item alone", field=FIELD)
    if CAPTURE.search(bare):
        raise InvalidField("has a capture, which no answer would return", field=FIELD)
    return grammar


def _lark_of_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import GrammarParser, resolve

    try:
        rules = GrammarParser().parse(text)
        # Inner rules first: for each rule out of order, the library looks at all rules again.
        rules = {name: rules[name] for name in _inner_first(rules)}
        resolve(rules)
        return "\n".join(["%llguidance {}", *map(str, rules.values())])
    except Exception as error:  # noqa: BLE001 - a parser in Python, with errors of every kind
        raise InvalidField(f"is no grammar: {_sentence(str(error))}", field=FIELD) from None


def _inner_first(rules: dict[str, Any]) -> list[str]:
    """The names of GBNF's rules."""
    found = dict[str, None]()
    for rule in rules:
        waiting, seen = [rule], set[str]()
        while waiting:
            name = waiting[-1]
            if name in found or name not in rules or name in seen:
                found.setdefault(waiting.pop())
                continue
            seen.add(name)
            waiting += _used(rules[name])
    return [name for name in found if name in rules]


def _used(node: Any) -> list[str]:
    """The names of the rules in an expression."""
    waiting, names = [node], []
    while waiting:
        part = waiting.pop()
        waiting += part.children()
        if type(part).__name__ == "RuleRefNode":
            names.append(part.name)
    return names


def _sentence(problem: str) -> str:
    """The library's own sentence, on a line."""
    return " ".join(problem.replace("<non-verbose/>", "").split())
