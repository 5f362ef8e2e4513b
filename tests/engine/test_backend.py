"""Every supported field of a real backend changes the result of an item; every other field is refused by name.

`TORCH` and `SIMULATED` hold, by field, the config without the field, the field's value, and the place of the effect. A
supported field without an entry fails the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos.tiny_adapters import tiny_adapter
from engine.adapter_contents import content
from engine.backend_lab import Lab, config_of, lab
from engine.config_fields import LEAVES, config_with
from engine.short_names import by_short_names
from engine_streams import router_stream, serving, submit
from oracle import tiny_models
from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.errors import AdapterNotFound, TrtmeshError
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import AdapterLoad, Backend
from trtmesh.engine.backends.simulated.backend import ADAPTER_FIELDS as SIMULATED_ADAPTER_FIELDS
from trtmesh.engine.backends.simulated.backend import SUPPORTED_FIELDS as SIMULATED_FIELDS
from trtmesh.engine.backends.simulated.backend import SimulatedBackend
from trtmesh.engine.backends.simulated.settings import SimulatedSettings
from trtmesh.engine.backends.torch.backend import TorchBackend
from trtmesh.engine.backends.torch.fields import ADAPTERS as TORCH_ADAPTER_FIELDS
from trtmesh.engine.backends.torch.fields import SUPPORTED_FIELDS as TORCH_FIELDS
from trtmesh.engine.backends.torch.settings import TorchSettings
from trtmesh.v1 import generation_pb2 as pb

PROMPT = [9, 40, 41, 42, 9, 43, 44, 45, 46]
BLOCK = 4

Options = dict[str, Any]
See = Callable[[Lab, Options], Awaitable[object]]


async def everything(on: Lab, options: Options) -> object:
    """All deliveries for one item."""
    return [outcome.summary() for outcome in await on.run(PROMPT, config_of(options))]


async def reused(on: Lab, options: Options) -> object:
    """Reused prompt tokens, after the same prompt ran without the field."""
    await on.run(PROMPT, config_of({"max_tokens": 1}))
    (outcome,) = await on.run(PROMPT, config_of(options))
    assert outcome.end is not None
    return outcome.end.cached_prompt_tokens


async def survives(on: Lab, options: Options) -> object:
    """Cached tokens of an item after other items needed the room."""
    (outcome,) = await on.run(PROMPT, config_of(options))
    # Durations of these tests are shorter.
    await asyncio.sleep(0.01)
    for number in range(6):
        await on.run([100 + number] * 20, config_of({"max_tokens": 1}))
    again = [*PROMPT, *outcome.token_ids]
    (outcome,) = await on.run(again, config_of({"max_tokens": 1}))
    assert outcome.end is not None
    return outcome.end.cached_prompt_tokens


async def order(on: Lab, options: Options) -> object:
    """The order in which items end, computed one at a time."""
    with on.gate.held():
        keys = on.submit(PROMPT, config_of({"max_tokens": 4, "ignore_end_id": True}))
        keys += on.submit(PROMPT, config_of({"max_tokens": 2}))
        keys += on.submit(PROMPT, config_of(options))
    await on.ended(keys)
    return on.order


async def accepted(on: Lab, options: Options) -> object:
    """The result of an id beyond the vocabulary."""
    try:
        outcomes = await on.run([*PROMPT, 321], config_of(options))
    except TrtmeshError as error:
        return error.reason
    return [outcome.token_ids for outcome in outcomes]


def adapted(contents: Sequence[AdapterContent]) -> See:
    """The result of an item, or the problem of its refusal, with three adapters in memory."""
    identities = [Adapter(7, "", "a"), Adapter(8, "", "a"), Adapter(7, "", "b")]

    async def see(on: Lab, options: Options) -> object:
        loads = zip(identities, contents, strict=True)
        await on.load([AdapterLoad(identity, content) for identity, content in loads])
        try:
            return await everything(on, options)
        except AdapterNotFound as error:
            return error.problem

    return see


@dataclass(frozen=True)
class Case:
    """The config without and with a field, the effect to observe, and the backend."""

    before: Options
    added: Options
    see: See = everything
    settings: Mapping[str, Any] = field(default_factory=dict)


ONE_AT_A_TIME = {"max_batch_size": 1}
SMALL_POOL = {"kv_cache_tokens": 12 * BLOCK}
ONE = {"max_tokens": 1}
NEW = {"max_tokens": 12, "ignore_end_id": True}
DRAWN = {**NEW, "temperature": 3.0, "seed": 5}
KEPT = pb.KvCacheConfig(token_ranges=[pb.TokenRangeRetention(priority=100)])


def cache(base: pb.KvCacheConfig | None = None, **values: Any) -> Options:
    config = pb.KvCacheConfig(**values)
    config.MergeFrom(base or pb.KvCacheConfig())
    return {"kv_cache": config}


def table(seed: int, **values: Any) -> Options:
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    tensor = pb.Tensor(data_type=pb.DATA_TYPE_FP32, shape=[4, 64], data=rows.numpy().tobytes())
    return {"prompt_tuning": pb.PromptTuningConfig(embedding_table=tensor, **values)}


def adapter(**values: Any) -> Options:
    return {"adapter": pb.LoraConfig(**values)}


def adapter_cases(new: Options, see: See, settings: Mapping[str, Any]) -> dict[str, Case]:
    """Tokens depend on number and version; the name is for people, who read it in a refusal."""
    known = {**new, **adapter(id=7, version="a")}
    unknown = {**new, **adapter(id=9, version="a")}
    return {
        "lora.id": Case(known, adapter(id=8, version="a"), see, settings),
        "lora.version": Case(known, adapter(id=7, version="b"), see, settings),
        "lora.name": Case(unknown, adapter(id=9, version="a", name="prose"), see, settings),
    }


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
        "prompt_tuning.embedding_table": Case(table(1), table(2), accepted),
        "prompt_tuning.vocabulary_size": Case(table(1), table(1, vocabulary_size=1), accepted),
        "prompt_tuning.extra_ids": Case(
            ONE, {"prompt_tuning": pb.PromptTuningConfig(extra_ids=[7] * len(PROMPT))}, reused
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


def simulated_cases() -> dict[str, Case]:
    """By field. The end id is frequent; tokens change with every field that would change a model's."""
    new = {"max_tokens": 300, "ignore_end_id": True}
    drawn = {**new, "temperature": 1.0, "seed": 5}
    some = {
        "temperature": 2.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "top_p_min": 0.5, "top_p_decay": 0.5,
        "top_p_reset_id": 4, "seed": 6, "repetition_penalty": 2.0, "presence_penalty": 1.0,
        "frequency_penalty": 1.0, "prompt_ignore_length": 2, "no_repeat_ngram_size": 2,
        "num_return_sequences": 2,
    }  # fmt: skip
    sampling = {f"sampling.{name}": Case(drawn, {name: value}) for name, value in some.items()}
    adapters = adapter_cases(new, adapted([*map(content, range(3))]), {"adapters_slots": 3})
    return (
        sampling
        | adapters
        | {
            "stopping.max_tokens": Case(new, {"max_tokens": 3}),
            "stopping.min_tokens": Case({"max_tokens": 300}, {"min_tokens": 250}),
            "stopping.end_id": Case({"max_tokens": 300}, {"end_id": 60}),
            "stopping.ignore_end_id": Case({"max_tokens": 300}, {"ignore_end_id": True}),
            "stopping.stop_token_ids": Case(new, {"stop_token_ids": [[60]]}),
            "output.perf_metrics": Case(new, {"perf_metrics": True}),
            "kv_cache.reuse": Case(ONE, cache(reuse=False), reused),
            "kv_cache.salt": Case(ONE, cache(salt="pepper"), reused),
            "priority": Case({"max_tokens": 2}, {"priority": 9}, order, ONE_AT_A_TIME),
        }
    )


async def check(path: str, case: Case, start: Callable[..., Backend]) -> None:
    after = {**case.before, **case.added}
    fields = [config_of(options).fields_set for options in (case.before, after)]
    assert path in fields[1]
    assert fields[0] ^ fields[1] <= {path}, "more than the field differs"
    seen = []
    for options in (case.before, after):
        async with lab(start(**case.settings)) as on:
            seen.append(await case.see(on, options))
    assert seen[0] != seen[1], f"{path} changes nothing"


def torch_backend(model_dir: Path, **settings: Any) -> Backend:
    return TorchBackend(
        model_dir,
        by_short_names(TorchSettings, threads=1, **{"tokens_per_block": BLOCK, **settings}),
    )


def simulated_backend(**settings: Any) -> Backend:
    given = {"step_ms": 0, "tokens_per_block": BLOCK, "end_id": 50, "end_probability": 0.05}
    return SimulatedBackend(by_short_names(SimulatedSettings, **{**given, **settings}))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def plain(llama: Path) -> list[int]:
    return tiny_models.greedy(tiny_models.reference_model(llama), PROMPT, 12)


@pytest.mark.parametrize("path", sorted(TORCH_FIELDS | TORCH_ADAPTER_FIELDS))
async def test_field_acts_on_torch_backend(path: str, llama: Path, plain: list[int]) -> None:
    def start(**settings: Any) -> Backend:
        return torch_backend(llama, **settings)

    cases = torch_cases(plain)
    assert path in cases, f"say in torch_cases what {path} changes"
    await check(path, cases[path], start)


@pytest.mark.parametrize("path", sorted(SIMULATED_FIELDS | SIMULATED_ADAPTER_FIELDS))
async def test_field_acts_on_simulated_backend(path: str) -> None:
    cases = simulated_cases()
    assert path in cases, f"say in simulated_cases what {path} changes"
    await check(path, cases[path], simulated_backend)


async def test_observations_are_repeatable(llama: Path) -> None:
    """Else a difference would not be the field's."""
    details = {"log_probs": True, "generation_logits": True, "prompt_log_probs": True}
    for see, options in ((everything, {**DRAWN, **details}), (survives, NEW), (reused, ONE)):
        seen = []
        for _ in range(2):
            async with lab(torch_backend(llama, **SMALL_POOL)) as on:
                seen.append(await see(on, options))
        assert seen[0] == seen[1]
    for see, options in ((everything, DRAWN), (reused, ONE)):
        seen = []
        for _ in range(2):
            async with lab(simulated_backend()) as on:
                seen.append(await see(on, options))
        assert seen[0] == seen[1]


async def test_tables_list_supported_fields_only(plain: list[int]) -> None:
    assert set(torch_cases(plain)) == TORCH_FIELDS | TORCH_ADAPTER_FIELDS
    assert set(simulated_cases()) == SIMULATED_FIELDS | SIMULATED_ADAPTER_FIELDS


async def refuses(backend: Backend, supported: frozenset[str]) -> None:
    """The service refuses every unsupported field by name."""
    # The service itself takes the phase of a handoff.
    unknown = [path for path in LEAVES if path not in supported | {"handoff.phase"}]
    async with serving(backend) as engine, router_stream(engine.address) as stream:
        handle = 0
        for path in unknown:
            config, _ = config_with(path)
            sequences = max(1, config.sampling.num_return_sequences, config.beam_search.beam_width)
            await stream.send(submit(handle, None, config=config))
            handles = range(handle, handle + sequences)
            for received in (await stream.ends(handles)).values():
                assert received.end is not None
                assert received.end.error.reason == "UNSUPPORTED_FIELD", path
                assert path in received.end.error.message
            handle += sequences


async def test_torch_backend_refuses_other_fields(llama: Path) -> None:
    await refuses(TorchBackend(llama, TorchSettings(threads=1)), TORCH_FIELDS)
    with_adapters = torch_backend(llama, adapters_host_bytes=2**28)
    await refuses(with_adapters, TORCH_FIELDS | TORCH_ADAPTER_FIELDS)


async def test_simulated_backend_refuses_other_fields() -> None:
    await refuses(SimulatedBackend(SimulatedSettings()), SIMULATED_FIELDS)
    with_adapters = simulated_backend(adapters_slots=1)
    await refuses(with_adapters, SIMULATED_FIELDS | SIMULATED_ADAPTER_FIELDS)
