"""Random answers under JSON schemas are valid by two validators, and nothing invalid is accepted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from random import Random
from typing import Any

import jsonschema
import jsonschema_rs
import numpy as np
import pytest
from e2e.mesh import DEMO
from engine.torch.conftest import ModelDir
from engine.torch.guided.guides import ATTACKS, guided, text_of
from engine.torch.harness import running
from llguidance import gbnf_to_lark
from public_data import public_json
from tokenizers import Tokenizer
from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.vocabulary import GuidedDecoding
from trtmesh.engine.backends.torch.guided import grammars
from trtmesh.engine.backends.torch.guided.grammars import Grammar, Guide
from trtmesh.engine.backends.torch.guided.guidance import GuidanceCompiler, compiler_for
from trtmesh.engine.backends.torch.guided.trial import MAX_ROW_ITEMS, SMALL_BYTES
from trtmesh.v1 import generation_pb2 as pb

VOCABULARY = 6144
END_ID = 0
MOST_TOKENS = 120
CLOSING = '"}],:'
"""Characters that are likely, so that answers come to an end."""

Schema = dict[str, Any]


class Maker:
    """Makes schemas from a number."""

    def __init__(self, number: int) -> None:
        self._dice = Random(number)

    def schema(self, depth: int = 2) -> Schema:
        kinds = [self._number, self._text, self._choice]
        nested = [self._array, self._object, self._map, self._any]
        return self._dice.choice([*kinds, *nested] if depth else kinds)(depth)

    def _number(self, _depth: int) -> Schema:
        dice, low = self._dice, self._dice.randint(-50, 50)
        bounds = {"minimum": low, "exclusiveMaximum": low + dice.randint(5, 500)}
        kept = {name: value for name, value in bounds.items() if dice.random() < 0.6}
        if dice.random() < 0.3:
            return {"type": "integer", "multipleOf": dice.randint(2, 9), **kept}
        return {"type": dice.choice(["integer", "number"]), **kept}

    def _text(self, _depth: int) -> Schema:
        lengths = {"minLength": self._dice.randint(0, 3), "maxLength": self._dice.randint(4, 8)}
        others: list[Schema] = [
            {"format": self._dice.choice(["date", "uuid", "ipv4", "time"])},
            {"pattern": self._dice.choice(["^[a-f]{2,5}$", r"^\d+-[xyz]$", "ab?c"])},
        ]
        return {"type": "string", **self._dice.choice([lengths, *others])}

    def _choice(self, _depth: int) -> Schema:
        values = [1, -2.5, "a", 'quoted "b"', None, True, ["x", 1], {"k": "v"}]
        chosen = self._dice.sample(values, self._dice.randint(1, 4))
        return {"enum": chosen} if len(chosen) > 1 else {"const": chosen[0]}

    def _array(self, depth: int) -> Schema:
        least = self._dice.randint(0, 2)
        array = {"type": "array", "minItems": least, "maxItems": least + 2}
        if self._dice.random() < 0.3:
            array["prefixItems"] = [self.schema(depth - 1) for _ in range(2)]
        return {**array, "items": self.schema(depth - 1)}

    def _object(self, depth: int) -> Schema:
        names = self._dice.sample(["a", "b c", "ü", "d/e", "f"], self._dice.randint(1, 3))
        required = [name for name in names if self._dice.random() < 0.6]
        more: Any = self._dice.choice([False, False, True, {"type": "integer"}])
        properties = {name: self.schema(depth - 1) for name in names}
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": more,
        }

    def _map(self, depth: int) -> Schema:
        required = self._dice.sample(["a", "f"], self._dice.randint(0, 2))
        return {
            "type": "object",
            "patternProperties": {"^[a-f]$": self.schema(depth - 1)},
            "required": required,
            "additionalProperties": self._dice.choice([False, self.schema(depth - 1)]),
            "minProperties": self._dice.randint(0, len(required) + 1),
        }

    def _any(self, depth: int) -> Schema:
        return {"anyOf": [self.schema(depth - 1) for _ in range(2)]}


def assert_valid(text: str, schema: Schema) -> None:
    value = json.loads(text)
    judge = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    assert not list(judge(schema).iter_errors(value)), (schema, text)
    jsonschema_rs.validate(schema, value)


async def test_random_answers_under_made_schemas_are_valid(model_dir: ModelDir) -> None:
    model, complete = model_dir("llama"), 0
    bias = [0.0] * 320
    for token in range(1, 320):
        if set(text_of(model, [token])) <= set(CLOSING):
            bias[token] = 6.0
    bias[END_ID] = 9.0
    async with running(model, max_batch_size=32, kv_cache_tokens=8192) as engine:
        schemas = [Maker(number).schema() for number in range(40)]
        fields: dict[str, Any] = {"embedding_bias": tuple(bias), "max_tokens": MOST_TOKENS}
        keys = [
            engine.submit(
                [9, 40, 41],
                guided("JSON_SCHEMA", json.dumps(schema), temperature=1.5, seed=seed, **fields),
            )[0]
            for seed, schema in enumerate(schemas)
        ]
        for schema, stream in zip(schemas, await engine.ended(keys), strict=True):
            assert stream.end
            assert stream.end.error is None, (schema, stream.end.error)
            if stream.end.reason == pb.FINISH_REASON_END_ID:
                assert_valid(text_of(model, stream.token_ids), schema)
                complete += 1
    assert complete > 30


@pytest.fixture(scope="module")
def compiler() -> GuidanceCompiler:
    found = compiler_for(DEMO, VOCABULARY, [END_ID])
    assert found
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def compiled(compiler: GuidanceCompiler, schema: object) -> Grammar | None:
    """None for a schema that is refused."""
    asked = GuidedDecoding(pb.GUIDE_TYPE_JSON_SCHEMA, json.dumps(schema))
    try:
        return Grammar(compiler(asked))
    except InvalidField:
        return None


def notations(value: object) -> Iterator[str]:
    """Texts of a value: as usual, with escapes where needed or in all names, and with members twice."""
    for is_ascii in (False, True):
        yield json.dumps(value, ensure_ascii=is_ascii, separators=(",", ":"))
        yield json.dumps(value, ensure_ascii=is_ascii)
    yield spelled(value, escaped)
    if isinstance(value, dict):
        yield spelled(value, json.dumps, times=2)


def spelled(value: object, name: Callable[[str], str], times: int = 1) -> str:
    if isinstance(value, dict):
        members = [f"{name(key)}:{spelled(each, name)}" for key, each in value.items()]
        return f"{{{','.join(members * times)}}}"
    if isinstance(value, list):
        return f"[{','.join(spelled(each, name) for each in value)}]"
    return json.dumps(value, ensure_ascii=False)


def escaped(text: str) -> str:
    units = text.encode("utf-16-be", "surrogatepass").hex()
    return '"' + "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)) + '"'


def accepts(grammar: Grammar, tokenizer: Tokenizer, value: object) -> bool:
    """Whether a value in any notation is a whole text of the grammar."""
    for text in notations(value):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        matcher = grammar.start.copy()
        if matcher.accept(ids) == len(ids) and matcher.may_end:
            return True
    return False


def answers(grammar: Grammar, tokenizer: Tokenizer, seed: int) -> Iterator[str]:
    """A text of random tokens that the grammar allows, if it ends in time."""
    dice = np.random.default_rng(seed)
    bias = np.zeros(VOCABULARY)
    for token in CLOSING + "01":
        bias[tokenizer.token_to_id(token)] = 6.0
    bias[END_ID] = 20.0
    guide, tokens = Guide(grammar, 0), list[int]()
    while len(tokens) < MOST_TOKENS:
        guide.catch_up(tokens)
        allowed = np.flatnonzero(np.unpackbits(guide.mask([END_ID]), bitorder="little"))
        assert len(allowed), guide.problem
        race = dice.gumbel(size=len(allowed)) + bias[allowed]
        tokens.append(int(allowed[race.argmax()]))
        if tokens[-1] == END_ID:
            yield str(tokenizer.decode(tokens))
            return


@pytest.mark.slow
def test_random_answers_under_public_schemas_are_valid(
    compiler: GuidanceCompiler, tokenizer: Tokenizer
) -> None:
    kept = complete = rejected = 0
    cases = public_json("maskbench_300.json")
    for seed, case in enumerate(cases):
        grammar = compiled(compiler, case["schema"])
        if grammar is None:
            continue
        kept += 1
        for text in answers(grammar, tokenizer, seed):
            assert_valid(text, case["schema"])
            complete += 1
        for test in case["tests"]:
            accepted = accepts(grammar, tokenizer, test["data"])
            assert test["valid"] or not accepted, (case["name"], test)
            rejected += test["valid"] and not accepted
    print(f"{len(cases)} schemas, {kept} kept, {complete} answers, {rejected} valid rejected")
    assert kept > 240
    assert complete > 150
    assert rejected <= 3


@pytest.mark.slow
def test_nothing_invalid_is_accepted(compiler: GuidanceCompiler, tokenizer: Tokenizer) -> None:
    files = public_json("json_schema_test_suite_2020_12.json")
    # Formats are optional there, and followed by their shape: a 30th of February passes.
    groups = [group for name in files if not name.startswith("optional/") for group in files[name]]
    found = [(group, compiled(compiler, group["schema"])) for group in groups]
    kept = [(group, grammar) for group, grammar in found if grammar]
    wrong = [
        (group["description"], test["data"])
        for group, grammar in kept
        for test in group["tests"]
        if not test["valid"] and accepts(grammar, tokenizer, test["data"])
    ]
    print(f"{len(groups)} groups, {len(kept)} kept")
    assert wrong == []
    assert len(kept) > 100


@pytest.mark.slow
def test_nothing_invalid_is_accepted_under_made_schemas(
    compiler: GuidanceCompiler, tokenizer: Tokenizer
) -> None:
    """The answers under each schema are values for all others."""
    schemas = [Maker(number).schema(depth=1) for number in range(150)]
    found = [compiled(compiler, schema) for schema in schemas]
    assert None not in found
    grammars = [grammar for grammar in found if grammar]
    texts = [
        text
        for seed, grammar in enumerate(grammars)
        for text in answers(grammar, tokenizer, seed)
        if text.startswith("{")
    ]
    invalid = 0
    for schema, grammar in zip(schemas, grammars, strict=True):
        for text in texts:
            value = json.loads(text)
            if not jsonschema_rs.is_valid(schema, value):
                assert not accepts(grammar, tokenizer, value), (schema, text)
                invalid += 1
    print(f"{len(texts)} values, {invalid} times invalid")
    assert invalid > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"minProperties": 2}, '{"x":1,"x":2}'),
        ({"patternProperties": {"^x$": {}}, "minProperties": 3, "required": ["y"]}, '{"y":1,"x":2,"x":2}'),
        ({"properties": {"a": {"type": "integer"}}}, r'{"\u0061":"s"}'),
        ({"properties": {"a": {"type": "integer"}}}, r'{"a":1,"\u0061":"s"}'),
        ({"properties": {"\n": {"type": "integer"}}}, r'{"\u000a":"s"}'),
        ({"patternProperties": {"^é": {"type": "integer"}}}, r'{"\u00e9":"s"}'),
    ],
)  # fmt: skip
def test_key_counts_once_in_any_spelling(
    schema: Schema, text: str, compiler: GuidanceCompiler, tokenizer: Tokenizer
) -> None:
    assert not jsonschema_rs.is_valid(schema, json.loads(text))
    if grammar := compiled(compiler, schema):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert grammar.start.accept(ids) < len(ids)


def test_expression_that_explodes_is_refused(compiler: GuidanceCompiler) -> None:
    """The library's own limits would accept it, and take a second to refuse one of ten times the size."""
    with pytest.raises(InvalidField, match="too many expressions"):
        compiler(GuidedDecoding(pb.GUIDE_TYPE_REGEX, "((a{300}){300})"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "guide"),
    [*ATTACKS["patterns"], *ATTACKS["conjunction"], *ATTACKS["multiples"]],
)
def test_expressions_that_take_long_together_are_refused(
    kind: str, guide: str, compiler: GuidanceCompiler
) -> None:
    """The library takes minutes to find what they have in common, within its limits, and numbers among remainders."""
    with pytest.raises(InvalidField, match="more than 1 s of CPU time to compile"):
        compiler(GuidedDecoding(pb.GuideType.Value(f"GUIDE_TYPE_{kind}"), guide))


TAKES_LONG: Schema = json.loads(ATTACKS["patterns"][0][1])
PARTS: list[Schema] = [
    {"type": "json_schema", "json_schema": {"multipleOf": 9_973_000}},
    {"type": "json_schema", "json_schema": {"not": {}}},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guide", "problem"),
    [
        ({"properties": {"b": TAKES_LONG, "a": {"not": {}}}}, "at /properties/a cannot"),
        ({"$defs": {"b": TAKES_LONG}, "items": {"not": {}}}, "at /items cannot"),
        (
            {"type": "structural_tag", "format": {"type": "sequence", "elements": PARTS}},
            "at /format/elements/1/json_schema cannot",
        ),
    ],
    ids=["beside", "definition", "tag"],
)
def test_place_of_a_problem_is_found_without_what_takes_long(
    guide: dict[str, Any], problem: str, compiler: GuidanceCompiler
) -> None:
    kind = pb.GUIDE_TYPE_STRUCTURAL_TAG if "format" in guide else pb.GUIDE_TYPE_JSON_SCHEMA
    with pytest.raises(InvalidField, match=f'{problem} be followed: Unimplemented keys: \\["not"'):
        compiler(GuidedDecoding(kind, json.dumps(guide)))


@pytest.mark.slow
@pytest.mark.parametrize("step", ["0.05", "0.0001", "0.7", "2.5"])
def test_multiples_are_those_of_decimals(
    step: str, compiler: GuidanceCompiler, tokenizer: Tokenizer
) -> None:
    """As JSON Schema has them; one of the validators divides binary floats, and has 0.35 / 0.05 below 7."""
    asked = {"type": "number", "multipleOf": float(step)}
    grammar = compiled(compiler, asked)
    assert grammar
    for times in range(-90, 90):
        number = Decimal(step) * times / 2
        is_multiple = accepts(grammar, tokenizer, float(number))
        assert is_multiple == (times % 2 == 0), number
        assert not is_multiple or jsonschema_rs.is_valid(asked, float(number))


@pytest.mark.slow
@pytest.mark.parametrize(
    "guide",
    [
        "start: r0\n" + "".join(f"r{n}: r{n + 1}{{0,50}} | r{n + 2}\n" for n in range(1500)),
        "start: T0\n" + "".join(f'T{n}: T{n + 1} "b" | T{n + 2}\n' for n in range(1600)),
    ],
    ids=["rules", "terminals"],
)
def test_grammar_that_takes_long_to_compile_is_refused(
    guide: str, compiler: GuidanceCompiler
) -> None:
    """The library takes ten seconds and more, within its limits."""
    last = guide.count("\n") - 1
    guide += "".join(f'{guide[7]}{n}: "x"\n' for n in (last, last + 1))
    with pytest.raises(InvalidField, match="more than 1 s of CPU time to compile"):
        compiler(GuidedDecoding(pb.GUIDE_TYPE_EBNF_GRAMMAR, guide))


@pytest.mark.parametrize("step", [1, -1])
def test_rules_are_read_in_any_order(
    step: int, compiler: GuidanceCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is looked at a few times: the library would look at all again for each one out of order."""
    looks, own = 0, gbnf_to_lark.SequenceNode.is_terminal

    def is_terminal(node: Any) -> bool:
        nonlocal looks
        looks += 1
        return bool(own(node))

    monkeypatch.setattr(gbnf_to_lark.SequenceNode, "is_terminal", is_terminal)
    rules = [f'r{n} ::= r{n + 1} "b" | "a"' for n in range(40)][::step]
    grammar = "\n".join(["root ::= r0 [0-9]", *rules, 'r40 ::= "x"'])
    assert len(grammar) <= SMALL_BYTES
    matcher = compiler(GuidedDecoding(pb.GUIDE_TYPE_EBNF_GRAMMAR, grammar))
    ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode("abbb7").ids
    assert matcher.accept(ids) == len(ids)
    assert matcher.may_end
    assert looks <= 3 * len(rules)


def test_grammar_that_takes_more_with_each_token_is_followed_no_further(
    compiler: GuidanceCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Before the library's own limit.
    monkeypatch.setattr(grammars, "FREE_SECONDS", 0.005)
    monkeypatch.setattr(grammars, "SECONDS_OF_TOKEN", 1e-5)
    start = compiler(GuidedDecoding(pb.GUIDE_TYPE_EBNF_GRAMMAR, 'start: a\na: a a | "a" | a a a'))
    guide, tokens = Guide(Grammar(start), 0), list[int]()
    while not guide.problem and len(tokens) < 400:
        allowed = np.flatnonzero(np.unpackbits(guide.mask([END_ID]), bitorder="little"))
        tokens += allowed[-1:].tolist()
        guide.catch_up(tokens)
    assert "may take 2 ms for each" in guide.problem
    assert not guide.mask([END_ID]).any()


def test_readings_of_a_text_at_once_are_bounded(compiler: GuidanceCompiler) -> None:
    """The time of a mask grows with more than their square."""
    grammar = "start: a\na: a a | /[a-z ]/ | a a a"
    matcher = compiler(GuidedDecoding(pb.GUIDE_TYPE_EBNF_GRAMMAR, grammar)).copy()
    row = np.zeros(VOCABULARY // 8, np.uint8)
    for _ in range(100):
        if problem := matcher.fill(row):
            break
        matcher.accept(np.flatnonzero(np.unpackbits(row, bitorder="little"))[-1:].tolist())
    assert f"max is {MAX_ROW_ITEMS}" in problem
