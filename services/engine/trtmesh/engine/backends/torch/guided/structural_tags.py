"""Structural tags: fixed texts around free text, JSON, expressions and grammars, as TensorRT-LLM and vLLM take them.

Either `{"type": "structural_tag", "format": {...}}` in xgrammar's notation, or the older `{"structures": [{"begin":
"<f=a>", "schema": {}, "end": "</f>"}], "triggers": ["<f="]}`, in which a trigger in free text begins a tag. A special
token matches no text: `token`, at the beginning of a tag too, is one by its name. Neighbouring expressions and fixed
texts are followed as one automaton; other parts take the longest text they can.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from types import UnionType
from typing import Any, NamedTuple

from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.json_text import load_json
from trtmesh.engine.backends.torch.guided.schemas import MOST_DEPTH, Schema, read_schema, refuse
from trtmesh.engine.guides import FIELD

MOST_TEXTS = 32
"""Most triggers, ends or excludes in a list: free text is searched for all of them at once."""
SHAPE = '{"structures": [{"begin": "...", "schema": {...}, "end": "..."}], "triggers": ["..."]}'
ANY = "/(?s:.*)/"
CHOSEN = {"at_least_one": False, "stop_after_first": False}
FORMATS: dict[str, dict[str, Any]] = {
    "const_string": {"value": str},
    "json_schema": {"json_schema": dict | bool, "style": ("json",), "any_order": (False,)}
    | {"max_whitespace_cnt": (None,), "excludes": ([],)},
    "regex": {"pattern": str},
    "grammar": {"grammar": str},
    "any_text": {"excludes": [], "max_tokens": (None,), "max_chars": (None,)},
    "sequence": {"elements": list},
    "or": {"elements": list},
    "optional": {"content": dict},
    "star": {"content": dict},
    "plus": {"content": dict},
    "repeat": {"content": dict, "min": int, "max": int},
    "token": {"token": str},
    "tag": {"begin": str | dict, "content": dict, "end": str | list},
    "triggered_tags": {"triggers": list, "tags": list, "excludes": [], **CHOSEN},
    "token_triggered_tags": {"trigger_tokens": list, "tags": list, "exclude_tokens": ([],)}
    | CHOSEN,
    "tags_with_separator": {"tags": list, "separator": str, **CHOSEN},
}
"""The members of each format: a type for a required member, else the default. A default in a tuple is the only accepted
value."""

FREE = ("any_text", "triggered_tags", "token_triggered_tags")
"""Formats of free text, which look for their end themselves."""

Begin = str | Schema
"""A text, or the format of a token."""
Ends = Sequence[str] | None
"""Texts at the end of free text, as part of the text; none without such texts, and None if nothing follows."""


class Expression(NamedTuple):
    """An expression in Lark's notation."""

    text: str
    is_regular: bool
    """Whether an automaton can follow the part, together with such neighbours."""


class TagGrammar(NamedTuple):
    text: str
    is_ambiguous: bool
    """Whether a text may have many readings under it."""
    schemas: Sequence[tuple[str, Schema]]
    """The schemas in it, with their paths."""


class Readers(NamedTuple):
    """The library's side of a tag."""

    options: Schema
    """For JSON."""
    lark: Callable[[str], str]
    """Reads a grammar."""
    regex: Callable[[str], str]
    """Reads an expression."""
    special: Callable[[str], int | None]
    """The id of a special token by its name, if there is such a token."""


def tag_grammar(text: str, readers: Readers) -> TagGrammar:
    """The grammar of a tag. Raises InvalidField."""
    try:
        given = load_json(text)
    except json.JSONDecodeError as error:
        raise InvalidField(f"is not JSON: {error}", field=FIELD) from None
    writer = Writer(readers)
    if isinstance(given, dict) and "format" in given:
        if given.keys() != {"type", "format"} or given["type"] != "structural_tag":
            problem = 'must be {"type": "structural_tag", "format": {...}}'
            raise InvalidField(problem, field=FIELD)
        return writer.grammar(writer.part(given["format"], "/format", None))
    if not _has(given, {"structures": list, "triggers": list}, ["type"]):
        raise InvalidField(f"must be {SHAPE}", field=FIELD)
    if given.get("type", "structural_tag") != "structural_tag" or not given["structures"]:
        raise InvalidField(f"must be {SHAPE}, with a structure", field=FIELD)
    # Before the work for a thousand structures, which competes with the steps.
    _texts(given["triggers"], "/triggers")
    tags = []
    for index, each in enumerate(given["structures"]):
        path = f"/structures/{index}"
        if not _has(each, {"begin": str, "schema": dict, "end": str}):
            refuse(path, f"must be as in {SHAPE}")
        schema = {"type": "json_schema", "json_schema": each["schema"]}
        tags.append((f"{path}/begin", each["begin"], writer.ended(schema, path, [each["end"]], ())))
    options = {"triggers": given["triggers"], "excludes": [], **CHOSEN}
    return writer.grammar(writer.triggered("", options, tags, None))


class Writer:
    """Collects rules for the parts of a tag."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._rules: list[str] = []
        self._names: dict[str, str] = {}
        """Of expressions, by their text."""
        self._free: dict[tuple[str, ...], str] = {}
        """Names of free text, by the texts that it must not have."""
        self._grammars: list[dict[str, str]] = []
        self._schemas: list[tuple[str, Schema]] = []
        self._is_ambiguous = False

    def grammar(self, start: Expression) -> TagGrammar:
        rules = "\n".join(["%llguidance {}", f"start: {self._named(start)}", *self._rules])
        whole = [{"name": "tag", "lark_grammar": rules}, *self._grammars]
        return TagGrammar(json.dumps({"grammars": whole}), self._is_ambiguous, self._schemas)

    def part(self, value: Any, path: str, ends: Ends) -> Expression:
        """A format; free text continues up to one of `ends`."""
        given = _read(value, path)
        match kind := given["type"]:
            case "const_string":
                return _fixed(given["value"])
            case "regex":
                return Expression(self._readers.regex(given["pattern"]), is_regular=True)
            case "json_schema":
                return self._json(given["json_schema"], f"{path}/json_schema")
            case "grammar":
                self._is_ambiguous = True
                name, grammar = f"g{len(self._grammars)}", self._readers.lark(given["grammar"])
                self._grammars.append({"name": name, "lark_grammar": grammar})
                return Expression(f"@{name}", is_regular=False)
            case "any_text":
                return self._text(path, _texts(given["excludes"], f"{path}/excludes"), ends)
            case "sequence" | "or":
                return self._elements(kind, given["elements"], f"{path}/elements", ends)
            case "token":
                return self._token(given["token"], f"{path}/token")
            case "tag":
                rest = self.ended(given["content"], path, _ends(given, path), ends)
                return self._row([self._begin(given["begin"], f"{path}/begin"), rest])
            case "triggered_tags":
                tags = [
                    (place, begin if isinstance(begin, str) else "", rest)
                    for place, begin, rest in self._tags(given["tags"], f"{path}/tags")
                ]
                return self.triggered(path, given, tags, ends)
            case "token_triggered_tags":
                return self._triggered_by_token(path, given, ends)
            case "tags_with_separator":
                return self._separated(given, f"{path}/tags")
        return self._times(given, path)

    def ended(self, content: Any, path: str, own: Sequence[str], ends: Ends) -> Expression:
        """The content of a tag, and one of the tag's `own` ends."""
        path = f"{path}/content"
        if list(own) == [""]:
            return self.part(content, path, ends)
        if content.get("type") in FREE:
            return self.part(content, path, own)
        return self._row([self.part(content, path, ()), self._or(map(_fixed, own))])

    def triggered(
        self, path: str, given: Schema, tags: Sequence[tuple[str, str, Expression]], ends: Ends
    ) -> Expression:
        """Free text with triggers at the beginning of `tags`: path and text of each beginning, and the rest."""
        triggers = _texts(given["triggers"], f"{path}/triggers")
        for index, trigger in enumerate(triggers):
            if not any(begin.startswith(trigger) for _, begin, _ in tags):
                refuse(f"{path}/triggers/{index}", "begins no structure")
        without = [*_texts(given["excludes"], f"{path}/excludes"), *triggers]
        bodies: dict[str, list[Expression]] = {}
        for place, begin, rest in tags:
            # Where several triggers match, a text reaches the end of the shortest first.
            trigger = min((own for own in triggers if begin.startswith(own)), key=len, default="")
            if not trigger:
                refuse(place, "starts with none of the triggers")
            body = self._row([_fixed(begin[len(trigger) :]), rest])
            bodies.setdefault(trigger, []).append(body)
        found = self._or(
            self._row([self._text(path, without, [trigger]), self._or(own)])
            for trigger, own in bodies.items()
        )
        first = self._or(self._row([_fixed(begin), rest]) for _, begin, rest in tags)
        return self._amid(given, found, first, self._text(path, without, ends), ends)

    def _triggered_by_token(self, path: str, given: Schema, ends: Ends) -> Expression:
        """Free text with special tokens at the beginning of tags. Their names are no part of the text: it would seem to
        begin a tag."""
        triggers, bodies = _texts(given["trigger_tokens"], f"{path}/trigger_tokens"), []
        for place, begin, rest in self._tags(given["tags"], f"{path}/tags"):
            if isinstance(begin, str) or begin.get("token") not in triggers:
                refuse(place, "is none of the trigger tokens")
            bodies.append(self._row([self._begin(begin, place), rest]))
        first = self._or(bodies)
        found = self._row([self._text(path, [*triggers, *(ends or ())], None), first])
        return self._amid(given, found, first, self._text(path, triggers, ends), ends)

    def _amid(
        self, given: Schema, found: Expression, first: Expression, text: Expression, ends: Ends
    ) -> Expression:
        """Tags amid free text: `found` is text up to the end of a tag, `first` a tag, and `text` what follows the
        last one."""
        end = self._or(map(_fixed, ends or [""]))
        if given["stop_after_first"]:
            last = self._row([first if given["at_least_one"] else found, end])
            return last if given["at_least_one"] else self._or([last, text])
        parts = [Expression(f"({found.text})*", is_regular=False), text]
        return self._row([first, *parts] if given["at_least_one"] else parts)

    def _tags(self, given: Sequence[Any], path: str) -> list[tuple[str, Begin, Expression]]:
        tags = []
        for index, each in enumerate(given):
            own = f"{path}/{index}"
            tag = _read(each, own)
            if tag["type"] != "tag":
                refuse(own, "must be a tag")
            rest = self._rule(self.ended(tag["content"], own, _ends(tag, own), ()))
            tags.append((f"{own}/begin", tag["begin"], rest))
        return tags or refuse(path, "is empty")

    def _separated(self, given: Schema, path: str) -> Expression:
        tags = self._tags(given["tags"], path)
        tag = self._rule(
            self._or(self._row([self._begin(begin, own), rest]) for own, begin, rest in tags)
        )
        if not given["stop_after_first"]:
            more = self._row([_fixed(given["separator"]), tag])
            tag = self._row([tag, Expression(f"({more.text})*", more.is_regular)])
        return tag if given["at_least_one"] else self._or([tag, _fixed("")])

    def _elements(self, kind: str, elements: Any, path: str, ends: Ends) -> Expression:
        if not elements:
            refuse(path, "is empty")
        last = len(elements) - 1
        parts = [
            self.part(each, f"{path}/{index}", ends if kind == "or" or index == last else ())
            for index, each in enumerate(elements)
        ]
        return self._or(parts) if kind == "or" else self._row(parts)

    def _times(self, given: Schema, path: str) -> Expression:
        self._is_ambiguous = True
        part = self.part(given["content"], f"{path}/content", ())
        times = {"optional": "?", "star": "*", "plus": "+"}.get(given["type"])
        if times is None:
            least, most = given["min"], given["max"]
            if not (0 <= least <= most or (least >= 0 and most == -1)):
                refuse(path, "must have 0 <= min <= max, or -1 for any max")
            times = f"{{{least},{'' if most == -1 else most}}}"
        return Expression(f"({part.text}){times}", part.is_regular)

    def _json(self, schema: Any, path: str) -> Expression:
        if schema is False:
            refuse(path, "allows nothing")
        read = {} if schema is True else read_schema(json.dumps(schema), path)
        self._schemas.append((path, read))
        return Expression(
            f"%json {json.dumps(read | {'x-guidance': self._readers.options})}", is_regular=False
        )

    def _begin(self, begin: Begin, path: str) -> Expression:
        if isinstance(begin, str):
            return _fixed(begin)
        token = _read(begin, path)
        if token["type"] != "token":
            refuse(path, "must be a text or a token")
        return self._token(token["token"], f"{path}/token")

    def _token(self, name: str, path: str) -> Expression:
        token_id = self._readers.special(name)
        if token_id is None:
            refuse(path, "is no special token of the tokenizer")
        return Expression(f"<[{token_id}]>", is_regular=False)

    def _text(self, path: str, excludes: Sequence[str], ends: Ends) -> Expression:
        """Any text up to the first of `ends`, inclusive, without any of `excludes` before."""
        # Exclude the ends as well: the library may miss a short end directly after an ambiguous text.
        base = self._without(tuple(dict.fromkeys([*excludes, *(ends or ())])))
        if ends is None:
            return Expression(base, is_regular=False)
        if not ends:
            refuse(path, "has no end: free text must be the content of a tag, or come last")
        end = self._or(map(_fixed, ends))
        return self._define("t", "[lazy]", f"{base} {end.text}")

    def _without(self, texts: tuple[str, ...]) -> str:
        """The name of any text that has none of `texts` in it."""
        if texts not in self._free:
            found = f"{ANY} {self._or(map(_fixed, texts)).text} {ANY}"
            self._free[texts] = self._name(f"{ANY} & ~({found})" if texts else ANY)
        return self._free[texts]

    def _row(self, parts: Sequence[Expression]) -> Expression:
        if all(part.is_regular for part in parts):
            return Expression(" ".join(part.text for part in parts), is_regular=True)
        texts = []
        for is_regular, group in groupby(parts, key=lambda part: part.is_regular):
            text = " ".join(part.text for part in group)
            texts.append(self._named(Expression(text, is_regular)))
        return Expression(" ".join(texts), is_regular=False)

    def _or(self, parts: Any) -> Expression:
        every = list(parts)
        is_regular = all(part.is_regular for part in every)
        texts = [part.text if is_regular else self._named(part) for part in every]
        return Expression(f"({' | '.join(texts)})", is_regular)

    def _rule(self, part: Expression) -> Expression:
        """Returns a part that several places use without its text."""
        if part.is_regular:
            return Expression(self._name(part.text), is_regular=True)
        return self._define("r", "", part.text)

    def _named(self, part: Expression) -> str:
        """Returns the text of a part beside others."""
        if not part.is_regular or part.text == '""':
            return part.text
        return self._name(part.text)

    def _name(self, text: str) -> str:
        if text not in self._names:
            self._names[text] = self._define("T", "", text).text
        return self._names[text]

    def _define(self, letter: str, options: str, text: str) -> Expression:
        name = f"{letter}{len(self._rules)}"
        self._rules.append(f"{name}{options}: {text}")
        return Expression(name, is_regular=False)


def _read(value: Any, path: str) -> Schema:
    """The members of a format, with defaults. Raises InvalidField."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in FORMATS:
        refuse(f"{path}/type", f"must be one of {', '.join(FORMATS)} on this worker")
    if path.count("/") > MOST_DEPTH:
        refuse(path, f"is nested deeper than {MOST_DEPTH} levels")
    form, given = FORMATS[kind], {"type": kind}
    for name in [*form, *(value.keys() - form.keys() - {"type"})]:
        if name not in form:
            refuse(f"{path}/{name}", "is not known")
        own = form[name]
        if isinstance(own, tuple):
            given[name] = value.get(name, *own)
            fits = given[name] in own
        elif isinstance(own, type | UnionType):
            given[name] = value.get(name)
            fits = isinstance(given[name], own)
        else:
            given[name] = value.get(name, own)
            fits = isinstance(given[name], type(own))
        if not fits:
            refuse(f"{path}/{name}", "is missing, or not taken on this worker")
    return given


def _texts(given: list[Any], path: str) -> list[str]:
    if not all(isinstance(text, str) and text for text in given):
        refuse(path, "must be texts")
    if len(given) > MOST_TEXTS:
        refuse(path, f"has more than {MOST_TEXTS} texts")
    return given


def _ends(tag: Schema, path: str) -> list[str]:
    end = tag["end"]
    return [end] if isinstance(end, str) else _texts(end, f"{path}/end") or [""]


def _fixed(text: str) -> Expression:
    return Expression(json.dumps(text), is_regular=True)


def _has(value: Any, kinds: dict[str, type], more: Sequence[str] = ()) -> bool:
    """Whether a value is an object with these members, and no others but `more`."""
    if not isinstance(value, dict) or value.keys() - set(more) != kinds.keys():
        return False
    return all(isinstance(value[name], kind) for name, kind in kinds.items())
