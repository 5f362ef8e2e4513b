"""Times of compiling schemas and of filling masks by vocabulary, and tokens a second of guided streams over plain ones.

Everything runs in this process. The larger vocabulary is the demo model's with made up tokens, pairs of others. Streams
take turns, plain and guided by one schema or by one each, with the same prompts; only steps in which all decode count.
Their seconds are CPU time of this process, with one thread: other processes do not count. On a GPU they are those that
pass, and `--shape` is a model of random weights or, with `demo`, the demo model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _models import SHAPES, build
from _torch_steps import decode, decode_ahead
from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.vocabulary import GenerationConfig, GuidedDecoding, Sampling, Stopping
from trtmesh.engine.admission import admit
from trtmesh.engine.backend import Submission
from trtmesh.engine.backends.torch.guided.grammars import Grammar, Guide
from trtmesh.engine.backends.torch.guided.guidance import GuidanceCompiler, compiler_for
from trtmesh.engine.backends.torch.loading import load_engine
from trtmesh.engine.backends.torch.model.weights import weight_files
from trtmesh.engine.backends.torch.preparation import PartLease
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.backends.torch.sequence import sequences_of
from trtmesh.engine.backends.torch.settings import TorchSettings
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


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[DEMO_IDS, 129_280])
    parser.add_argument("--schemas", type=Path, help="MaskBench's, in place of those built in")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", default="demo", help="demo, or one of _models.py")
    options = parser.parse_args(arguments)
    schemas = SCHEMAS
    if options.schemas:
        cases = json.loads(options.schemas.read_text(encoding="utf-8"))
        schemas = tuple(case["schema"] for case in cases)
    results: dict[str, Any] = {"grammars": [], "streams": []}
    for size in options.vocabularies:
        results["grammars"].append(grammars(size, schemas))
        print(results["grammars"][-1], file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(model_of(Path(folder), options.shape, options.device), options.device)
    for rows in options.rows:
        results["streams"].append(lab.compare(rows, options.rounds))
        print(results["streams"][-1], file=sys.stderr)
    return results


def grammars(size: int, schemas: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Milliseconds to compile the schemas, and microseconds to fill the masks of random answers."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(tokenizer_of(size), encoding="utf-8")
        started = time.perf_counter()
        compiler = compiler_for(Path(folder), size, [0], 8)
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
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(float(np.quantile(values, share)), 1) for name, share in shares.items()}


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


class Lab:
    """A loaded engine whose streams are guided or not."""

    def __init__(self, model: Path, device: str) -> None:
        self._decode = decode if device == "cpu" else decode_ahead
        limits = {"max_batch_size": 64}
        settings = TorchSettings.model_validate(
            {
                "threads": 1,
                "device": device,
                "kv_cache": {"prefix_reuse": False},
                "limits": limits,
            }
        )
        self._loaded = load_engine(model, weight_files(model), settings)
        self._keys = count()

    def compare(self, rows: int, rounds: int) -> dict[str, Any]:
        modes = {"plain": 0, "one schema": 1, "a schema each": rows}
        rates: dict[str, list[float]] = {mode: [] for mode in modes}
        sat_out: dict[str, float] = {}
        assert self._loaded.grammars
        counts = self._loaded.grammars.counts
        for _ in range(rounds + 1):
            for mode, schemas in modes.items():
                before = counts.late_masks
                rates[mode].append(self._rate(rows, schemas))
                sat_out[mode] = (counts.late_masks - before) / (rows * NEW_TOKENS)
        # The first round warms up.
        kept = {mode: found[1:] for mode, found in rates.items()}
        over = {
            mode: round(
                statistics.median(a / b for a, b in zip(found, kept["plain"], strict=True)), 3
            )
            for mode, found in kept.items()
            if mode != "plain"
        }
        return {
            "rows": rows,
            "plain_tokens_s": round(statistics.median(kept["plain"]), 1),
            "over_plain": over,
            # Of the last round, for each token.
            "sat_out": {mode: round(share, 3) for mode, share in sat_out.items() if share},
        }

    def _rate(self, rows: int, schemas: int) -> float:
        """Tokens a second of the steps in which all decode."""
        for row in range(rows):
            if not schemas:
                self._add(row)
            elif row < schemas:
                grammar, lease = self._compiled(row, rows // schemas)
                for own in range(row, rows, schemas):
                    self._add(own, grammar, lease)
        seconds, tokens = self._decode(self._loaded.engine, rows)
        return tokens / seconds

    def _compiled(self, number: int, holders: int) -> tuple[Grammar, PartLease]:
        # No answer ends before its last token.
        entries = {"type": "array", "items": ENTRY, "minItems": 1000, "title": str(number)}
        asked = GuidedDecoding(pb.GUIDE_TYPE_JSON_SCHEMA, json.dumps(entries))
        made = Future[Any]()
        assert self._loaded.grammars
        lease = self._loaded.grammars.compile("", asked, holders, made.set_result)
        grammar = made.result()
        assert isinstance(grammar, Grammar), grammar
        return grammar, lease

    def _add(
        self, row: int, grammar: Grammar | None = None, lease: PartLease | None = None
    ) -> None:
        asked = GuidedDecoding(pb.GUIDE_TYPE_JSON) if grammar else None
        config = GenerationConfig(
            stopping=Stopping(max_tokens=NEW_TOKENS, ignore_end_id=True),
            sampling=Sampling(temperature=1.0, seed=row),
            guided_decoding=asked,
        )
        item = Submission((next(self._keys),), "", row, 0, PROMPT, 0, config)
        sequences = sequences_of(
            item, item.keys, admit(item, self._loaded.info), TokenRules(config)
        )
        for sequence in sequences:
            sequence.grammar = grammar
            sequence.leases += [lease] if lease else []
        self._loaded.engine.add(item.keys, sequences)
