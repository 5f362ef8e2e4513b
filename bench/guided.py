"""Times of compiling schemas and of filling masks by vocabulary, and tokens a second of guided streams over plain ones.

Everything runs in this process. The larger vocabulary is the demo model's with made up tokens, pairs of others. Streams
take turns, plain and guided by one schema or by one each, with the same prompts; only steps in which all decode count.
Their seconds are CPU time of this process, with one thread: other processes do not count. On a GPU they are those that
pass, and `--shape` is a model of random weights or, with `demo`, the demo model.
"""

from __future__ import annotations

import json
import tempfile
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _models import SHAPES, build
from _options import run_bench, tell
from _torch_steps import Lab
from _turns import Figures, Values, in_turn
from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.vocabulary import GenerationConfig, GuidedDecoding, Sampling, Stopping
from trtmesh.engine.backends.torch.guided.grammars import Grammar, Guide
from trtmesh.engine.backends.torch.guided.guidance import GuidanceCompiler, compiler_for
from trtmesh.engine.backends.torch.preparation import PartLease
from trtmesh.tools.bench.figures import percentile
from trtmesh.v1 import generation_pb2 as pb

DEMO = Path(__file__).parents[1] / "models" / "demo"
DEMO_IDS = 6144
MOST_WALKED = 60
"""Tokens of a random answer under a schema."""
PROMPT = list(range(100, 356))
NEW_TOKENS = 96
TEXT, NUMBER = {"type": "string"}, {"type": "number"}
ENTRY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "count": {"type": "integer", "minimum": 0, "maximum": 10_000},
        "kind": {"enum": ["small", "large", "none"]},
        "tags": {"type": "array", "items": TEXT, "maxItems": 5},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "object"},
    ENTRY,
    {"type": "array", "items": ENTRY, "minItems": 2},
    {"type": "object", "properties": {f"field_{n}": ENTRY for n in range(20)}},
    {"enum": [f"value number {n}" for n in range(500)]},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}( [A-Z0-9]{4}){3,7}$"},
    {"type": "string", "format": "date-time"},
    {"anyOf": [ENTRY, TEXT, NUMBER, {"type": "array", "items": NUMBER}]},
    {"$defs": {"t": {"type": "object", "properties": {"l": {"$ref": "#/$defs/t"}, "v": NUMBER},
                     "additionalProperties": False}}, "$ref": "#/$defs/t"},
    {"type": "string", "maxLength": 5000},
)  # fmt: skip


async def main(
    *,
    vocabularies: tuple[int, ...] = (DEMO_IDS, 129_280),
    schemas: Path | None = None,
    rows: tuple[int, ...] = (1, 8, 32),
    rounds: int = 7,
    device: str = "cpu",
    shape: str = "demo",
) -> Figures:
    """`schemas` are MaskBench's, in place of those built in; `shape` is demo, or one of _models.py."""
    own = cases_of(schemas) if schemas else SCHEMAS
    results: Figures = {"grammars": [], "streams": []}
    for size in vocabularies:
        results["grammars"].append(grammars(size, own))
        tell(f"{size} ids", results["grammars"][-1])
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(model_of(Path(folder), shape, device), device)
    for count in rows:
        results["streams"].append(await compare(lab, count, rounds))
        tell(f"{count} rows", results["streams"][-1])
    return results


def cases_of(file: Path) -> tuple[dict[str, Any], ...]:
    """MaskBench's schemas."""
    return tuple(case["schema"] for case in json.loads(file.read_text(encoding="utf-8")))


def grammars(size: int, schemas: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Milliseconds to compile the schemas, and microseconds to fill the masks of random answers."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(tokenizer_of(size), encoding="utf-8")
        started = time.perf_counter()
        compiler = compiler_for(Path(folder), size, [0])
        seconds = time.perf_counter() - started
    assert compiler
    compiles, masks, refused = list[float](), list[float](), 0
    dice = np.random.default_rng(1)
    for schema in schemas:
        started = time.perf_counter()
        grammar = compiled(compiler, schema)
        compiles.append((time.perf_counter() - started) * 1e3)
        if grammar is None:
            refused += 1
            continue
        guide, tokens = Guide(grammar, 0), list[int]()
        while len(tokens) < MOST_WALKED:
            guide.catch_up(tokens)
            started = time.perf_counter()
            row = guide.mask([0])
            masks.append((time.perf_counter() - started) * 1e6)
            allowed = np.flatnonzero(np.unpackbits(row, bitorder="little"))
            tokens.append(int(dice.choice(allowed)))
            if tokens[-1] == 0:
                break
    return {
        "ids": size,
        "tokenizer_s": round(seconds, 2),
        "schemas": len(schemas),
        "refused": refused,
        "compile_ms": quantiles(compiles),
        "mask_us": quantiles(masks),
    }


def compiled(compiler: GuidanceCompiler, schema: dict[str, Any]) -> Grammar | None:
    try:
        return Grammar(compiler(GuidedDecoding(pb.GUIDE_TYPE_JSON_SCHEMA, json.dumps(schema))))
    except InvalidField:
        return None


def quantiles(values: list[float]) -> dict[str, float]:
    percents = {"p50": 50, "p99": 99, "max": 100}
    return {name: round(percentile(values, percent), 1) for name, percent in percents.items()}


def tokenizer_of(size: int) -> str:
    """The demo model's tokenizer.json with made up merges."""
    content = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    texts, dice = list(vocabulary)[300:], np.random.default_rng(1)
    while len(vocabulary) < size:
        one, other = (texts[at] for at in dice.integers(len(texts), size=2))
        if one + other not in vocabulary:
            vocabulary[one + other] = len(vocabulary)
            content["model"]["merges"].append([one, other])
    return json.dumps(content)


def model_of(folder: Path, shape: str, device: str) -> Path:
    if shape == "demo":
        return DEMO
    model = build(folder, shape, torch.bfloat16, device)
    (model / "tokenizer.json").write_text(
        tokenizer_of(SHAPES[shape]["vocab_size"]), encoding="utf-8"
    )
    return model


async def compare(lab: Lab, rows: int, rounds: int) -> Figures:
    """Tokens a second of guided streams over those of plain ones."""
    modes = {"plain": 0, "one schema": 1, "a schema each": rows}
    turns = {mode: partial(rate, lab, rows, schemas) for mode, schemas in modes.items()}
    plain, *guided = (found := await in_turn(turns, rounds))
    return {
        "rows": rows,
        "plain_tokens_s": found[plain].medians(1)["rate"],
        "over_plain": {mode: found[mode].over(found[plain])["rate"] for mode in guided},
        "sat_out": {mode: found[mode].medians(3)["sat_out"] for mode in guided},
    }


def rate(lab: Lab, rows: int, schemas: int) -> Values:
    """Tokens a second of the steps in which all decode, and the steps that rows sat out for each token, as their masks
    were late."""
    assert lab.loaded.grammars
    counts = lab.loaded.grammars.counts
    before = counts.late_masks
    for row in range(schemas or rows):
        grammar, lease = compiled_by(lab, row, rows // schemas) if schemas else (None, None)
        for own in range(row, rows, schemas or rows):
            config = GenerationConfig(
                stopping=Stopping(max_tokens=NEW_TOKENS, ignore_end_id=True),
                sampling=Sampling(temperature=1.0, seed=own),
                guided_decoding=GuidedDecoding(pb.GUIDE_TYPE_JSON) if grammar else None,
            )
            lab.add(PROMPT, own, config, grammar, lease)
    seconds, tokens = lab.decode(rows)
    late = (counts.late_masks - before) / (rows * NEW_TOKENS)
    return {"rate": tokens / seconds, "sat_out": late}


def compiled_by(lab: Lab, number: int, holders: int) -> tuple[Grammar, PartLease]:
    # No answer ends before its last token.
    entries = {"type": "array", "items": ENTRY, "minItems": 1000, "title": str(number)}
    asked = GuidedDecoding(pb.GUIDE_TYPE_JSON_SCHEMA, json.dumps(entries))
    made = Future[Any]()
    assert lab.loaded.grammars
    lease = lab.loaded.grammars.compile("", asked, holders, made.set_result)
    grammar = made.result()
    assert isinstance(grammar, Grammar), grammar
    return grammar, lease


if __name__ == "__main__":
    run_bench(main)
