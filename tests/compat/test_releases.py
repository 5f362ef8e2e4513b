"""Requests as clients of TensorRT-LLM's releases send them: each tensor once, its effect observed at the torch engine,
or refused by name where it has none; and all together, as of each release that declares inputs otherwise.

That every release's declaration is read and translated alike: tests/router/doors/triton/test_releases.py. That every
model's input reaches its field: test_every_input.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from compat import tiny_llama
from compat.releases import (
    FACTS,
    MODELS,
    NUMPY,
    RELEASES,
    data_type_of,
    end_to_end,
    releases_of,
    row_of,
    tensors,
    typed,
)
from compat.tiny_llama import END, PAD, TOKENIZER, VOCABULARY_SIZE, WIDTH
from compat.triton import Response, Triton, in_pieces
from e2e.mesh import PATIENT, Mesh, running_mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "The quick brown fox"
TOKENS = 12
IDS = [int(each) for each in TOKENIZER.encode(PROMPT).ids]
PICTURE = np.zeros((3, 224, 224))
PICTURES = np.zeros((1, 2, 2, 3))
GENERATING = ("ensemble", "tensorrt_llm_bls", "tensorrt_llm")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    folder = tiny_llama.build(tmp_path_factory.mktemp("llama"))
    flags = tiny_llama.engine_flags(folder)
    async with running_mesh(engine_flags=flags, router_flags=PATIENT, model_dir=folder) as mesh:
        yield mesh


CORE_NAMES: Mapping[str, str] = {
    "max_tokens": "request_output_len",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}
"""Names of the core model, by those of the text models."""
OLD_NAMES: Mapping[str, str] = {"min_tokens": "min_length", "seed": "random_seed"}

Values = Mapping[str, Any]


class Asker:
    """Sends requests to a model in the names and types of a release."""

    def __init__(self, triton: Triton, model: str, release: str) -> None:
        self.triton = triton
        self.model = model
        self.release = release

    @property
    def is_core(self) -> bool:
        return self.model == "tensorrt_llm"

    def name(self, tensor: str) -> str:
        """A text model's newest name, as this model and release have it."""
        name = CORE_NAMES.get(tensor, tensor) if self.is_core else tensor
        old = OLD_NAMES.get(name, name)
        return old if old in tensors(self.model, "inputs", self.release) else name

    @property
    def prompt(self) -> dict[str, Any]:
        """The required inputs."""
        if self.is_core:
            values = {"input_ids": IDS, "input_lengths": len(IDS), "request_output_len": TOKENS}
            return values | {"end_id": END}
        return {"text_input": PROMPT, "max_tokens": TOKENS} | self.empty_words

    @property
    def empty_words(self) -> dict[str, Any]:
        """The words that v0.5 requires."""
        known = tensors(self.model, "inputs", self.release)
        return {name: [""] for name in ("bad_words", "stop_words") if known[name].required}

    async def responses(self, values: Values, **more: Any) -> Sequence[Response]:
        named = {self.name(name): value for name, value in values.items()}
        request = typed(self.model, self.release, self.prompt | named)
        return await self.triton.stream(self.model, request, **more)

    async def said(self, values: Values) -> list[Any]:
        """The texts or ids of all responses."""
        responses = await self.responses(values)
        errors = [response.error for response in responses if response.error]
        assert not errors
        return [content(response) for response in responses]

    async def refusal(self, values: Values) -> str:
        (response,) = await self.responses(values)
        return response.error


def content(response: Response) -> Any:
    name = "output_ids" if "output_ids" in response.outputs else "text_output"
    return response.outputs[name].tolist()


Check = Callable[[Asker, str], Any]
"""Observes a tensor in one model and release."""


@dataclass(frozen=True)
class Changes:
    """The answer differs from the one with `instead`, or without the tensor."""

    value: Any
    beside: Values = field(default_factory=dict)
    instead: Any = None

    async def __call__(self, asker: Asker, name: str) -> None:
        other = {} if self.instead is None else {name: self.instead}
        answer = await asker.said({**self.beside, name: self.value})
        assert answer != await asker.said({**self.beside, **other})


@dataclass(frozen=True)
class ChangesBeams:
    """The answer of a beam search differs from the one with `instead`, for one of the ids as end id: a search whose
    beams end at different lengths."""

    value: Any
    instead: Any
    beside: Values

    async def __call__(self, asker: Asker, name: str) -> None:
        core = Asker(asker.triton, "tensorrt_llm", "2025-05")
        (beams,) = await core.said({**self.beside, "end_id": END})
        for end_id in sorted({each for beam in beams[0] for each in beam[len(IDS) :]}):
            beside = {**self.beside, "end_id": end_id}
            answer = await asker.said({**beside, name: self.value})
            if answer != await asker.said({**beside, name: self.instead}):
                return
        raise AssertionError(f"{name} changes nothing")


@dataclass(frozen=True)
class Same:
    """The answer is the same as without the tensor."""

    value: Any
    beside: Values = field(default_factory=dict)

    async def __call__(self, asker: Asker, name: str) -> None:
        assert await asker.said({**self.beside, name: self.value}) == await asker.said({})


@dataclass(frozen=True)
class Asks:
    """The response has these outputs, and without the tensor it has none of them."""

    outputs: tuple[str, ...]

    async def __call__(self, asker: Asker, name: str) -> None:
        (without,) = await asker.responses({})
        (response,) = await asker.responses({name: True})
        assert set(self.outputs) <= set(response.outputs)
        assert not set(self.outputs) & set(without.outputs)


@dataclass(frozen=True)
class Refused:
    """The request fails with an error that names the tensor."""

    value: Any
    beside: Values = field(default_factory=dict)

    async def __call__(self, asker: Asker, name: str) -> None:
        error = await asker.refusal({**self.beside, name: self.value})
        assert name in error


def generated(asker: Asker, said: Sequence[Any]) -> Any:
    """What follows the prompt in a whole answer."""
    return said[0][0][0][len(IDS) :] if asker.is_core else said[0][0].decode()[len(PROMPT) :]


async def ends_at_an_id(asker: Asker, name: str) -> None:
    whole = await generated_ids(asker)
    assert await count(asker, {name: whole[2]}) == 3


async def generated_ids(asker: Asker) -> list[int]:
    core = Asker(asker.triton, "tensorrt_llm", "2025-05")
    return list(generated(core, await core.said({})))


async def count(asker: Asker, values: Values) -> int:
    """The number of tokens of an answer."""
    response = (await asker.responses({**values, "return_generation_logits": True}))[-1]
    assert not response.error
    return int(response.outputs["generation_logits"].shape[2])


async def is_longer_at_least(asker: Asker, name: str) -> None:
    end = {"end_id": (await generated_ids(asker))[2]}
    assert await count(asker, end) < 6
    assert await count(asker, {**end, name: 8}) > 6


async def limits_tokens(asker: Asker, name: str) -> None:
    assert await count(asker, {name: 3}) == 3
    assert await count(asker, {name: 5}) == 5


async def draws_by_seed(asker: Asker, name: str) -> None:
    one, again, other = [await asker.said({**SAMPLED, name: seed}) for seed in (1, 1, 2)]
    assert one == again != other


async def has_beams(asker: Asker, name: str) -> None:
    (response,) = await asker.responses({name: 3})
    shape = response.outputs["output_ids" if asker.is_core else "text_output"].shape
    assert shape[int(asker.is_core)] == 3


async def has_sequences(asker: Asker, name: str) -> None:
    responses = await asker.responses({**SAMPLED, name: 3})
    assert {response.number["sequence_index"] for response in responses} == {0, 1, 2}


async def streams(asker: Asker, name: str) -> None:
    whole = generated(asker, await asker.said({name: False}))
    parts = await in_pieces(lambda: asker.said({name: True}))
    joined = [part[0][0] if asker.is_core else part[0].decode() for part in parts]
    assert ([*chain(*joined)] if asker.is_core else "".join(joined)) == whole


async def stops(asker: Asker, name: str) -> None:
    (response,) = await asker.responses({name: True}, request_id="no such request")
    assert not response.error
    assert not response.outputs


async def excludes_the_prompt(asker: Asker, name: str) -> None:
    whole = await asker.said({name: False})
    (without,) = await asker.said({name: True})
    assert without == (
        [[generated(asker, whole)]] if asker.is_core else [generated(asker, whole).encode()]
    )


async def ends_at_words(asker: Asker, name: str) -> None:
    whole = generated(asker, await asker.said({}))
    if asker.is_core:
        words: Any = [[whole[2], whole[3]], [2, -1]]
        assert generated(asker, await asker.said({name: words})) == whole[:4]
    else:
        assert generated(asker, await asker.said({name: ["zz", whole[1:4]]})) == whole[:4]


async def avoids_words(asker: Asker, name: str) -> None:
    if asker.is_core:
        ids = await generated_ids(asker)
        assert ids[1] not in generated(asker, await asker.said({name: [[ids[1]], [1]]}))
        return
    biased = {"embedding_bias_words": ["quick"], "embedding_bias_weights": [1000.0]}
    free, steered = [await asker.said(biased | more) for more in ({}, {name: ["", "quick"]})]
    assert "quick" in generated(asker, free)
    assert free != steered


async def biases_words(asker: Asker, name: str) -> None:
    words: dict[str, Any] = {"embedding_bias_words": ["quick"], "embedding_bias_weights": [1000.0]}
    assert name in words
    assert "quick" in generated(asker, await asker.said(words))
    (response,) = await asker.responses({**words, name: words[name] * 2})
    assert name in response.error


async def biases_ids(asker: Asker, name: str) -> None:
    bias = np.zeros(VOCABULARY_SIZE)
    bias[77] = 1000.0
    assert generated(asker, await asker.said({name: bias})) == [77] * TOKENS


async def follows_a_guide(asker: Asker, name: str) -> None:
    guided = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(77)+"}
    answer = generated(asker, await asker.said(guided))
    text = TOKENIZER.decode(list(answer)) if asker.is_core else answer
    assert text.startswith("77")
    assert not text.strip("7")
    wrong = {"guided_decoding_guide_type": "yaml", "guided_decoding_guide": "(77"}[name]
    assert name in await asker.refusal({**guided, name: wrong})


async def extends_the_vocabulary(asker: Asker, name: str) -> None:
    """Prompt tuning: rows for ids beyond the vocabulary. A text has none, so only the shape is seen."""
    table = np.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)
    tuning = {"prompt_embedding_table": table, "prompt_vocab_size": 2}
    if asker.is_core:
        prompt = {"input_ids": [*IDS[:-1], VOCABULARY_SIZE + 1]}
        assert await asker.said(prompt | tuning) != await asker.said({})
        if name == "prompt_embedding_table":
            assert "input_ids" in await asker.refusal(prompt)
    assert await asker.said(tuning)
    wrong = {"prompt_embedding_table": table[:, :-1], "prompt_vocab_size": 3}
    assert name in await asker.refusal({**tuning, name: wrong[name]})


async def separates_prefixes(asker: Asker, name: str) -> None:
    """Prompts with different extra ids share no KV."""
    prompt = " ".join([PROMPT] * 20)
    ids = TOKENIZER.encode(prompt).ids
    given: dict[str, Any] = (
        {"input_ids": ids, "input_lengths": len(ids)} if asker.is_core else {"text_input": prompt}
    )
    given |= {"return_perf_metrics": True}

    async def reused(extra: int) -> int:
        (response,) = await asker.responses(
            {**given, name: [extra] * len(ids) if asker.is_core else extra}
        )
        return int(response.number["kv_cache_reused_blocks"])

    seed = RELEASES.index(asker.release) * 10 + MODELS.index(asker.model)
    assert [await reused(extra) > 0 for extra in (seed, seed, seed + 1000)] == [False, True, False]


async def changes_nothing_but_time(asker: Asker, name: str) -> None:
    ids = await generated_ids(asker)
    assert await asker.said({name: [*ids[:3], 5, 6]}) == await asker.said({})
    assert name in await asker.refusal({name: [VOCABULARY_SIZE]})


async def verifies_by_logits(asker: Asker, name: str) -> None:
    """Drafts that the source had as likely as the model hold, also against a threshold; those it was sure of do not."""
    drafts = {**SEEDED, "top_k": VOCABULARY_SIZE, "draft_input_ids": [5, 6]}
    flat, sure = np.zeros((2, VOCABULARY_SIZE)), np.eye(VOCABULARY_SIZE)[[5, 6]] * 10_000
    for logits, threshold, held in ((flat, 0.01, True), (sure, 0.01, False), (sure, 1e-9, True)):
        given = {"draft_logits": logits, "draft_acceptance_threshold": threshold}
        ids = generated(asker, await asker.said(drafts | given))
        assert (list(ids[:2]) == [5, 6]) == held
    wrong = {"draft_logits": ONES, "draft_acceptance_threshold": 0.5}[name]
    assert name in await asker.refusal({name: wrong})


SAMPLED: Values = {"top_k": 50, "temperature": 100.0}
SEEDED: Values = {**SAMPLED, "seed": 7}
DECAYING: Values = {"top_p": 0.9, "temperature": 100.0, "seed": 3, "runtime_top_p_decay": 0.3}
BEAMS: Values = {"beam_width": 3}
LONG_BEAMS: Values = {"beam_width": 2, "length_penalty": 5.0, "max_tokens": 30}
PERF = (
    *("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"),
    *("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
    *("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"),
)
RANGE: Values = {
    "retention_token_range_starts": [0],
    "retention_token_range_ends": [2],
    "retention_token_range_priorities": [50],
    "retention_token_range_durations_ms": [1000],
}
LOOKAHEAD: Values = {
    "lookahead_window_size": 3,
    "lookahead_ngram_size": 3,
    "lookahead_verification_set_size": 3,
}
ONES = np.ones((2, 3))

OBSERVED: Mapping[str, Check] = {
    "text_input": Changes("Another prompt"),
    "input_ids": Changes([*IDS[:-1], 99]),
    "input_lengths": Changes(len(IDS) - 1),
    "max_tokens": limits_tokens,
    "request_output_len": limits_tokens,
    "decoder_text_input": Refused("hello"),
    "bad_words": avoids_words,
    "bad_words_list": avoids_words,
    "stop_words": ends_at_words,
    "stop_words_list": ends_at_words,
    "end_id": ends_at_an_id,
    "pad_id": Same(5),
    "top_k": Changes(50, {"temperature": 100.0, "seed": 7}),
    "runtime_top_k": Changes(50, {"temperature": 100.0, "seed": 7}),
    "top_p": Changes(0.9, {"temperature": 100.0, "seed": 7}),
    "runtime_top_p": Changes(0.9, {"temperature": 100.0, "seed": 7}),
    "runtime_top_p_decay": Changes(0.3, DECAYING, instead=1.0),
    "runtime_top_p_min": Changes(0.9, DECAYING, instead=0.01),
    "runtime_top_p_reset_ids": Changes(
        5, {**DECAYING, "embedding_bias": np.eye(VOCABULARY_SIZE)[5] * 400.0}
    ),
    "temperature": Changes(100.0, {"top_k": 50, "seed": 7}),
    "length_penalty": ChangesBeams(1000.0, -1000.0, BEAMS),
    "len_penalty": ChangesBeams(1000.0, -1000.0, BEAMS),
    "early_stopping": ChangesBeams(True, False, LONG_BEAMS),
    "beam_search_diversity_rate": Changes(50.0, BEAMS),
    "repetition_penalty": Changes(0.02),
    "presence_penalty": Changes(-50.0),
    "frequency_penalty": Changes(-50.0),
    "min_length": is_longer_at_least,
    "min_tokens": is_longer_at_least,
    "random_seed": draws_by_seed,
    "seed": draws_by_seed,
    "beam_width": has_beams,
    "num_return_sequences": has_sequences,
    "stream": streams,
    "streaming": streams,
    "stop": stops,
    "return_log_probs": Asks(("cum_log_probs", "output_log_probs")),
    "return_context_logits": Asks(("context_logits",)),
    "return_generation_logits": Asks(("generation_logits",)),
    "return_kv_cache_reuse_stats": Asks(PERF[:3]),
    "return_perf_metrics": Asks(PERF),
    "prompt_embedding_table": extends_the_vocabulary,
    "prompt_vocab_size": extends_the_vocabulary,
    "prompt_table_extra_id": separates_prefixes,
    "prompt_table_extra_ids": separates_prefixes,
    "embedding_bias_words": biases_words,
    "embedding_bias_weights": biases_words,
    "embedding_bias": biases_ids,
    "exclude_input_in_output": excludes_the_prompt,
    "lora_task_id": Refused(7),
    "lora_weights": Refused(ONES),
    "lora_config": Refused(ONES),
    "guided_decoding_guide_type": follows_a_guide,
    "guided_decoding_guide": follows_a_guide,
    "image_bytes_input": Refused(PICTURES),
    "image_url_input": Refused("https://example.org/a.png"),
    "video_bytes_input": Refused(PICTURES),
    "num_draft_tokens": Refused(4),
    "use_draft_logits": Refused(True),
    "draft_input_ids": changes_nothing_but_time,
    "draft_logits": verifies_by_logits,
    "draft_acceptance_threshold": verifies_by_logits,
    "decoder_input_lengths": Refused(3, {"decoder_input_ids": [4, 5]}),
    "encoder_input_features": Refused(ONES),
    "encoder_output_lengths": Refused(2),
    "cross_attention_mask": Refused(ONES),
    "skip_cross_attn_blocks": Refused(True),
    "mrope_rotary_cos_sin": Refused(np.ones(4)),
    "mrope_position_deltas": Refused(-3),
    "context_phase_params": Refused([1, 2]),
    "retention_token_range_starts": Refused([-1], RANGE),
    "retention_token_range_ends": Refused([0], RANGE),
    "retention_token_range_priorities": Refused([101], RANGE),
    "retention_token_range_durations_ms": Refused([-5], RANGE),
    "retention_decode_priority": Refused(101),
    "retention_decode_duration_ms": Refused(50),
    **{name: Refused(3, LOOKAHEAD) for name in LOOKAHEAD},
}


async def starts_a_decoder(asker: Asker, name: str) -> None:
    """As `preprocessing` emits it, it is without effect; more ids need a decoder."""
    assert await asker.said({name: [PAD]}) == await asker.said({})
    assert await asker.said({name: [PAD], "decoder_input_lengths": 1}) == await asker.said({})
    assert name in await asker.refusal({name: [PAD, PAD]})


async def shows_a_picture(asker: Asker, name: str) -> None:
    dims = tensors(asker.model, "inputs", asker.release)[name].dims
    assert name in await asker.refusal({name: PICTURE if len(dims) == 3 else PICTURE[np.newaxis]})


OBSERVED = {**OBSERVED, "decoder_input_ids": starts_a_decoder, "image_input": shows_a_picture}


def newest(model: str, kind: str) -> list[tuple[str, str, str]]:
    """Model, tensor and the first release of its newest declaration."""
    return [(model, name, since(entries[-1])) for name, entries in FACTS[model][kind].items()]


def since(entry: str) -> str:
    return entry.split(" ", maxsplit=1)[0]


def changing(model: str, *kinds: str) -> list[tuple[str, str]]:
    """Model and release of each change of its declarations."""

    def declared(release: str) -> list[object]:
        return [tensors(model, kind, release) for kind in kinds]

    first, *others = releases_of(model)
    changes = [
        now for before, now in pairwise((first, *others)) if declared(before) != declared(now)
    ]
    return [(model, each) for each in (first, *changes)]


INPUTS = [
    *newest("ensemble", "inputs"),
    *newest("tensorrt_llm", "inputs"),
    *(
        each
        for each in newest("tensorrt_llm_bls", "inputs")
        if each[1] not in FACTS["ensemble"]["inputs"]
    ),
]
"""BLS differs from the ensemble in its images and drafts alone."""


@pytest.mark.parametrize(("model", "name", "release"), INPUTS)
async def test_input_of_a_generating_model(
    triton: Triton, model: str, name: str, release: str
) -> None:
    await OBSERVED[name](Asker(triton, model, release), name)


NEUTRAL: Values = {
    "bad_words": [""],
    "stop_words": [""],
    "end_id": END,
    "pad_id": PAD,
    "top_k": 1,
    "top_p": 0.0,
    "temperature": 1.0,
    "length_penalty": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 1,
    "seed": 0,
    "beam_width": 1,
    "num_return_sequences": 1,
    "stream": False,
    "return_log_probs": False,
    "return_context_logits": False,
    "stop": False,
    "return_generation_logits": False,
    "return_perf_metrics": False,
    "return_kv_cache_reuse_stats": False,
    "exclude_input_in_output": False,
    "embedding_bias_words": [""],
    "embedding_bias_weights": [0.0],
    "prompt_table_extra_id": 0,
    "num_draft_tokens": 0,
    "use_draft_logits": False,
    "early_stopping": False,
    "stop_words_list": [[0], [-1]],
    "bad_words_list": [[0], [-1]],
    "embedding_bias": [],
    "decoder_input_ids": [PAD],
    "decoder_input_lengths": 1,
    "prompt_table_extra_ids": [],
    "beam_search_diversity_rate": 0.0,
}
"""Values that scripts send to ask for nothing."""


@pytest.mark.parametrize(
    ("model", "release"),
    [(model, each) for model in GENERATING for each in end_to_end(releases_of(model))],
)
async def test_inputs_of_a_release_together(triton: Triton, model: str, release: str) -> None:
    """All inputs that may ask for nothing, in the release's names and types, change nothing."""
    asker = Asker(triton, model, release)
    known = tensors(model, "inputs", release)
    values = {name: value for name, value in NEUTRAL.items() if asker.name(name) in known}
    assert len(values) >= 13
    assert await asker.said(values) == await Asker(triton, model, "2025-05").said({})


RICH: Values = {
    "return_log_probs": True,
    "return_context_logits": True,
    "return_generation_logits": True,
    "return_perf_metrics": True,
    "num_return_sequences": 2,
    "top_k": 5,
}


@pytest.mark.parametrize(
    ("model", "release"), [each for model in GENERATING for each in changing(model, "outputs")]
)
async def test_outputs_of_a_generating_model(triton: Triton, model: str, release: str) -> None:
    """In a response that has all outputs: two rows with two sequences each."""
    asker = Asker(triton, model, release)
    request = typed(model, release, asker.prompt | {asker.name(n): v for n, v in RICH.items()})
    both = {tensor: np.concatenate([row, row]) for tensor, row in request.items()}
    declared = {n: t for n, t in tensors(model, "outputs", release).items() if n != HALF}
    mandatory = {"output_ids", "sequence_length"} if asker.is_core else set()
    responses = await triton.stream(model, both, outputs=sorted({*declared, *mandatory}))
    assert len(responses) == 4
    for response in responses:
        assert not response.error
        assert set(response.outputs) == {*declared, *mandatory}
        for name, tensor in declared.items():
            assert response.outputs[name].dtype == NUMPY[data_type_of(tensor)]


HALF = "context_phase_params"
"""The output of a first half alone."""


async def test_output_of_a_first_half(triton: Triton) -> None:
    ((model, name, release),) = [e for e in newest("tensorrt_llm", "outputs") if e[1] == HALF]
    parameters = {"request_type": "context_only"}
    (response,) = await Asker(triton, model, release).responses({}, parameters=parameters)
    assert response.outputs[name].dtype == np.uint8


async def preprocessed(triton: Triton, release: str, values: Values) -> Response:
    known = tensors("preprocessing", "inputs", release)
    words = {name: [""] for name in ("BAD_WORDS_DICT", "STOP_WORDS_DICT") if known[name].required}
    required = {"QUERY": PROMPT, "REQUEST_OUTPUT_LEN": TOKENS} | words
    (response,) = await triton.stream(
        "preprocessing", typed("preprocessing", release, {**required, **values})
    )
    return response


QUICK = TOKENIZER.encode("quick", add_special_tokens=False).ids
WORDS = [[QUICK[-1:], [1]]]
"""`▁` and `quick` spell the word after a space. `quick`, with which they end, spells it everywhere."""
BIAS = [1.5 if token in QUICK else 0.0 for token in range(VOCABULARY_SIZE)]
WEIGHTED: Values = {"EMBEDDING_BIAS_WORDS": ["quick"], "EMBEDDING_BIAS_WEIGHTS": [1.5]}
TABLE = np.ones((2, 3))
PREPROCESSED: Mapping[str, tuple[Values, Mapping[str, Any]]] = {
    "QUERY": ({"QUERY": "quick"}, {"REQUEST_INPUT_LEN": [[len(QUICK) + 1]]}),
    "REQUEST_OUTPUT_LEN": ({"REQUEST_OUTPUT_LEN": 9}, {"REQUEST_OUTPUT_LEN": [[9]]}),
    "BAD_WORDS_DICT": ({"BAD_WORDS_DICT": ["quick"]}, {"BAD_WORDS_IDS": WORDS}),
    "STOP_WORDS_DICT": ({"STOP_WORDS_DICT": ["quick"]}, {"STOP_WORDS_IDS": WORDS}),
    "EMBEDDING_BIAS_WORDS": (WEIGHTED, {"EMBEDDING_BIAS": [BIAS]}),
    "EMBEDDING_BIAS_WEIGHTS": (WEIGHTED, {"EMBEDDING_BIAS": [BIAS]}),
    "END_ID": ({"END_ID": 9}, {"OUT_END_ID": [[9]]}),
    "PAD_ID": ({"PAD_ID": 9}, {"OUT_PAD_ID": [[9]], "DECODER_INPUT_ID": [[9]]}),
    "DECODER_QUERY": (
        {"DECODER_QUERY": "quick"},
        {"REQUEST_DECODER_INPUT_LEN": [[len(QUICK) + 1]]},
    ),
    "PROMPT_EMBEDDING_TABLE": (
        {"PROMPT_EMBEDDING_TABLE": TABLE},
        {"OUT_PROMPT_EMBEDDING_TABLE": [TABLE.tolist()]},
    ),
    "PROMPT_TABLE_EXTRA_ID": (
        {"PROMPT_TABLE_EXTRA_ID": 4},
        {"OUT_PROMPT_TABLE_EXTRA_IDS": [[4] * len(IDS)]},
    ),
}
"""The values of an input of `preprocessing`, and the outputs that follow."""
PICTURED: Values = {
    "IMAGE": PICTURE,
    "IMAGE_BYTES": PICTURES,
    "IMAGE_URL": "https://example.org/a.png",
    "VIDEO_BYTES": PICTURES,
}


@pytest.mark.parametrize(("_", "name", "release"), newest("preprocessing", "inputs"))
async def test_input_of_preprocessing(triton: Triton, _: str, name: str, release: str) -> None:
    if name in PICTURED:
        response = await preprocessed(triton, release, {name: PICTURED[name]})
        assert name in response.error
        return
    values, expected = PREPROCESSED[name]
    response = await preprocessed(triton, release, values)
    assert {each: response.outputs[each].tolist() for each in expected} == expected


@pytest.mark.parametrize(("_", "release"), changing("preprocessing", "outputs"))
async def test_outputs_of_preprocessing(triton: Triton, _: str, release: str) -> None:
    everything = {
        each: value for values, _ in PREPROCESSED.values() for each, value in values.items()
    }
    response = await preprocessed(triton, release, everything)
    for name, declared in tensors("preprocessing", "outputs", release).items():
        if name in response.outputs:
            assert response.outputs[name].dtype == NUMPY[declared.data_type]
            continue
        # The outputs of a vision encoder are refused where a request names them.
        request = typed("preprocessing", release, {"QUERY": PROMPT, "REQUEST_OUTPUT_LEN": TOKENS})
        (refused,) = await triton.stream("preprocessing", request, outputs=[name])
        assert name in refused.error


PASSED: Values = {
    "CUM_LOG_PROBS": [-2.5],
    "OUTPUT_LOG_PROBS": [[-1.0, -1.5]],
    "CONTEXT_LOGITS": [[0.5, 1.0], [2.0, 3.0]],
    "GENERATION_LOGITS": [[[0.5, 1.0], [2.0, 3.0]]],
    "BATCH_INDEX": 3,
}


@pytest.mark.parametrize(("_", "release"), changing("postprocessing", "inputs", "outputs"))
async def test_postprocessing(triton: Triton, _: str, release: str) -> None:
    """Texts of ids; the tensors of v0.6 to v0.13 pass through in their own types and shapes."""
    known = tensors("postprocessing", "inputs", release)
    padded = [[*IDS, -1, -1]]
    values: dict[str, Any] = {"TOKENS_BATCH": padded} | {
        name: value for name, value in PASSED.items() if name in known
    }
    if "SEQUENCE_LENGTH" in known:
        values["SEQUENCE_LENGTH"] = [len(IDS)]
    assert set(known) == set(values)
    (response,) = await triton.stream("postprocessing", typed("postprocessing", release, values))
    assert not response.error
    assert set(response.outputs) == set(tensors("postprocessing", "outputs", release))
    assert response.outputs["OUTPUT"].tolist() == [PROMPT.encode()]
    for name in set(PASSED) & set(known):
        sent = row_of(known[name], values[name])
        np.testing.assert_array_equal(response.outputs[f"OUT_{name}"], sent, strict=True)
    if "SEQUENCE_LENGTH" in known:
        shorter = values | {"SEQUENCE_LENGTH": [len(IDS) - 1]}
        (response,) = await triton.stream(
            "postprocessing", typed("postprocessing", release, shorter)
        )
        assert response.outputs["OUTPUT"].tolist() == [TOKENIZER.decode(IDS[:-1]).encode()]
