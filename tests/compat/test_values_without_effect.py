"""`Values without effect` in `docs/triton.md` lists exactly the values that a computed model does not notice."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from compat.test_docs import PAGE
from compat.test_every_input import NOT_FOR_BACKENDS
from compat.triton import Triton
from e2e.mesh import DEMO, PATIENT, SMALL, Mesh, running_mesh
from tokenizers import Tokenizer
from trtmesh.router.doors.triton.models import triton_models
from trtmesh.router.doors.triton.settings import TritonSettings

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "def fibonacci(n):\n    "
IDS = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(PROMPT).ids
TOKENS = 16
ASK: Mapping[str, Any] = {
    "input_ids": IDS,
    "input_lengths": len(IDS),
    "request_output_len": TOKENS,
    "exclude_input_in_output": True,
}
DECODINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy decoding": {"runtime_top_k": 1},
    "greedy decoding by default": {},
    "sampling by top_k": {"runtime_top_k": 40, "seed": np.array([[5]], np.uint64)},
    "sampling by top_p": {"runtime_top_p": 0.95, "seed": np.array([[5]], np.uint64)},
    "beam search": {"beam_width": 3},
}
"""The ways to choose tokens; inputs that choose the way itself are not varied."""
PLACES: Mapping[str, tuple[str, ...]] = {
    "greedy decoding": ("greedy decoding", "greedy decoding by default"),
    "beam search": ("beam search",),
    "sampling by `top_k` alone": ("sampling by top_k",),
    "any other decoding than beam search": tuple(way for way in DECODINGS if way != "beam search"),
    "every request": tuple(DECODINGS),
}
"""The second column of the page, in ways to choose tokens; other places are conditions of their own."""
SEEDS = tuple(np.array([[seed]], np.uint64) for seed in (6, 7, 8))
VARIED: Mapping[str, tuple[Any, ...]] = {
    "pad_id": (7, 8),
    "temperature": (0.2, 5.0),
    "runtime_top_k": (3, 1000),
    "runtime_top_p": (0.3, 1.0),
    "runtime_top_p_min": (1.0,),
    "runtime_top_p_decay": (0.5,),
    "seed": SEEDS,
    "repetition_penalty": (3.0,),
    "presence_penalty": (-50.0,),
    "frequency_penalty": (-50.0,),
    "no_repeat_ngram_size": (1,),
    "min_tokens": (12,),
    "len_penalty": (-9.0, 9.0),
    "early_stopping": (0, 1, 2),
    "beam_search_diversity_rate": (9.0,),
}

NEED_AN_END = ("min_tokens", "len_penalty", "early_stopping")
"""Inputs that matter only where sequences end early."""


def rows() -> dict[str, set[str]]:
    """The places of each input in the page's list."""
    _, _, section = PAGE.partition("### Values without effect")
    table = re.findall(r"^\| (`.*?) \| (.*?) \| .* \|$", section.partition("\n#")[0], re.MULTILINE)
    listed: dict[str, set[str]] = {}
    for names, place in table:
        for name in re.findall(r"`(\w+)`", names):
            listed.setdefault(name, set()).add(place)
    return listed


ROWS = rows()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    flags = (
        *(*SMALL, "--torch-dtype", "float32", "--torch-threads", "1"),
        # Other requests of a step would decide between candidates that nearly tie.
        *("--torch-kv-cache-tokens", "32768", "--torch-batch-invariant", "true"),
    )
    models = {name: {"template": name} for name in ("ensemble", "tensorrt_llm", "llmapi")}
    served = (*PATIENT, "--triton-models", json.dumps(models))
    async with running_mesh(engine_flags=flags, router_flags=served) as mesh:
        yield mesh


class Core:
    """The outputs of `tensorrt_llm`, equal requests sent once."""

    def __init__(self, triton: Triton) -> None:
        self._triton = triton
        self._asked: dict[str, asyncio.Task[list[list[int]]]] = {}

    async def output(self, tensors: Mapping[str, Any]) -> list[list[int]]:
        key = repr(sorted(tensors.items(), key=lambda named: named[0]))
        if key not in self._asked:
            self._asked[key] = asyncio.create_task(self._infer(tensors))
        return await self._asked[key]

    async def outputs(self, requests: Iterable[Mapping[str, Any]]) -> list[list[list[int]]]:
        return await asyncio.gather(*map(self.output, requests))

    async def _infer(self, tensors: Mapping[str, Any]) -> list[list[int]]:
        response = await self._triton.infer("tensorrt_llm", {**ASK, **tensors})
        ids, lengths = response.outputs["output_ids"][0], response.outputs["sequence_length"][0]
        return [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def core(triton: Triton) -> Core:
    return Core(triton)


async def has_effect(core: Core, decoding: str, name: str) -> bool:
    """Whether any value of an input changes the output."""
    base = dict(DECODINGS[decoding])
    if name == "early_stopping":
        # Long sequences become the better ones, so a search goes on if it may.
        base["len_penalty"] = 3.0
    plain = await core.output(base)
    ends = sorted({*plain[0][6:10]}) if name in NEED_AN_END else [-1]
    return any(await asyncio.gather(*(differs(core, base, name, end_id) for end_id in ends)))


async def differs(core: Core, base: Mapping[str, Any], name: str, end_id: int) -> bool:
    """Whether the values of an input give different outputs."""
    given = {**base, "end_id": end_id}
    requests = [{**given, name: value} for value in VARIED[name]]
    if name in base or len(requests) == 1:
        requests.append(given)
    first, *others = await core.outputs(requests)
    return any(output != first for output in others)


def chooses(decoding: str, name: str) -> bool:
    """Whether an input would change the way to choose tokens."""
    return decoding.startswith("greedy") and (
        name == "runtime_top_k" or (name == "runtime_top_p" and decoding.endswith("default"))
    )


@pytest.mark.parametrize("name", VARIED)
async def test_page_lists_the_decodings_that_do_not_notice_an_input(core: Core, name: str) -> None:
    listed = {way for place in ROWS.get(name, ()) for way in PLACES.get(place, ())}
    asked = [way for way in DECODINGS if not chooses(way, name)]
    effects = await asyncio.gather(*(has_effect(core, way, name) for way in asked))
    silent = {way for way, effect in zip(asked, effects, strict=True) if not effect}
    assert silent == listed & {*asked}


async def test_page_lists_all_names_of_an_input() -> None:
    fields: dict[str, set[str]] = {}
    for model in ("ensemble", "tensorrt_llm"):
        for name, spec in triton_models(TritonSettings())[model].inputs.items():
            for field in spec.put.fields if spec.put else ():
                if field.startswith(("sampling.", "beam_search.")):
                    fields.setdefault(field, set()).add(name)
    for names in fields.values():
        places = [ROWS.get(name, set()) for name in names]
        assert all(each == places[0] for each in places), names


async def test_conditions_of_the_page(core: Core) -> None:
    """Inputs that need another input."""
    plain = await core.output({})
    assert await core.output({"prompt_ignore_length": 9}) == plain
    ignoring = {"prompt_ignore_length": len(IDS)}
    repetition, presence = {"repetition_penalty": 3.0}, {"presence_penalty": -50.0}
    assert await core.output(repetition | ignoring) == await core.output(repetition)
    assert await core.output(presence | ignoring) != await core.output(presence)
    drawn = dict(DECODINGS["sampling by top_p"])
    (tokens,) = await core.output(drawn)
    reset = {"runtime_top_p_reset_ids": tokens[1]}
    assert await core.output(drawn | reset) == [tokens]
    decays = drawn | {"runtime_top_p_decay": 0.3, "runtime_top_p_min": 0.01}
    decayed = await core.output(decays)
    resets = await core.outputs(decays | {"runtime_top_p_reset_ids": token} for token in decayed[0])
    assert any(output != decayed for output in resets)
    assert {"prompt_ignore_length", "runtime_top_p_reset_ids"} <= ROWS.keys()


async def test_pieces_of_a_stream_never_hold_the_prompt(triton: Triton) -> None:
    told = []
    for excluded in (False, True):
        given = {"exclude_input_in_output": excluded, "streaming": True}
        responses = await triton.stream("tensorrt_llm", {**ASK, **given})
        told.append([i for r in responses for i in r.outputs["output_ids"].ravel().tolist()])
    assert told[0] == told[1]
    whole = await triton.infer("tensorrt_llm", {**ASK, "exclude_input_in_output": False})
    assert whole.outputs["output_ids"].ravel().tolist() == IDS + told[0]
    assert "exclude_input_in_output" in ROWS


async def test_empty_words_change_nothing(triton: Triton) -> None:
    asked = {"text_input": PROMPT, "max_tokens": TOKENS}
    plain = (await triton.infer("ensemble", asked)).text
    for name in ("bad_words", "stop_words"):
        assert (await triton.infer("ensemble", {**asked, name: [""]})).text == plain
    biased = {"embedding_bias_words": [""], "embedding_bias_weights": 9.0}
    assert (await triton.infer("ensemble", asked | biased)).text == plain


async def test_greedy_llmapi_request_draws_nothing(triton: Triton) -> None:
    asked = {
        "text_input": np.array([PROMPT], np.object_),
        "sampling_param_max_tokens": np.array([TOKENS], np.int32),
    }
    varied = {
        "sampling_param_temperature": np.array([5.0], np.float32),
        "sampling_param_top_p": np.array([0.3], np.float32),
        "sampling_param_seed": np.array([6], np.uint64),
    }
    greedy = asked | {"sampling_param_top_k": np.array([1], np.int32)}
    plain = (await triton.infer("llmapi", greedy)).text
    for name, value in varied.items():
        assert (await triton.infer("llmapi", greedy | {name: value})).text == plain
        assert "greedy decoding by `llmapi`" in ROWS[name]
    hot = asked | {"sampling_param_temperature": np.array([5.0], np.float32)}
    assert (await triton.infer("llmapi", hot)).text != plain


async def test_page_lists_every_input_that_no_part_reads() -> None:
    """Inputs are seen at a backend (test_every_input), acted upon by the door, or on the page."""
    silent = {name for name, why in NOT_FOR_BACKENDS.items() if why.startswith("without effect")}
    assert {name for name in silent if "every request" in ROWS.get(name, ())} == silent


async def test_page_names_only_inputs() -> None:
    served = {name: {"template": name} for name in ("ensemble", "tensorrt_llm", "llmapi")}
    models = triton_models(TritonSettings.model_validate({"models": served})).values()
    assert ROWS.keys() <= {name for model in models for name in model.inputs}
