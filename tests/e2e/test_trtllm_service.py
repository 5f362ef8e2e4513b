"""TrtllmService of real engine processes, called with grpcio as a gateway would."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from certificates import Authority
from e2e.corruption import PACED, corrupted
from e2e.mesh import (
    DEMO,
    DEMO_VOCABULARY,
    ENDLESS,
    SIMULATED,
    SMALL,
    WIDE_TOKENS,
    eventually,
    scrape,
)
from engine_streams import router_stream, sampling, submit
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from process_constants import constants
from processes import ServiceProcess, run_to_exit, service_process
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import trtllm_service_pb2 as tpb
from smg_grpc_proto.generated import trtllm_service_pb2_grpc as tpb_grpc
from tokenizers import Tokenizer
from trtllm_client import Output, generate, refusal, request, stub_of, take, tokens_of
from trtmesh.chassis.block_hashes import chain

pytestmark = pytest.mark.asyncio(loop_scope="module")

OFFERED = ("--trtllm-service", "true", "--metrics-port", "0")
LONG = (
    "--simulated-limits-max-sequence-tokens",
    "32768",
    "--simulated-kv-cache-total-blocks",
    "20000",
)
TORCH = (*SMALL, "--torch-threads", "1", "--torch-kv-cache-tokens", "8192")
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
PROMPT: Sequence[int] = TOKENIZER.encode("def fibonacci(n):").ids


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def torch_engine(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[ServiceProcess]:
    paced = corrupted(tmp_path_factory.mktemp("paced"), PACED.format(seconds=0.005))
    async with started(*TORCH, env=paced) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def simulated_engine() -> AsyncIterator[ServiceProcess]:
    async with started(*SIMULATED, *WIDE_TOKENS, *LONG) as engine:
        yield engine


@asynccontextmanager
async def started(
    *flags: str, env: Mapping[str, str] | None = None
) -> AsyncIterator[ServiceProcess]:
    """An engine whose service says that it is healthy."""
    async with (
        service_process("engine", *flags, *OFFERED, env=env) as engine,
        stub_of(engine.address) as stub,
    ):
        await eventually(partial(is_well, stub))
        yield engine


async def is_well(stub: Any) -> bool:
    """False while the worker loads."""
    try:
        answer = await stub.HealthCheck(tpb.HealthCheckRequest())
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == "OK")


async def idle(engine: ServiceProcess) -> None:
    """Waits until nothing lives and every block is free."""

    async def is_idle() -> bool:
        values = await scrape(engine)
        names = ("live_sequences", "running_sequences", "waiting_sequences", "used_blocks")
        return not any(values[f"trtmesh_engine_{name}"] for name in names)

    await eventually(is_idle)


async def own_tokens(engine: ServiceProcess, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy tokens over EngineService."""
    async with router_stream(engine.address) as stream:
        await stream.send(submit(1, count, prompt=prompt))
        return (await stream.end(1)).token_ids


async def test_greedy_tokens_are_those_of_routers(torch_engine: ServiceProcess) -> None:
    expected = await own_tokens(torch_engine, PROMPT, 32)
    async with stub_of(torch_engine.address) as stub:
        for streaming in (True, False):
            asked = request(prompt=PROMPT, max_tokens=32, streaming=streaming)
            output = (await generate(stub, asked))[0]
            assert list(output.complete.output_token_ids) == expected
            assert output.complete.prompt_tokens == len(PROMPT)
            assert output.chunks > 1 or not streaming
    assert output.complete.cached_tokens > 0, "the prompt came before"
    await idle(torch_engine)


async def test_a_seed_repeats_the_draws_of_every_sequence(torch_engine: ServiceProcess) -> None:
    sampled = tpb.SamplingConfig(num_return_sequences=3, temperature=1.0, top_p=1.0, seed=7)
    async with stub_of(torch_engine.address) as stub, router_stream(torch_engine.address) as own:
        runs = [
            await generate(stub, request(prompt=PROMPT, max_tokens=8, sampling_config=sampled))
            for _ in range(2)
        ]
        config = sampling(num_return_sequences=3, temperature=1.0, top_p=1.0, seed=7)
        await own.send(submit(1, 8, prompt=PROMPT, config=config))
        expected = [end.token_ids for end in (await own.ends([1, 2, 3])).values()]
    for run in runs:
        # The first three orders agree: sequence_index is the place.
        assert tokens_of(run[index] for index in range(3)) == expected
    assert len({tuple(each) for each in expected}) == 3
    await idle(torch_engine)


async def test_beams_come_best_first(torch_engine: ServiceProcess) -> None:
    sampled = tpb.SamplingConfig(beam_width=3, length_penalty=1.0)
    async with stub_of(torch_engine.address) as stub:
        beams = await generate(stub, request(prompt=PROMPT, max_tokens=8, sampling_config=sampled))
        sampled.num_return_sequences = 1
        best = await generate(stub, request(prompt=PROMPT, max_tokens=8, sampling_config=sampled))
    assert sorted(beams) == [0, 1, 2]
    assert len({tuple(each) for each in tokens_of(beams.values())}) == 3
    assert tokens_of(best.values()) == [list(beams[0].complete.output_token_ids)]
    await idle(torch_engine)


async def test_stop_ids_and_stop_texts_end_a_sequence(torch_engine: ServiceProcess) -> None:
    greedy = await own_tokens(torch_engine, PROMPT, 24)
    text = TOKENIZER.decode(greedy)
    word = text.split()[3]
    async with stub_of(torch_engine.address) as stub:
        asked = request(prompt=PROMPT, max_tokens=24, stop_token_ids=[greedy[5]])
        by_id = (await generate(stub, asked))[0].complete
        asked = request(prompt=PROMPT, max_tokens=24, stop=[word, "never there"])
        by_text = (await generate(stub, asked))[0].complete
        asked = request(prompt=PROMPT, max_tokens=24, bad=[TOKENIZER.decode([greedy[2]])])
        without = (await generate(stub, asked))[0].complete
    first = greedy.index(greedy[5])
    assert list(by_id.output_token_ids) == greedy[:first]
    assert (by_id.finish_reason, by_id.matched_token_id) == ("stop", greedy[5])
    assert (by_text.finish_reason, by_text.matched_stop_str) == ("stop", word)
    # It ends before the stop text, or with it where it begins inside a token.
    before, kept = text[: text.index(word)], TOKENIZER.decode(list(by_text.output_token_ids))
    assert text.startswith(kept)
    assert kept.startswith(before)
    assert kept == before or word in kept
    assert by_text.completion_tokens < len(greedy)
    assert greedy[2] not in without.output_token_ids
    await idle(torch_engine)


async def test_log_probabilities_and_logits(torch_engine: ServiceProcess) -> None:
    output = tpb.OutputConfig(
        logprobs=2,
        prompt_logprobs=1,
        return_context_logits=True,
        return_generation_logits=True,
        return_perf_metrics=True,
    )
    async with stub_of(torch_engine.address) as stub:
        outputs = await generate(stub, request(prompt=PROMPT, max_tokens=4, output_config=output))
    complete = outputs[0].complete
    for token, told in zip(complete.output_token_ids, complete.logprobs, strict=True):
        assert told.token_id == token
        assert told.top_logprobs[0].token_id == token, "greedy is most likely"
        assert told.top_logprobs[0].logprob == pytest.approx(told.logprob)
        assert len(told.top_logprobs) == 2
    assert [each.token_id for each in complete.prompt_logprobs] == list(PROMPT)
    assert [len(each.top_logprobs) for each in complete.prompt_logprobs] == [0] + [1] * (
        len(PROMPT) - 1
    )
    assert all(each.logprob < 0 for each in complete.prompt_logprobs[1:])
    assert len(complete.context_logits) == len(PROMPT) * DEMO_VOCABULARY * 4
    assert len(complete.generation_logits) == 4 * DEMO_VOCABULARY * 4
    metrics = complete.perf_metrics
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.last_token_time
    await idle(torch_engine)


@pytest.mark.parametrize("how", ["abort", "cancel", "disconnect"])
@pytest.mark.parametrize("kind", ["torch_engine", "simulated_engine"])
async def test_an_end_frees_the_blocks(
    kind: str, how: str, torch_engine: ServiceProcess, simulated_engine: ServiceProcess
) -> None:
    engine = torch_engine if kind == "torch_engine" else simulated_engine
    asked = request(
        how, prompt=PROMPT, max_tokens=1900 if kind == "torch_engine" else ENDLESS, ignore_eos=True
    )
    async with stub_of(engine.address) as stub:
        async with stub_of(engine.address) as other:
            call = other.Generate(asked)
            outputs: dict[int, Output] = {}
            take(outputs, await call.read())
            if how == "abort":
                assert (await stub.Abort(tpb.AbortRequest(request_id=how))).success
                while (answer := await call.read()) is not grpc.aio.EOF:
                    take(outputs, answer)
                assert outputs[0].complete.finish_reason == "cancelled"
                assert list(outputs[0].complete.output_token_ids) == outputs[0].token_ids
            elif how == "cancel":
                call.cancel()
        await idle(engine)
        assert not (await stub.Abort(tpb.AbortRequest(request_id=how))).success


async def test_a_deadline_frees_the_blocks(simulated_engine: ServiceProcess) -> None:
    async with stub_of(simulated_engine.address) as stub:
        # It may pass before the first token, and cannot come after the last.
        call = stub.Generate(request("late", max_tokens=ENDLESS, ignore_eos=True), timeout=2.0)
        error = await refusal(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await idle(simulated_engine)
        assert not (await stub.Abort(tpb.AbortRequest(request_id="late"))).success


async def test_a_hundred_calls_at_once(simulated_engine: ServiceProcess) -> None:
    prompts = [[100 + number, 7, 8, 9] for number in range(100)]
    async with stub_of(simulated_engine.address) as stub:
        alone = [await generate(stub, request(f"alone-{n}", prompts[n], 24)) for n in (0, 50, 99)]
        together = await asyncio.gather(
            *(generate(stub, request(f"c-{n}", prompt, 24)) for n, prompt in enumerate(prompts))
        )
    everything = [tokens_of(outputs.values()) for outputs in together]
    assert [everything[n] for n in (0, 50, 99)] == [tokens_of(each.values()) for each in alone]
    assert all(len(each[0]) == 24 for each in everything)
    await idle(simulated_engine)


async def test_a_slow_reader_delays_nobody_and_loses_nothing() -> None:
    count = 4000
    async with (
        started(*SIMULATED, *LONG, "--simulated-timing-step-ms", "1") as engine,
        # With a fixed window, so that the server has to wait.
        stub_of(engine.address, ("grpc.http2.bdp_probe", 0)) as slow,
        stub_of(engine.address) as stub,
    ):
        call = slow.Generate(request("slow", max_tokens=count, ignore_eos=True))
        outputs: dict[int, Output] = {}
        take(outputs, await call.read())
        for number in range(3):
            quick = await generate(stub, request(f"quick-{number}", max_tokens=16, ignore_eos=True))
            assert len(quick[0].token_ids) == 16
        # It computes to the end, and the memory of the waiting tokens is that of the call.
        await idle(engine)
        while (answer := await call.read()) is not grpc.aio.EOF:
            take(outputs, answer)
    assert len(outputs[0].token_ids) == count
    assert list(outputs[0].complete.output_token_ids) == outputs[0].token_ids
    assert outputs[0].chunks < count, "what waited came together"


async def test_a_client_that_never_reads_is_cut_off() -> None:
    flags = (*SIMULATED, *LONG, "--simulated-timing-step-ms", "1")
    async with (
        started(*flags, *constants(unread_answer_seconds=0.5)) as engine,
        stub_of(engine.address, ("grpc.http2.bdp_probe", 0)) as slow,
    ):
        call = slow.Generate(request(max_tokens=ENDLESS, ignore_eos=True))

        async def is_cut_off() -> bool:
            cut = await scrape(engine, reason="cancelled")
            return cut.get("trtmesh_engine_sequences_finished_total", 0) == 1

        await eventually(is_cut_off)
        await idle(engine)
        error = await refusal(call)
    assert error.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)


@pytest.mark.parametrize(
    ("fields", "code", "named"),
    [
        (
            {"prompt": [DEMO_VOCABULARY]},
            grpc.StatusCode.INVALID_ARGUMENT,
            "tokenized.input_token_ids",
        ),
        ({"prompt": []}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
        ({"prompt": [9] * 40_000}, grpc.StatusCode.INVALID_ARGUMENT, "tokenized.input_token_ids"),
        ({"stop_token_ids": [DEMO_VOCABULARY]}, grpc.StatusCode.INVALID_ARGUMENT, "stop_token_ids"),
        (
            {"sampling_config": tpb.SamplingConfig(num_return_sequences=250)},
            grpc.StatusCode.INVALID_ARGUMENT,
            "sampling_config.num_return_sequences",
        ),
        (
            {"multimodal_input": tpb.MultimodalInput(image_data=[b"x"])},
            grpc.StatusCode.UNIMPLEMENTED,
            "multimodal_input",
        ),
        (
            {
                "guided_decoding": tpb.GuidedDecodingParams(
                    guide_type="GUIDE_TYPE_REGEX", guide="(a"
                )
            },
            grpc.StatusCode.INVALID_ARGUMENT,
            "guided_decoding.guide",
        ),
        (
            {"lora_config": tpb.LoraConfig(task_id=5)},
            grpc.StatusCode.UNIMPLEMENTED,
            "lora_config.task_id",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_input_is_refused_by_its_name(
    torch_engine: ServiceProcess, fields: dict[str, Any], code: grpc.StatusCode, named: str
) -> None:
    async with stub_of(torch_engine.address) as stub:
        error = await refusal(stub.Generate(request(**fields)))
        assert error.code() is code, error.details()
        assert named in (error.details() or "")
        assert len((await generate(stub, request(max_tokens=2)))[0].token_ids) == 2
    await idle(torch_engine)


async def test_the_cache_of_the_model_reaches_a_subscriber(torch_engine: ServiceProcess) -> None:
    prompt = [*PROMPT, *range(1000, 1100)]
    async with stub_of(torch_engine.address) as stub:
        asked = common_pb2.SubscribeKvEventsRequest()
        events = stub.SubscribeKvEvents(asked)
        await generate(stub, request(prompt=prompt, max_tokens=2))
        known: dict[int, list[int]] = {}
        size = 0
        while not (size and set(chain(0, prompt, size)) <= known.keys()):
            batch = await events.read()
            assert batch is not grpc.aio.EOF
            for event in batch.events:
                for block in event.stored.blocks:
                    size = block.block_size
                    known[block.block_hash % 2**64] = list(block.token_ids)
        events.cancel()
    names = chain(0, prompt, size)
    assert [token for name in names for token in known[name]] == prompt[: len(names) * size]


async def test_reflection_lists_the_service(simulated_engine: ServiceProcess) -> None:
    async with grpc.aio.insecure_channel(simulated_engine.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [answer async for answer in stub.ServerReflectionInfo(iter([ask]))]
    names = [each.name for each in answers[0].list_services_response.service]
    assert "trtllm.TrtllmService" in names


async def test_a_killed_worker_ends_its_calls() -> None:
    async with started(*SIMULATED, *LONG) as engine, stub_of(engine.address) as stub:
        call = stub.Generate(request(max_tokens=ENDLESS, ignore_eos=True))
        assert (await call.read()).chunk.token_ids
        engine.signal(signal.SIGKILL)
        error = await refusal(call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_broken_backend_ends_its_calls_and_the_process() -> None:
    breaking = ("--simulated-faults-break-after-steps", "20")
    async with started(*SIMULATED, *LONG, *breaking) as engine, stub_of(engine.address) as stub:
        error = await refusal(stub.Generate(request(max_tokens=ENDLESS, ignore_eos=True)))
        assert await engine.wait() == 1
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_stopped_worker_finishes_its_calls() -> None:
    async with started(*SIMULATED, *LONG) as engine, stub_of(engine.address) as stub:
        call = stub.Generate(request(max_tokens=300, ignore_eos=True))
        outputs: dict[int, Output] = {}
        take(outputs, await call.read())
        engine.signal(signal.SIGTERM)
        while (answer := await call.read()) is not grpc.aio.EOF:
            take(outputs, answer)
        assert await engine.wait() == 0
    assert len(outputs[0].complete.output_token_ids) == 300


async def test_with_tls_a_call_needs_it(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("engine")
    flags = ("--tls-certificate", str(own.certificate), "--tls-key", str(own.key))
    credentials = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    async with service_process("engine", *SIMULATED, *OFFERED, *flags) as engine:
        async with grpc.aio.secure_channel(engine.address, credentials) as channel:
            stub = tpb_grpc.TrtllmServiceStub(channel)
            await eventually(partial(is_well, stub))
            assert len((await generate(stub, request()))[0].token_ids) == 8
        async with stub_of(engine.address) as plain:
            error = await refusal(plain.Generate(request()))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_setting_names_the_extra_that_it_needs(tmp_path: Path) -> None:
    # A package of that name without the contract, before the real one.
    (tmp_path / "smg_grpc_proto").mkdir()
    (tmp_path / "smg_grpc_proto" / "__init__.py").write_text("")
    ended = await run_to_exit("engine", *SIMULATED, *OFFERED, env={"PYTHONPATH": str(tmp_path)})
    assert ended.status == 2
    assert "engine.trtllm_service" in ended.stderr or "--trtllm-service" in ended.stderr
    assert "trtmesh[gateways]" in ended.stderr
