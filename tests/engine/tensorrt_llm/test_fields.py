"""Every field of GenerationConfig arrives in the right argument of the library, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from engine.config_fields import COMPANIONS, LEAVES, SEED, put, sample
from engine.tensorrt_llm.harness import VOCABULARY, backend, executor, last_call
from engine_streams import router_stream, serving, submit
from trtmesh.engine.backends.tensorrt_llm import fields
from trtmesh.v1 import generation_pb2 as pb

Arrives = Callable[[dict[str, Any], Any], bool]
"""Whether a call, with its sampling parameters, has a field's value."""

EVERYTHING: dict[str, Any] = {
    "options": {"gather_generation_logits": True, "guided_decoding_backend": "xgrammar"},
    "limits": {"max_beam_width": 2},
}
QUEUED = {"options": {"scheduler_config": {"waiting_queue_policy": "priority"}}}
"""Only some releases order the waiting queue."""

BEAMS = {"beam_search.beam_width": 2}
DRAWN = {"sampling.temperature": 0.5}

WITH: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("beam_search.length_penalty", "beam_search.diversity_rate", "beam_search.early_stopping"),
        BEAMS,
    ),
    **dict.fromkeys(("sampling.num_return_sequences", "sampling.best_of", SEED), DRAWN),
    "sampling.embedding_bias_weights": {"sampling.embedding_bias_token_ids": pb.TokenIds(ids=[7])},
    "guided_decoding.guide": {"guided_decoding.guide_type": pb.GUIDE_TYPE_REGEX},
    "kv_cache.decode_duration_ms": {"kv_cache.decode_priority": 3},
    "output.logits_data_type": {"output.context_logits": True},
}
"""Fields without which one has no effect, or is refused."""

SAMPLES: dict[str, Any] = {
    "sampling.embedding_bias": [0.25] * VOCABULARY,
    "sampling.embedding_bias_weights": [0.5],
    "output.logits_data_type": pb.DATA_TYPE_FP16,
    "beam_search.early_stopping": pb.EARLY_STOPPING_EXHAUSTIVE,
}


def params(name: str, value: Any) -> Arrives:
    return lambda _call, seen: getattr(seen, name) == value


def argument(name: str, value: Any) -> Arrives:
    return lambda call, _seen: call.get(name) == value


def guide(name: str, value: Any) -> Arrives:
    return lambda _call, seen: getattr(seen.guided_decoding, name) == value


def retention(see: Callable[[Any], bool]) -> Arrives:
    return lambda call, _seen: see(call["kv_cache_retention_config"])


ARRIVES: dict[str, Arrives] = {
    "stopping.max_tokens": params("max_tokens", 2),
    "stopping.min_tokens": params("min_tokens", 1),
    "stopping.end_id": params("end_id", 2),
    "stopping.ignore_end_id": params("ignore_eos", True),
    "stopping.pad_id": params("pad_id", 2),
    "stopping.stop_token_ids": params("stop_token_ids", [7]),
    "stopping.bad_token_ids": params("bad_token_ids", [7]),
    "sampling.temperature": params("temperature", 0.5),
    "sampling.top_k": params("top_k", 2),
    "sampling.top_p": params("top_p", 0.5),
    "sampling.min_p": params("min_p", 0.5),
    "sampling.top_p_min": params("top_p_min", 0.5),
    "sampling.top_p_decay": params("top_p_decay", 0.5),
    "sampling.top_p_reset_id": params("top_p_reset_ids", 2),
    "sampling.seed": params("seed", 5),
    "sampling.num_return_sequences": params("n", 2),
    "sampling.best_of": params("best_of", 2),
    "sampling.repetition_penalty": params("repetition_penalty", 0.5),
    "sampling.presence_penalty": params("presence_penalty", 0.5),
    "sampling.frequency_penalty": params("frequency_penalty", 0.5),
    "sampling.prompt_ignore_length": params("prompt_ignore_length", 2),
    "sampling.no_repeat_ngram_size": params("no_repeat_ngram_size", 2),
    "sampling.embedding_bias": lambda _, seen: seen.embedding_bias.tolist() == [0.25] * VOCABULARY,
    "sampling.embedding_bias_token_ids": lambda _, seen: seen.embedding_bias[7] == 0.5,
    "sampling.embedding_bias_weights": lambda _, seen: seen.embedding_bias.sum() == 0.5,
    "beam_search.beam_width": lambda _, seen: seen.use_beam_search and seen.best_of == 2,
    "beam_search.length_penalty": params("length_penalty", 0.5),
    "beam_search.diversity_rate": params("beam_search_diversity_rate", 0.5),
    "beam_search.early_stopping": params("early_stopping", 2),
    "output.log_probs": params("logprobs", 1),
    "output.top_log_probs": params("logprobs", 2),
    "output.prompt_log_probs": params("return_context_logits", True),
    "output.context_logits": params("return_context_logits", True),
    "output.logits_data_type": params("return_context_logits", True),
    "output.generation_logits": params("return_generation_logits", True),
    "output.perf_metrics": params("return_perf_metrics", True),
    "guided_decoding.guide_type": guide("json_object", True),
    "guided_decoding.guide": guide("regex", "word"),
    "kv_cache.reuse": lambda call, _: len(call["cache_salt"]) == 32,
    "kv_cache.salt": argument("cache_salt", "word"),
    "kv_cache.token_ranges": retention(
        lambda seen: seen.token_range_retention_configs[0].priority == 1
    ),
    "kv_cache.decode_priority": retention(lambda seen: seen.decode_retention_priority == 2),
    "kv_cache.decode_duration_ms": retention(
        lambda seen: seen.decode_duration_ms == timedelta(milliseconds=2)
    ),
}
"""By field, for all releases; adapters have tests of their own."""

PRIORITY = argument("priority", 0.51)


def config_of(path: str, **more: Any) -> pb.GenerationConfig:
    """A config with a field, and what it needs."""
    config = pb.GenerationConfig()
    needed = WITH.get(path, COMPANIONS.get(path, {}))
    given = {path: SAMPLES.get(path, sample(path, LEAVES[path])), SEED: 5, **needed, **more}
    for name, value in given.items():
        put(config, name, value)
    return config


def count_of(config: pb.GenerationConfig) -> int:
    return max(1, config.sampling.num_return_sequences, config.beam_search.beam_width)


async def test_supported_fields_arrive_at_their_arguments(release: str) -> None:
    async with serving(backend(**EVERYTHING)) as engine, router_stream(engine.address) as stream:
        handle, lost = 1, dict[str, object]()
        for path in sorted(ARRIVES):
            config = config_of(path)
            # The router's end of these tests takes no beams that change.
            most = 1 if config.beam_search.beam_width > 1 else 3
            given = None if config.stopping.max_tokens else most
            await stream.send(submit(handle, given, config=config))
            handles = range(handle, handle + count_of(config))
            for received in (await stream.ends(handles)).values():
                assert received.end is not None
                assert received.end.error.message == "", path
            call = last_call()
            if not ARRIVES[path](call, call["sampling_params"]):
                lost[path] = call
            handle = handles.stop
    assert not lost


def test_the_proto_names_the_fields_that_arrive() -> None:
    assert ARRIVES.keys() | fields.PRIORITY.keys() | fields.ADAPTERS.keys() == fields.SUPPORTED


async def test_every_other_field_is_refused_by_name(release: str) -> None:
    async with serving(backend(**EVERYTHING)) as engine, router_stream(engine.address) as stream:
        # The service itself takes the phase of a handoff.
        unknown = [path for path in LEAVES if path not in ARRIVES and path != "handoff.phase"]
        assert "priority" in unknown
        assert "prompt_tuning.embedding_table" in unknown
        handle = 0
        before = len(executor().calls)
        for path in unknown:
            config = config_of(path)
            await stream.send(submit(handle, None, config=config))
            handles = range(handle, handle + count_of(config))
            for received in (await stream.ends(handles)).values():
                assert received.end is not None
                assert received.end.error.reason == "UNSUPPORTED_FIELD", path
                assert path in received.end.error.message
            handle += len(handles)
        assert len(executor().calls) == before


async def test_a_priority_arrives_where_the_release_orders_its_queue(newer: str) -> None:
    async with serving(backend(**QUEUED)) as engine, router_stream(engine.address) as stream:
        await stream.send(submit(1, 3, config=config_of("priority")))
        await stream.end(1)
        assert PRIORITY(last_call(), None)
        await stream.send(submit(2, 3, config=config_of("priority", priority=-(2**30))))
        await stream.end(2)
        assert last_call()["priority"] == 0.0


async def test_a_worker_without_settings_claims_less(release: str) -> None:
    async with serving(backend()) as engine, router_stream(engine.address) as stream:
        for handle, path in enumerate(
            (
                "beam_search.beam_width",
                "output.generation_logits",
                "guided_decoding.guide_type",
                "lora.id",
            )
        ):
            config = config_of(path)
            await stream.send(submit(10 * handle, 3, config=config))
            received = await stream.end(10 * handle)
            assert received.end is not None
            assert received.end.error.reason == "UNSUPPORTED_FIELD", path
            if count_of(config) > 1:
                await stream.end(10 * handle + 1)


async def test_stop_texts_of_beams_are_refused_by_name(release: str) -> None:
    async with serving(backend(**EVERYTHING)) as engine, router_stream(engine.address) as stream:
        command = submit(1, 3, config=config_of("beam_search.beam_width"))
        command.submit.stop_vocabulary.stop_texts.append(b"end")
        await stream.send(command)
        received = await stream.end(1)
        assert received.end is not None
        assert received.end.error.reason == "UNSUPPORTED_FIELD"
        assert "stop_vocabulary" in received.end.error.message


async def test_sampling_always_says_what_it_does_not_filter(release: str) -> None:
    """Unset together, the library decodes greedily, and with its default top_p of 0 it may."""
    async with serving(backend()) as engine, router_stream(engine.address) as stream:
        await stream.send(submit(1, 3, config=config_of("sampling.temperature")))
        await stream.end(1)
        seen = last_call()["sampling_params"]
        assert (seen.temperature, seen.top_k, seen.top_p) == (0.5, 0, 1.0)
        await stream.send(submit(2, 3, config=config_of("sampling.min_p")))
        await stream.end(2)
        seen = last_call()["sampling_params"]
        assert (seen.temperature, seen.top_k, seen.top_p, seen.min_p) == (1.0, 0, 1.0, 0.5)


async def test_penalties_of_generated_tokens_leave_the_prompt_out(release: str) -> None:
    """Where nothing else is said: the library counts the prompt too."""
    async with serving(backend()) as engine, router_stream(engine.address) as stream:
        for number, (asked, seen) in enumerate([(None, 2), (0, 0), (1, 1)], 1):
            config = config_of("sampling.presence_penalty")
            if asked is not None:
                config.sampling.prompt_ignore_length = asked
            await stream.send(submit(number, 3, config=config, emitted_tokens=1))
            await stream.end(number)
            assert last_call()["sampling_params"].prompt_ignore_length == seen
