"""Every supported field of the torch backend changes the result of an item; every other one is refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos.tiny_adapters import tiny_adapter
from engine.backend_lab import Lab, config_of, lab
from engine.field_effects import (
    BLOCK,
    DRAWN,
    NEW,
    ONE,
    ONE_AT_A_TIME,
    PROMPT,
    Case,
    Options,
    accepted,
    adapted,
    adapter_cases,
    cache,
    check,
    everything,
    order,
    refuses,
    reused,
    survives,
    with_and_without,
)
from engine.short_names import by_short_names
from engine.torch.conftest import Device
from engine.torch.gpu_choice import GpuChooser
from engine.torch.loads import shared_loads
from oracle import tiny_models
from trtmesh.chassis.errors import InvalidField
from trtmesh.engine.backend import Backend
from trtmesh.engine.backends.torch.backend import TorchBackend
from trtmesh.engine.backends.torch.cpu import device as cpu
from trtmesh.engine.backends.torch.fields import ADAPTERS, SUPPORTED_FIELDS
from trtmesh.engine.backends.torch.settings import TorchSettings
from trtmesh.v1 import generation_pb2 as pb

CHOSEN_BY = ("stopping.", "sampling.", "beam_search.", "guided_decoding.", "output.")
"""Groups of the fields by which tokens and their details are chosen."""
SMALL_POOL = {"kv_cache_tokens": 12 * BLOCK}
KEPT = pb.KvCacheConfig(token_ranges=[pb.TokenRangeRetention(priority=100)])


def table(seed: int, **values: Any) -> Options:
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    tensor = pb.Tensor(data_type=pb.DATA_TYPE_FP32, shape=[4, 64], data=rows.numpy().tobytes())
    return {"prompt_tuning": pb.PromptTuningConfig(embedding_table=tensor, **values)}


def guided(kind: str, guide: str | None = None, **values: Any) -> Options:
    guide_type = pb.GuideType.Value(f"GUIDE_TYPE_{kind}")
    asked = pb.GuidedDecodingConfig(guide_type=guide_type, guide=guide, **values)
    return {"guided_decoding": asked}


def drafts(*, logits: bool = True, **values: Any) -> pb.DraftConfig:
    """Two drafts of which their source was sure."""
    rows = torch.eye(320)[:2] * 9
    tensor = pb.Tensor(data_type=pb.DATA_TYPE_FP32, shape=[2, 320], data=rows.numpy().tobytes())
    return pb.DraftConfig(token_ids=[0, 1], logits=tensor if logits else None, **values)


async def drafted(on: Lab, options: Options) -> object:
    """The drafts computed, and those accepted."""
    (outcome,) = await on.run(PROMPT, config_of(options))
    assert outcome.end
    metrics = outcome.end.perf_metrics
    assert metrics
    return metrics.total_draft_tokens, metrics.total_accepted_draft_tokens


def torch_cases(plain: Sequence[int]) -> dict[str, Case]:
    """By field; `plain` are the prompt's tokens without any field."""
    often = {"embedding_bias_token_ids": [[5]], "embedding_bias_weights": [9.0]}
    ending_beams = {
        **often,
        "embedding_bias_weights": [4.0],
        "max_tokens": 12,
        "end_id": 5,
        "beam_width": 3,
    }
    decaying = {**DRAWN, "seed": 8, "top_p": 0.99, "top_p_decay": 0.3}
    contents = [tiny_adapter(seed, rank=4).content for seed in range(3)]
    return adapter_cases(NEW, adapted(contents), {"adapters_host_bytes": 2**28}) | {
        "stopping.max_tokens": Case({**NEW}, {"max_tokens": 3}),
        "stopping.min_tokens": Case({"end_id": plain[3], "max_tokens": 12}, {"min_tokens": 9}),
        "stopping.end_id": Case({"max_tokens": 12}, {"end_id": plain[3]}),
        "stopping.ignore_end_id": Case(
            {"max_tokens": 12, **often, "embedding_bias_token_ids": [[tiny_models.END_ID]]},
            {"ignore_end_id": True},
        ),
        "stopping.stop_token_ids": Case(NEW, {"stop_token_ids": [plain[2:4]]}),
        "stopping.bad_token_ids": Case(NEW, {"bad_token_ids": [plain[2:4]]}),
        "sampling.temperature": Case({**NEW, "top_k": 300, "seed": 5}, {"temperature": 3.0}),
        "sampling.top_k": Case(DRAWN, {"top_k": 3}),
        "sampling.top_p": Case(DRAWN, {"top_p": 0.3}),
        "sampling.min_p": Case(DRAWN, {"min_p": 0.5}),
        "sampling.top_p_min": Case({**DRAWN, "top_p": 0.2}, {"top_p_min": 0.95}),
        "sampling.top_p_decay": Case({**DRAWN, "top_p": 0.99}, {"top_p_decay": 0.5}),
        "sampling.top_p_reset_id": Case({**decaying, **often}, {"top_p_reset_id": 5}),
        "sampling.seed": Case(DRAWN, {"seed": 6}),
        "sampling.num_return_sequences": Case(DRAWN, {"num_return_sequences": 2}),
        "sampling.repetition_penalty": Case(NEW, {"repetition_penalty": 3.0}),
        "sampling.presence_penalty": Case({**NEW, **often}, {"presence_penalty": 9.0}),
        "sampling.frequency_penalty": Case({**NEW, **often}, {"frequency_penalty": 3.0}),
        "sampling.prompt_ignore_length": Case(
            {
                **NEW,
                "embedding_bias_token_ids": [[9]],
                "embedding_bias_weights": [6.0],
                "presence_penalty": 9.0,
            },
            {"prompt_ignore_length": 0},
        ),
        "sampling.no_repeat_ngram_size": Case({**NEW, **often}, {"no_repeat_ngram_size": 1}),
        "sampling.embedding_bias": Case(NEW, {"embedding_bias": [0.0] * 319 + [50.0]}),
        "sampling.embedding_bias_token_ids": Case(
            {**NEW, **often}, {"embedding_bias_token_ids": [[6]]}
        ),
        "sampling.embedding_bias_weights": Case(
            {**NEW, **often}, {"embedding_bias_weights": [-9.0]}
        ),
        "beam_search.beam_width": Case(NEW, {"beam_width": 3}),
        "beam_search.diversity_rate": Case({**NEW, "beam_width": 3}, {"diversity_rate": 9.0}),
        "beam_search.length_penalty": Case(ending_beams, {"length_penalty": 4.0}),
        "beam_search.early_stopping": Case(
            {**ending_beams, "length_penalty": 3.0},
            {"early_stopping": pb.EARLY_STOPPING_EXHAUSTIVE},
        ),
        "guided_decoding.guide_type": Case(guided("REGEX", '["a"]|a'), guided("CHOICE", '["a"]')),
        "guided_decoding.guide": Case(guided("REGEX", "a{9}"), guided("REGEX", "b{9}")),
        "guided_decoding.max_whitespace": Case(
            {**guided("JSON"), "max_tokens": 12}, guided("JSON", max_whitespace=0)
        ),
        "prompt_tuning.embedding_table": Case(table(1), table(2), accepted),
        "prompt_tuning.vocabulary_size": Case(table(1), table(1, vocabulary_size=1), accepted),
        "prompt_tuning.extra_ids": Case(
            ONE, {"prompt_tuning": pb.PromptTuningConfig(extra_ids=[7] * len(PROMPT))}, reused
        ),
        "draft.token_ids": Case(
            {**NEW, "perf_metrics": True}, {"draft": pb.DraftConfig(token_ids=plain[:3])}, drafted
        ),
        "draft.logits": Case(
            {**DRAWN, "draft": drafts(logits=False)}, {"draft": drafts(logits=True)}
        ),
        "draft.acceptance_threshold": Case(
            {**DRAWN, "draft": drafts(acceptance_threshold=0.0)},
            {"draft": drafts(acceptance_threshold=1.0)},
        ),
        "output.log_probs": Case(NEW, {"log_probs": True}),
        "output.top_log_probs": Case({**NEW, "log_probs": True}, {"top_log_probs": 2}),
        "output.normalize_log_probs": Case(
            {**NEW, "log_probs": True}, {"normalize_log_probs": True}
        ),
        "output.prompt_log_probs": Case(NEW, {"prompt_log_probs": True}),
        "output.context_logits": Case(NEW, {"context_logits": True}),
        "output.generation_logits": Case(NEW, {"generation_logits": True}),
        "output.logits_data_type": Case(
            {**NEW, "generation_logits": True}, {"logits_data_type": pb.DATA_TYPE_FP16}
        ),
        "output.perf_metrics": Case(NEW, {"perf_metrics": True}),
        "kv_cache.reuse": Case(ONE, cache(reuse=False), reused),
        "kv_cache.salt": Case(ONE, cache(salt="pepper"), reused),
        "kv_cache.token_ranges": Case(ONE, cache(KEPT), survives, SMALL_POOL),
        "kv_cache.decode_priority": Case(
            {**NEW, **cache(KEPT)}, cache(KEPT, decode_priority=100), survives, SMALL_POOL
        ),
        "kv_cache.decode_duration_ms": Case(
            {**NEW, **cache(KEPT, decode_priority=100)},
            cache(KEPT, decode_priority=100, decode_duration_ms=1),
            survives,
            SMALL_POOL,
        ),
        "priority": Case({"max_tokens": 2}, {"priority": 9}, order, ONE_AT_A_TIME),
    }


def torch_backend(model_dir: Path, **settings: Any) -> Backend:
    return TorchBackend(
        model_dir,
        by_short_names(TorchSettings, threads=1, **{"tokens_per_block": BLOCK, **settings}),
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(autouse=True, scope="module")
def loads() -> Iterator[None]:
    with shared_loads():
        yield


@pytest.fixture(scope="module")
def plain(llama: Path) -> list[int]:
    return tiny_models.greedy(tiny_models.reference_model(llama), PROMPT, 12)


@pytest.mark.parametrize(
    "path", sorted(path for path in SUPPORTED_FIELDS | ADAPTERS if not path.startswith(CHOSEN_BY))
)
async def test_field_acts(path: str, llama: Path, plain: list[int]) -> None:
    """The fields of CHOSEN_BY act below, all in one engine."""

    def start(**settings: Any) -> Backend:
        return torch_backend(llama, **settings)

    cases = torch_cases(plain)
    assert path in cases, f"say in torch_cases what {path} changes"
    await check(path, cases[path], start)


def alone(case: Case) -> Options:
    """The field without others that change tokens, as far as it can stand without them."""
    options = {**(DRAWN if "temperature" in case.before else NEW), **case.added}
    if "guided_decoding" in options:
        # A grammar ends with an end id.
        del options["ignore_end_id"]
    try:
        config_of(options)
    except InvalidField:
        return {**case.before, **case.added}
    return options


async def test_fields_act_alike_on_a_cpu_and_where_a_gpu_chooses(
    device: Device, llama: Path, plain: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself and with all others in a batch, each field gives the tokens of a CPU. Without a GPU the choice is a
    GPU's all the same, with other kernels."""
    cases = torch_cases(plain)
    chosen = {path: cases[path] for path in SUPPORTED_FIELDS if path.startswith(CHOSEN_BY)}
    assert all(case.see is everything and not case.settings for case in chosen.values())
    asked = {
        path: [*map(config_of, (*with_and_without(path, case), alone(case)))]
        for path, case in chosen.items()
    }

    async def results(on: Lab) -> dict[str, list[list[tuple[Any, ...]]]]:
        """Of configurations that several fields have in common, once."""
        found = dict[str, list[tuple[Any, ...]]]()
        for config in itertools.chain.from_iterable(asked.values()):
            if repr(config) not in found:
                found[repr(config)] = [each.summary() for each in await on.run(PROMPT, config)]
        return {path: [found[repr(each)] for each in configs] for path, configs in asked.items()}

    async with lab(torch_backend(llama)) as on:
        expected = await results(on)
    monkeypatch.setattr(cpu, "Chooser", GpuChooser)
    async with lab(torch_backend(llama, **{"max_batch_size": 256, **device})) as on:
        found = await results(on)
        with on.gate.held():
            keys = {path: on.submit(PROMPT, configs[1]) for path, configs in asked.items()}
        together = {path: await on.ended(keys[path]) for path in asked}
    for chosen_by in (expected, found):
        assert [path for path, (before, after, _) in chosen_by.items() if before == after] == []
    if not device:
        assert [path for path in asked if found[path] != expected[path]] == []
    for path, runs in found.items():
        tokens = [[token_ids for token_ids, *_ in outcomes] for outcomes in runs]
        assert tokens == [[ids for ids, *_ in outcomes] for outcomes in expected[path]], path
    # The last bits of logits depend on the batch.
    for path, outcomes in together.items():
        tokens = [outcome.token_ids for outcome in outcomes]
        assert tokens == [token_ids for token_ids, *_ in expected[path][1]], path


async def test_observations_are_repeatable(llama: Path) -> None:
    """Else a difference would not be the field's."""
    details = {"log_probs": True, "generation_logits": True, "prompt_log_probs": True}
    for see, options in ((everything, {**DRAWN, **details}), (survives, NEW), (reused, ONE)):
        seen = []
        for _ in range(2):
            async with lab(torch_backend(llama, **SMALL_POOL)) as on:
                seen.append(await see(on, options))
        assert seen[0] == seen[1]


def test_table_lists_supported_fields_only(plain: list[int]) -> None:
    assert set(torch_cases(plain)) == SUPPORTED_FIELDS | ADAPTERS


async def test_other_fields_are_refused(llama: Path) -> None:
    await refuses(TorchBackend(llama, TorchSettings(threads=1)), SUPPORTED_FIELDS)
    with_adapters = torch_backend(llama, adapters_host_bytes=2**28)
    await refuses(with_adapters, SUPPORTED_FIELDS | ADAPTERS)
