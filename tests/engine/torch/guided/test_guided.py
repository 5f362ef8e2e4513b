"""Guided items keep to their guides, however they are computed; guides that cannot be kept are refused."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import IO, Any

import pytest
import pytest_asyncio
from engine.torch.guided.guides import guided, text_of
from engine.torch.harness import Harness, configure, running
from engine_streams import eventually
from oracle import tiny_models
from trtmesh.chassis.errors import InvalidField, InvalidRequest, QueueFull
from trtmesh.chassis.vocabulary import GuidedDecoding
from trtmesh.engine.backends.torch.fields import GUIDES
from trtmesh.engine.backends.torch.guided import grammars, trial
from trtmesh.v1 import generation_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [9, 40, 41, 42, 9, 43]
DRAWN: dict[str, Any] = {"temperature": 1.5, "seed": 7}
WORDS = "[a-z]{2,4}( [a-z]{2,4}){2,5}"


def tags(**values: Any) -> str:
    """A structural tag, with other members of its structure."""
    first = {"begin": "<f=a>", "schema": {"const": 7}, "end": "</f>"} | values
    second = {"begin": "<f=b>", "schema": {"type": "object", "maxProperties": 0}, "end": "!"}
    return json.dumps({"structures": [first, second], "triggers": ["<f="]})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The logits are wider than the tokenizer.
    return tiny_models.build(tmp_path_factory.mktemp("llama"), "llama", vocab_size=352)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[Harness]:
    async with running(model) as engine:
        yield engine


async def texts(engine: Harness, model: Path, config: Any) -> list[str]:
    streams = await engine.ended(engine.submit(PROMPT, config))
    assert all(stream.end and stream.end.error is None for stream in streams), streams[0].end
    return [text_of(model, stream.token_ids) for stream in streams]


@pytest.mark.parametrize(
    ("kind", "guide", "form"),
    [
        ("REGEX", WORDS, WORDS),
        ("CHOICE", '["yes", "no (a+b)", "[.*]"]', r"yes|no \(a\+b\)|\[\.\*\]"),
        ("EBNF_GRAMMAR", 'root ::= "a" | "b" root', "b*a"),
        ("EBNF_GRAMMAR", 'start: "x" start | "y"', "x*y"),
        ("EBNF_GRAMMAR", 'start: "%json" // %json', "%json"),
        ("EBNF_GRAMMAR", 'root ::= "%json" # [x, capture]:', "%json"),
        (
            "EBNF_GRAMMAR",
            'start: [capture] /y=?/ # x[temperature=1]:\ncapture: "[capture]:"',
            r"(\[capture\]:)?y=?",
        ),
    ],
)
async def test_whole_text_has_the_form_of_the_guide(
    kind: str, guide: str, form: str, engine: Harness, model: Path
) -> None:
    for seed in range(5):
        for text in await texts(engine, model, guided(kind, guide, temperature=1.5, seed=seed)):
            assert re.fullmatch(form, text), text
    (text,) = await texts(engine, model, guided(kind, guide, max_tokens=60))
    assert re.match(form, text) or len(text) >= 60


async def test_trigger_begins_a_tag_of_the_structures(engine: Harness, model: Path) -> None:
    asked = GuidedDecoding(pb.GUIDE_TYPE_STRUCTURAL_TAG, tags(), 2)
    grammars: Any = engine.backend._loaded.grammars
    matcher = grammars._compile_guide(asked)
    for text, follows, ends in (
        ("any text < f", True, True),
        ("a<f=a>7</f>b<f=b>{  }!<f=a>7</f>", True, True),
        ("a<f=a>7", True, False),
        ("a<f=a>8", False, False),
        ("a<f=c>", False, False),
        ("a<f=b>{   }", False, False),
    ):
        place, ids = matcher.copy(), tokens_of(model, text)
        assert (place.accept(ids) == len(ids)) == follows, text
        assert not follows or place.may_end == ends, text


@pytest.mark.parametrize("most", [None, 0, 1])
async def test_blanks_of_json_are_bounded(most: int | None, engine: Harness, model: Path) -> None:
    schema = '{"type": "object", "properties": {"a": {"type": "array", "items": {"const": 1}}}}'
    bias = [0.0] * 352
    bias[tokens_of(model, " ")[0]] = 100.0
    config = guided("JSON_SCHEMA", schema, most, embedding_bias=tuple(bias), max_tokens=80)
    (text,) = await texts(engine, model, config)
    outside = re.sub(r'"[^"]*"', "", text)
    longest = max((len(run) for run in re.findall(r"\s+", outside)), default=0)
    assert longest == (8 if most is None else most)


def tokens_of(model: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids)


async def test_each_sequence_and_each_beam_keeps_to_the_guide(engine: Harness, model: Path) -> None:
    several = await texts(engine, model, guided("REGEX", WORDS, num_return_sequences=3, **DRAWN))
    assert len(set(several)) == 3
    beams = await texts(engine, model, guided("REGEX", "(ab|cd|ef){6}", beam_width=4))
    assert len(set(beams)) == 4
    for text, form in [*((t, WORDS) for t in several), *((t, "(ab|cd|ef){6}") for t in beams)]:
        assert re.fullmatch(form, text)


async def test_end_ids_of_the_item_end_the_text(engine: Harness, model: Path) -> None:
    """Even a token that the grammar has for text: it ends there, and only there."""
    (end,) = tokens_of(model, "a")
    streams = await engine.ended(engine.submit(PROMPT, guided("REGEX", "[ab]{5}", end_id=end)))
    assert streams[0].end
    assert streams[0].end.reason == pb.FINISH_REASON_END_ID
    assert text_of(model, streams[0].token_ids) == "bbbbba"


@pytest.mark.parametrize(
    "values",
    [{"min_tokens": 9}, {"ignore_end_id": True}, {"bad": "s"}, {"bad": "y"}],
    ids=["min_tokens", "ignore_end_id", "banned", "banned at first"],
)
async def test_item_without_a_token_to_choose_ends_with_the_fields_to_blame(
    values: dict[str, Any], engine: Harness, model: Path
) -> None:
    if "bad" in values:
        words = [token for token in range(2, 320) if values["bad"] in text_of(model, [token])]
        values = {"bad_token_ids": tuple((word,) for word in words)}
    config = guided("CHOICE", '["yes"]', max_tokens=20, **values)
    (stream,) = await engine.ended(engine.submit(PROMPT, config))
    assert stream.end
    assert isinstance(stream.end.error, InvalidRequest)
    assert {"guided_decoding.guide", "stopping.min_tokens"} <= set(stream.end.error.fields)
    assert "yes".startswith(text_of(model, stream.token_ids))


@pytest.mark.parametrize(
    ("kind", "guide", "words"),
    [
        ("JSON_SCHEMA", '{"properties": {"a/b": {"items": {"not": {}}}}}',
         'at /properties/a~1b/items cannot be followed: Unimplemented keys: ["not"]'),
        ("JSON_SCHEMA", '{"$defs": {"a": {"uniqueItems": true}}, "$ref": "#/$defs/a"}',
         'at /$defs/a cannot be followed: Unimplemented keys: ["uniqueItems"]'),
        ("JSON_SCHEMA", "{", "is not JSON: "),
        ("JSON_SCHEMA", "[]", "must be a JSON object"),
        ("JSON_SCHEMA", "[" * 5000, "is not JSON: "),
        ("JSON_SCHEMA", '{"items":' * 70 + "{}" + "}" * 70, "is nested deeper than 64 levels"),
        ("JSON_SCHEMA", json.dumps({"enum": list(range(10_000))}), "at /enum brings the values"),
        ("JSON_SCHEMA", json.dumps({"items": {"properties": {f"p{n}": {} for n in range(501)}}}),
         "at /items/properties has more than 500 properties"),
        ("JSON_SCHEMA", '{"x-guidance": {"lenient": true}, "not": {}}', "at /x-guidance is not taken"),
        ("JSON_SCHEMA", '{"items": {"minProperties": 3, "required": ["a", "a"]}}',
         "at /items/minProperties asks for 2 properties beside those required, of at most 1"),
        ("JSON_SCHEMA", '{"properties": {"a": {"enum": ["a", [{"b": "\\u0001"}]]}}}',
         "at /properties/a/enum has the character U+0001"),
        ("JSON_SCHEMA", r'{"const": "\\\u007f"}', "at /const has the character U+007F"),
        ("JSON_SCHEMA", '{"maximum": 1e400}', "cannot be read"),
        ("JSON_SCHEMA", '{"minimum": NaN}', "cannot be read"),
        ("JSON_SCHEMA", '{"minimum": ' + "1" * 5000 + "}", "cannot be read"),
        ("JSON_SCHEMA", '{"const": "\\ud800"}', "cannot be read"),
        ("CHOICE", '["\\ud800"]', "cannot be read"),
        ("REGEX", "((a{1000}){1000})", "too many expressions"),
        ("JSON_SCHEMA", '"' + "a" * 65_536, "65537 bytes"),
        ("JSON_SCHEMA", '{"type": "string", "pattern": "(?!a)b"}', "look-around"),
        ("REGEX", "(a", "unclosed group"),
        ("REGEX", None, "is not set, but the grammar needs it"),
        ("REGEX", "", "is empty, but the grammar needs it"),
        ("JSON", '{"type": "array"}', "is set, but JSON has none; a schema has the type JSON_SCHEMA"),
        ("EBNF_GRAMMAR", "start: other", "other"),
        ("EBNF_GRAMMAR", 'start: %json {"multipleOf": 62615533}', "%json"),
        ("EBNF_GRAMMAR", "start: x\nx[capture, temperature=0.7]: /a+/", "has a temperature"),
        ("EBNF_GRAMMAR", "start: x\nx[capture]: /a+/", "has a capture"),
        ("EBNF_GRAMMAR", 'start: x\n?x [suffix="]",temperature =1]: /a+/', "has a temperature"),
        ("EBNF_GRAMMAR", 'start: x\n!x [suffix="]", capture = "y"]: /a+/', "has a capture"),
        ("EBNF_GRAMMAR", 'start: x\nx[stop="b", capture , lazy]: /a+/', "has a capture"),
        ("EBNF_GRAMMAR", 'start: x\nx[stop="b", stop_capture="c"]: /a+/', "has a capture"),
        ("STRUCTURAL_TAG", '{"structures": [], "triggers": ["<"]}', "with a structure"),
        ("STRUCTURAL_TAG", '{"type": "structural_tag", "form": {}}', "must be {"),
        ("STRUCTURAL_TAG", '{"type": "structural_tag", "format": {}}', "at /format/type must be"),
        ("STRUCTURAL_TAG", tags().replace('"<f="]', '"<f=", "<g="]'), "at /triggers/1 begins no"),
        ("STRUCTURAL_TAG", tags(begin="[f]"), "/structures/0/begin starts with none"),
        ("STRUCTURAL_TAG", tags(schema={"not": {}}), 'Unimplemented keys: ["not"]'),
        ("STRUCTURAL_TAG", tags(other=1), "at /structures/0 must be"),
        ("CHOICE", "[]", "must be a JSON array of texts"),
        ("CHOICE", '["a", 1]', "must be a JSON array of texts"),
    ],
)  # fmt: skip
async def test_guide_that_cannot_be_kept_is_refused(
    kind: str, guide: str | None, words: str, engine: Harness
) -> None:
    before = engine.backend.stats().guide_refusals["not_compiled"]
    (stream,) = await engine.ended(engine.submit(PROMPT, guided(kind, guide)))
    assert stream.end
    assert engine.backend.stats().guide_refusals["not_compiled"] == before + 1
    error = stream.end.error
    assert isinstance(error, InvalidField)
    assert error.field == "guided_decoding.guide"
    assert words in f"{error.problem} {error.value}"


async def test_automaton_at_its_limit_is_made_anew(engine: Harness, model: Path) -> None:
    x, y = tokens_of(model, "x"), tokens_of(model, "y")
    hidden = "y|x((a{1000}){1000})"
    for word, fits in ((y, True), (x, False), (y, True)):
        bans: dict[str, Any] = {"bad_token_ids": (tuple(x if word == y else y),)}
        (stream,) = await engine.ended(engine.submit(PROMPT, guided("REGEX", hidden, **bans)))
        assert stream.token_ids[0] == word[0]
        assert stream.end
        assert isinstance(stream.end.error, InvalidField) != fits
        assert fits or engine.backend.stats().guide_refusals["not_followed"]
        assert fits or "lexer error: too many" in str(stream.end.error)


async def test_other_text_than_that_of_the_guide_cannot_go_on(engine: Harness, model: Path) -> None:
    config = guided("REGEX", "[ab]+c", max_tokens=9)
    for text, fits in (("abab", True), ("abx", False)):
        emitted = tokens_of(model, text)
        (stream,) = await engine.ended(engine.submit(PROMPT, config, emitted=emitted))
        assert stream.end
        assert isinstance(stream.end.error, InvalidField) != fits


async def test_sequence_goes_on_from_any_of_its_tokens(engine: Harness, model: Path) -> None:
    """As on another worker after the loss of the first: a grammar and tokens are the whole state."""
    properties = '{"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}}'
    schema = f'{{"type": "object", "properties": {properties}, "required": ["a", "b"]}}'
    several = guided("JSON_SCHEMA", schema, max_tokens=48, num_return_sequences=3, **DRAWN)
    alone = replace(several, sampling=replace(several.sampling, num_return_sequences=1))
    whole = [each.token_ids for each in await engine.ended(engine.submit(PROMPT, several))]
    assert len({*map(tuple, whole)}) == 3
    for index, tokens in enumerate(whole):
        places = range(1, len(tokens))
        keys = [
            engine.submit(PROMPT, alone, emitted=tokens[:place], sequence_index=index)[0]
            for place in places
        ]
        for place, stream in zip(places, await engine.ended(keys), strict=True):
            assert stream.token_ids == tokens[place:], place


async def test_guides_wait_in_a_bounded_queue_unless_their_items_leave(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MOST_WAITING", 4)
    async with running(model) as engine:
        found: Any = engine.backend._loaded.grammars
        own, compiled, may_go_on = found._compile_guide, [], threading.Event()

        def compile_guide(asked: GuidedDecoding, check: grammars.Check) -> grammars.Matcher:
            compiled.append(asked.guide or "")
            assert may_go_on.wait(60)
            matcher: grammars.Matcher = own(asked, check)
            return matcher

        monkeypatch.setattr(found, "_compile_guide", compile_guide)
        keys = [engine.submit(PROMPT, guided("REGEX", f"a{{{n}}}"))[0] for n in range(1, 5)]
        with pytest.raises(QueueFull):
            engine.submit(PROMPT, guided("REGEX", "b"))
        # Others do not wait for them.
        assert len(await engine.run([PROMPT], configure(max_tokens=2))) == 1
        engine.backend.stop(keys[2:3], pb.FINISH_REASON_CANCELLED)
        await engine.ended(keys[2:3])
        may_go_on.set()
        await engine.ended(keys)
        assert sorted(compiled) == ["a{1}", "a{2}", "a{4}"]
        assert len(await engine.run([PROMPT], guided("REGEX", "a{2}"))) == 1
        assert len(compiled) == 3, "kept by its digest"
        stats = engine.backend.stats()
        assert (stats.guides_compiled, stats.guides_kept) == (3, 1)
        assert stats.guide_refusals == {"not_compiled": 0, "not_followed": 0, "queue_full": 1}
        assert stats.guide_compile_seconds > 0 < stats.guide_mask_seconds


@pytest.mark.slow
async def test_compilations_whose_items_left_delay_no_other(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would take minutes; both threads are at it when the clients leave."""
    begun = list[Popen[bytes]]()

    def endless(grammar: IO[bytes]) -> Popen[bytes]:
        begun.append(Popen((sys.executable, "-c", "import time; time.sleep(3600)"), stdin=grammar))
        return begun[-1]

    def at_once() -> int:
        return sum(process.returncode is None for process in begun)

    monkeypatch.setattr(trial, "_begun", endless)
    async with running(model) as engine:
        rules = "".join(f'r{n}: "a"\n' for n in range(200))
        hostile = [guided("EBNF_GRAMMAR", f'start: "{n}" r1\n{rules}') for n in range(19)]
        keys = [engine.submit(PROMPT, config)[0] for config in hostile]
        await eventually(lambda: at_once() == grammars.THREADS)
        good = engine.submit(PROMPT, guided("REGEX", "a{2}"))
        engine.backend.stop(keys, pb.FINISH_REASON_CANCELLED)
        (stream,) = await engine.ended(good)
        assert text_of(model, stream.token_ids) == "aa"
        await engine.ended(keys)
        await eventually(lambda: at_once() == 0)
        stats = engine.backend.stats()
        assert (len(begun), stats.guides_compiled) == (grammars.THREADS, 1)
        assert stats.guide_refusals["not_compiled"] == 0


async def test_model_without_a_known_tokenizer_follows_no_guides(model: Path) -> None:
    (model / "tokenizer.json").rename(model / "hidden")
    try:
        async with running(model) as engine:
            assert not GUIDES & engine.info.supported_fields
            assert len(await engine.run([PROMPT], configure(max_tokens=2))) == 1
    finally:
        (model / "hidden").rename(model / "tokenizer.json")
