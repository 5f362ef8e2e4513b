"""No field of TrtllmService's GenerateRequest is accepted and ignored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from engine.config_fields import LEAVES
from engine_streams import serving
from google.protobuf.descriptor import FieldDescriptor
from recording_backend import INFO, RecordingBackend
from smg_grpc_proto.generated import trtllm_service_pb2 as tpb
from trtllm_client import first_item, offering, refusal, request, stub_of
from trtmesh.chassis.errors import AdapterNotFound
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import HeldAdapter
from trtmesh.v1 import generation_pb2 as pb

EVERYTHING = replace(INFO, supported_fields=frozenset(LEAVES), vocabulary_size=6144)
ADAPTER = HeldAdapter(Adapter(7, "seven", "digest"))


@dataclass(frozen=True)
class Acts:
    """A field that the backend observes at `path` of the config as `seen`."""

    value: Any
    path: str
    seen: Any
    others: Mapping[str, Any] | None = None
    """Set with it: alone it is refused."""


@dataclass(frozen=True)
class Refused:
    """A field that every worker refuses."""

    value: Any


class Answered:
    """A field whose effect is in the answers; a test of its own looks there."""


class WithoutEffect:
    """A field that the contract itself keeps from having one."""


GUIDED = {"guided_decoding.guide_type": 1}
LOOKAHEAD = {
    f"lookahead_config.max_{name}": 2
    for name in ("window_size", "ngram_size", "verification_set_size")
}

FIELDS: dict[str, Acts | Refused | Answered | WithoutEffect] = {
    "request_id": Answered(),
    "tokenized.original_text": WithoutEffect(),
    "tokenized.input_token_ids": Answered(),
    "tokenized.query_token_ids": Refused([1]),
    "sampling_config.beam_width": Acts(2, "beam_search.beam_width", 2),
    "sampling_config.num_return_sequences": Acts(3, "sampling.num_return_sequences", 3),
    "sampling_config.top_k": Acts(4, "sampling.top_k", 4),
    "sampling_config.top_p": Acts(0.5, "sampling.top_p", 0.5),
    "sampling_config.top_p_min": Acts(0.25, "sampling.top_p_min", 0.25),
    "sampling_config.top_p_reset_ids": Acts(5, "sampling.top_p_reset_id", 5),
    "sampling_config.top_p_decay": Acts(0.75, "sampling.top_p_decay", 0.75),
    "sampling_config.seed": Acts(2**63 + 1, "sampling.seed", 2**63 + 1),
    "sampling_config.temperature": Acts(0.5, "sampling.temperature", 0.5),
    "sampling_config.min_tokens": Acts(2, "stopping.min_tokens", 2),
    "sampling_config.beam_search_diversity_rate": Acts(0.5, "beam_search.diversity_rate", 0.5),
    "sampling_config.repetition_penalty": Acts(1.5, "sampling.repetition_penalty", 1.5),
    "sampling_config.presence_penalty": Acts(0.5, "sampling.presence_penalty", 0.5),
    "sampling_config.frequency_penalty": Acts(0.5, "sampling.frequency_penalty", 0.5),
    "sampling_config.prompt_ignore_length": Acts(2, "sampling.prompt_ignore_length", 2),
    "sampling_config.length_penalty": Acts(0.5, "beam_search.length_penalty", 0.5),
    "sampling_config.early_stopping": Acts(
        2, "beam_search.early_stopping", pb.EARLY_STOPPING_EXHAUSTIVE
    ),
    "sampling_config.no_repeat_ngram_size": Acts(3, "sampling.no_repeat_ngram_size", 3),
    "sampling_config.min_p": Acts(0.5, "sampling.min_p", 0.5),
    "sampling_config.beam_width_array": Refused([2, 3]),
    "output_config.logprobs": Acts(3, "output.top_log_probs", 3),
    "output_config.prompt_logprobs": Acts(2, "output.prompt_log_probs", True),
    "output_config.return_context_logits": Acts(True, "output.context_logits", True),
    "output_config.return_generation_logits": Acts(True, "output.generation_logits", True),
    "output_config.exclude_input_from_output": Answered(),
    "output_config.return_encoder_output": Refused(True),
    "output_config.return_perf_metrics": Acts(True, "output.perf_metrics", True),
    "max_tokens": Acts(5, "stopping.max_tokens", 5),
    "streaming": Answered(),
    "guided_decoding.guide_type": Acts(3, "guided_decoding.guide_type", 3),
    "guided_decoding.guide": Acts("a+", "guided_decoding.guide", "a+", GUIDED),
    "embedding_bias": Acts([0.5, 1.5], "sampling.embedding_bias", (0.5, 1.5)),
    "lora_config.task_id": Acts(7, "lora.id", 7),
    "lora_config.weights": Refused(b"w"),
    "lora_config.config_json": Refused("{}"),
    "prompt_tuning_config.embedding_table": Refused(b"t"),
    "multimodal_input.image_data": Refused([b"i"]),
    "kv_cache_retention.policy": Refused("keep"),
    "kv_cache_retention.config_json": Refused("{}"),
    "disaggregated_params.request_type": Refused(1),
    "disaggregated_params.ctx_request_id": Refused("1"),
    "disaggregated_params.context_phase_params.first_gen_token_id": Refused(1),
    "disaggregated_params.context_phase_params.kv_cache_blocks": Refused(b"b"),
    "lookahead_config.max_window_size": Acts(2, "lookahead.window_size", 2, LOOKAHEAD),
    "lookahead_config.max_ngram_size": Acts(2, "lookahead.ngram_size", 2, LOOKAHEAD),
    "lookahead_config.max_verification_set_size": Acts(
        2, "lookahead.verification_set_size", 2, LOOKAHEAD
    ),
    "cache_salt_id": Acts(-9, "kv_cache.salt", "-9"),
    "arrival_time": Answered(),
    "stop": Answered(),
    "stop_token_ids": Acts([7, 8], "stopping.stop_token_ids", ((7,), (8,))),
    "ignore_eos": Acts(True, "stopping.ignore_end_id", True),
    "bad": Acts(["self", "def"], "stopping.bad_token_ids", None),
    "bad_token_ids": Acts([7], "stopping.bad_token_ids", ((7,),)),
    "include_stop_token_in_output": Answered(),
}
ACTING = {name: case for name, case in FIELDS.items() if isinstance(case, Acts)}
REFUSED = {name: case for name, case in FIELDS.items() if isinstance(case, Refused)}


def leaves(descriptor: Any, prefix: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    for each in descriptor.fields:
        if each.message_type is None:
            yield prefix + each.name, each
        else:
            yield from leaves(each.message_type, f"{prefix}{each.name}.")


def put(message: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    if isinstance(value, list):
        getattr(message, last)[:] = value
    else:
        setattr(message, last, value)


def asking(name: str, case: Acts | Refused) -> tpb.GenerateRequest:
    asked = request()
    others = case.others if isinstance(case, Acts) and case.others else {}
    for path, value in {**others, name: case.value}.items():
        put(asked, path, value)
    return asked


def test_every_field_is_accounted_for() -> None:
    assert set(dict(leaves(tpb.GenerateRequest.DESCRIPTOR))) == set(FIELDS)


@pytest.mark.parametrize("name", ACTING)
async def test_a_field_reaches_the_backend(name: str) -> None:
    case = ACTING[name]
    backend = RecordingBackend(EVERYTHING, [ADAPTER])
    async with offering(backend) as stub:
        call = stub.Generate(asking(name, case))
        item = await first_item(backend, call)
        call.cancel()
    seen: Any = item.config
    for part in case.path.split("."):
        seen = getattr(seen, part)
    if name == "bad":
        assert len(seen) == 4, "each as it is and after a space"
        assert all(seen)
    else:
        assert seen == case.seen


@pytest.mark.parametrize(
    "name", [name for name in ACTING if name not in ("max_tokens", "sampling_config.seed")]
)
async def test_a_field_that_the_backend_lacks_is_refused_by_its_name(name: str) -> None:
    case = ACTING[name]
    info = replace(EVERYTHING, supported_fields=EVERYTHING.supported_fields - {case.path})
    if name == "output_config.logprobs":
        info = replace(info, supported_fields=info.supported_fields - {"output.log_probs"})
    backend = RecordingBackend(info, [ADAPTER])
    async with offering(backend) as stub:
        error = await refusal(stub.Generate(asking(name, case)))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    named = "bad_token_ids" if name == "bad" else name
    assert named in (error.details() or "")
    assert backend.items == []


@pytest.mark.parametrize("name", REFUSED)
async def test_a_field_that_cannot_be_served_is_refused_by_its_name(name: str) -> None:
    backend = RecordingBackend(EVERYTHING)
    async with offering(backend) as stub:
        error = await refusal(stub.Generate(asking(name, REFUSED[name])))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    details = error.details() or ""
    assert name in details or name.rpartition(".")[0] in details
    assert backend.items == []


async def test_an_unknown_field_is_refused() -> None:
    backend = RecordingBackend(EVERYTHING)
    # Field 2047, a varint.
    newer = request().SerializeToString() + b"\xf8\x7f\x01"
    async with offering(backend) as stub:
        error = await refusal(stub.Generate(tpb.GenerateRequest.FromString(newer)))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert backend.items == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": "a" * 257}, "request_id"),
        (
            {"sampling_config": tpb.SamplingConfig(top_p_reset_ids=-1)},
            "sampling_config.top_p_reset_ids",
        ),
        ({"sampling_config": tpb.SamplingConfig(top_p=1.5)}, "sampling_config.top_p"),
        ({"sampling_config": tpb.SamplingConfig(beam_width=-2)}, "sampling_config.beam_width"),
        (
            {"sampling_config": tpb.SamplingConfig(num_return_sequences=2**32 - 1)},
            "sampling_config.num_return_sequences",
        ),
        (
            {"sampling_config": tpb.SamplingConfig(beam_width=2**31 - 1)},
            "sampling_config.beam_width",
        ),
        (
            {"sampling_config": tpb.SamplingConfig(beam_width=2, num_return_sequences=3)},
            "sampling_config.num_return_sequences",
        ),
        (
            {"sampling_config": tpb.SamplingConfig(early_stopping=3)},
            "sampling_config.early_stopping",
        ),
        ({"output_config": tpb.OutputConfig(logprobs=-1)}, "output_config.logprobs"),
        ({"output_config": tpb.OutputConfig(prompt_logprobs=257)}, "output_config.prompt_logprobs"),
        ({"lora_config": tpb.LoraConfig(task_id=-1)}, "lora_config.task_id"),
        ({"arrival_time": float("nan")}, "arrival_time"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 257}, "stop"),
        ({"stop": ["a" * 4097]}, "stop"),
        ({"stop": ["a" * 4096] * 5}, "stop"),
        ({"bad": [""]}, "bad"),
        ({"stop_token_ids": range(769)}, "stop_token_ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_wrong_value_is_refused_by_its_name(fields: dict[str, Any], named: str) -> None:
    backend = RecordingBackend(EVERYTHING)
    async with offering(backend) as stub:
        error = await refusal(stub.Generate(request(**fields)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert named in (error.details() or "")
    assert backend.items == []


async def test_data_that_does_not_fit_an_answer_is_refused() -> None:
    backend = RecordingBackend(EVERYTHING)
    output = tpb.OutputConfig(return_generation_logits=True)
    async with offering(backend, max_message_bytes=2**20) as stub:
        error = await refusal(stub.Generate(request(max_tokens=100, output_config=output)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "output_config.return_generation_logits" in (error.details() or "")


@pytest.mark.parametrize("field", ["stop", "bad"])
async def test_texts_are_refused_without_a_tokenizer(field: str) -> None:
    backend = RecordingBackend(EVERYTHING)
    asked = request()
    put(asked, field, ["word"])
    async with serving(backend, trtllm_service=True) as engine, stub_of(engine.address) as stub:
        error = await refusal(stub.Generate(asked))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert (error.details() or "").startswith(field)


async def test_texts_are_refused_with_beams() -> None:
    backend = RecordingBackend(EVERYTHING)
    sampling = tpb.SamplingConfig(beam_width=2)
    async with offering(backend) as stub:
        error = await refusal(stub.Generate(request(stop=["word"], sampling_config=sampling)))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert (error.details() or "").startswith("stop ")


async def test_negative_filters_are_off() -> None:
    backend = RecordingBackend(EVERYTHING)
    async with offering(backend) as stub:
        sampling = tpb.SamplingConfig(temperature=0.5, top_k=-1, top_p=-0.1)
        call = stub.Generate(request("off", sampling_config=sampling))
        item = await first_item(backend, call)
        call.cancel()
    asked = item.config.sampling
    assert (asked.top_k, asked.top_p, asked.greedy) == (None, None, False)


@pytest.mark.parametrize("kind", ["presence_penalty", "frequency_penalty"])
async def test_penalties_count_the_prompt_unless_told_otherwise(kind: str) -> None:
    """As in TensorRT-LLM; the native API leaves the prompt out."""
    backend = RecordingBackend(EVERYTHING)
    async with offering(backend) as stub:
        cases: list[tuple[dict[str, Any], int | None]] = [
            ({}, None),
            ({kind: 0.5}, 0),
            ({kind: 0.5, "prompt_ignore_length": 2}, 2),
        ]
        for asked, seen in cases:
            sampling = tpb.SamplingConfig(**asked)
            call = stub.Generate(request(f"of {seen}", sampling_config=sampling))
            item = await first_item(backend, call, len(backend.items) + 1)
            call.cancel()
            assert item.config.sampling.prompt_ignore_length == seen


async def test_a_sampled_item_without_a_seed_gets_one_of_its_own() -> None:
    backend = RecordingBackend(EVERYTHING)
    async with offering(backend) as stub:
        for name in "ab":
            sampling = tpb.SamplingConfig(temperature=1.0)
            call = stub.Generate(request(name, sampling_config=sampling))
            await first_item(backend, call, len(backend.items) + 1)
            call.cancel()
    first, second = (item.config.sampling.seed for item in backend.items)
    assert first is not None
    assert first != second


async def test_a_lora_of_number_0_is_none() -> None:
    backend = RecordingBackend(EVERYTHING)
    async with offering(backend) as stub:
        call = stub.Generate(request(lora_config=tpb.LoraConfig(task_id=0)))
        item = await first_item(backend, call)
        call.cancel()
    assert item.config.lora is None


@pytest.mark.parametrize(
    ("held", "code"),
    [
        ([], grpc.StatusCode.NOT_FOUND),
        ([replace(ADAPTER, error=AdapterNotFound("unreadable"))], grpc.StatusCode.NOT_FOUND),
        ([ADAPTER, HeldAdapter(Adapter(7, "", "other"))], grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["none", "broken", "two"],
)
async def test_a_lora_that_names_no_single_version_is_refused(
    held: list[HeldAdapter], code: grpc.StatusCode
) -> None:
    backend = RecordingBackend(EVERYTHING, held)
    async with offering(backend) as stub:
        error = await refusal(stub.Generate(request(lora_config=tpb.LoraConfig(task_id=7))))
    assert error.code() is code
    assert "lora_config.task_id" in (error.details() or "")


async def test_open_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtmesh.engine.gateways.trtllm.servicer.MAX_HANDLES", 2)
    backend = RecordingBackend(EVERYTHING)
    async with offering(backend) as stub:
        calls = [stub.Generate(request(name)) for name in "ab"]
        await first_item(backend, calls[-1], 2)
        error = await refusal(stub.Generate(request("c")))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        sampling = tpb.SamplingConfig(num_return_sequences=3)
        error = await refusal(stub.Generate(request("d", sampling_config=sampling)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "sampling_config.num_return_sequences is 3" in (error.details() or "")
        for call in calls:
            call.cancel()


async def test_the_version_of_a_lora_is_the_one_in_memory() -> None:
    backend = RecordingBackend(EVERYTHING, [ADAPTER])
    async with offering(backend) as stub:
        call = stub.Generate(request(lora_config=tpb.LoraConfig(task_id=7)))
        item = await first_item(backend, call)
        call.cancel()
    assert item.config.lora is not None
    assert item.config.lora.version == "digest"


async def test_what_a_client_logs_has_no_effect_and_is_not_logged(logged: Any) -> None:
    backend = RecordingBackend(EVERYTHING)
    asked = request()
    asked.tokenized.original_text = "a secret prompt"
    async with offering(backend) as stub:
        call = stub.Generate(asked)
        item = await first_item(backend, call)
        call.cancel()
    assert list(item.token_ids) == [40, 41, 42]
    assert not any("secret" in str(line) for line in logged())
