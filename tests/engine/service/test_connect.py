"""The Connect stream, from a router's side of a real socket."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import grpc
import pytest
from engine.short_names import by_short_names
from engine_streams import (
    RouterStream,
    RunningEngine,
    eventually,
    hello,
    raw_stream,
    router_stream,
    sampling,
    serving,
    stop,
    submit,
)
from recording_backend import INFO, RecordingBackend
from trtmesh.chassis.errors import BackendFailed, OutOfBlocks
from trtmesh.chassis.fingerprint import ANY_TOKENIZER
from trtmesh.chassis.grpc.large_message import MessageLimits
from trtmesh.chassis.revisions import SCHEMA_REVISION
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Capabilities,
    HeldAdapter,
    PromptDetails,
    SequenceStart,
    TokenDetails,
)
from trtmesh.engine.backends.simulated.backend import SimulatedBackend
from trtmesh.engine.backends.simulated.settings import SimulatedSettings
from trtmesh.engine.service.router_session import WHOLE_LOADS_EVERY
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import engine_pb2_grpc
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as transfer


def assert_nothing_is_left(engine: RunningEngine, backend: SimulatedBackend) -> None:
    stats = backend.stats()
    assert stats.running_sequences == stats.waiting_sequences == stats.used_blocks == 0
    assert stats.pending_prompt_tokens == 0
    assert engine.service.metrics.live_sequences == 0


def simulated(**settings: object) -> SimulatedBackend:
    return SimulatedBackend(by_short_names(SimulatedSettings, **({"step_ms": 0} | settings)))


def _kv_events_arrived(stream: RouterStream, count: int) -> bool:
    return sum(len(events.events) for events in stream.kv_events) == count


class TestOpening:
    async def test_welcome_describes_worker(self) -> None:
        capabilities = Capabilities(
            deterministic=True,
            resumes_exactly=False,
            stops_single_sequences=True,
            roles=(epb.WORKER_ROLE_MIXED, epb.WORKER_ROLE_DECODE),
            max_adapters=3,
            draft_methods=("ngram",),
        )
        async with (
            serving(
                RecordingBackend(replace(INFO, capabilities=capabilities)),
                worker="w1",
                model="m1",
                role="decode",
            ) as engine,
            router_stream(engine.address) as stream,
            grpc.aio.insecure_channel(engine.address) as channel,
        ):
            assert stream.welcome is not None
            described = stream.welcome.engine
            assert (described.worker, described.model) == ("w1", "m1")
            assert described.role == epb.WORKER_ROLE_DECODE
            assert described.schema_revision == 1
            assert (described.deterministic, described.stops_single_sequences) == (True, True)
            assert not described.resumes_exactly
            assert list(described.roles) == [epb.WORKER_ROLE_MIXED, epb.WORKER_ROLE_DECODE]
            assert (described.max_adapters, list(described.draft_methods)) == (3, ["ngram"])
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            assert await stub.GetEngine(epb.GetEngineRequest()) == described

    @pytest.mark.parametrize(
        ("first", "code", "reason"),
        [
            (submit(1), "INVALID_ARGUMENT", "INVALID_REQUEST"),
            (epb.EngineCommand(), "INVALID_ARGUMENT", "INVALID_REQUEST"),
            (hello(schema_revision=3), "FAILED_PRECONDITION", "SCHEMA_MISMATCH"),
            (hello(schema_revision=0), "FAILED_PRECONDITION", "SCHEMA_MISMATCH"),
            (hello(tokenizer_fingerprint="other"), "FAILED_PRECONDITION", "TOKENIZER_MISMATCH"),
            (hello(unacknowledged_steps=0), "INVALID_ARGUMENT", "INVALID_FIELD"),
        ],
    )
    async def test_mismatched_hello_is_refused(
        self, first: epb.EngineCommand, code: str, reason: str
    ) -> None:
        backend = RecordingBackend(replace(INFO, tokenizer_fingerprint="own"))
        async with serving(backend) as engine, raw_stream(engine.address) as stream:
            await stream.send(first)
            failure = await stream.failure()
            assert (failure.code.name, failure.reason) == (code, reason)
            assert backend.items == []
            assert engine.service.metrics.open_streams == 0

    async def test_router_of_the_next_release_is_accepted_but_not_its_new_fields(self) -> None:
        backend = RecordingBackend()
        async with serving(backend) as engine, raw_stream(engine.address) as stream:
            await stream.send(hello(schema_revision=SCHEMA_REVISION + 1))
            await stream.until(lambda: stream.welcome)
            newer = submit(1)
            newer.submit.config.sampling.MergeFromString(b"\xc2\x3e\x01x")
            await stream.send(newer, submit(2))
            end = (await stream.ends([1]))[1].end
            assert end
            assert end.error.reason == "NOT_UNDERSTOOD"
            assert "field 1000 of submit.config.sampling" in end.error.message
            assert len(backend.items) == 1

    async def test_unknown_field_of_a_router_of_this_revision_is_ignored(self) -> None:
        backend = RecordingBackend()
        async with serving(backend) as engine, raw_stream(engine.address) as stream:
            await stream.send(hello())
            await stream.until(lambda: stream.welcome)
            newer = submit(1)
            newer.submit.MergeFromString(b"\xc2\x3e\x01x")
            await stream.send(newer)
            await eventually(lambda: len(backend.items) == 1)

    @pytest.mark.parametrize(("own", "accepted"), [(ANY_TOKENIZER, True), ("", False)])
    async def test_unknown_tokenizer_is_refused(self, own: str, accepted: bool) -> None:
        backend = RecordingBackend(replace(INFO, tokenizer_fingerprint=own))
        async with serving(backend) as engine, raw_stream(engine.address) as stream:
            await stream.send(hello(tokenizer_fingerprint="other"))
            if accepted:
                await stream.until(lambda: stream.welcome)
            else:
                assert (await stream.failure()).reason == "TOKENIZER_MISMATCH"

    async def test_hello_without_tokenizer_is_accepted(self) -> None:
        backend = RecordingBackend(replace(INFO, tokenizer_fingerprint="own"))
        async with serving(backend) as engine, router_stream(engine.address):
            pass

    async def test_welcome_is_followed_by_adapters(self) -> None:
        backend = RecordingBackend(
            adapters=[HeldAdapter(Adapter(7, "french", "v1"), epb.ADAPTER_PLACE_HOST)]
        )
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            await stream.until(lambda: stream.adapter_states)
            (state,) = stream.adapter_states
            assert (state.id, state.name, state.version) == (7, "french", "v1")
            assert state.place == epb.ADAPTER_PLACE_HOST


class TestMultiplexing:
    async def test_equal_handles_of_two_streams_stay_apart(self) -> None:
        backend = simulated()
        async with (
            serving(backend) as engine,
            router_stream(engine.address, router="a") as a,
            router_stream(engine.address, router="b") as b,
            router_stream(engine.address, router="c") as alone,
        ):
            prompts = {a: [50, 51], b: [60, 61, 62]}
            for stream, prompt in prompts.items():
                await stream.send(*(submit(h, 20 + h, prompt=[*prompt, h]) for h in range(10)))
            outputs = {stream: await stream.ends(range(10)) for stream in prompts}
            for stream, prompt in prompts.items():
                for handle in range(10):
                    await alone.send(submit(handle, 20 + handle, prompt=[*prompt, handle]))
                expected = await alone.ends(range(10))
                for handle in range(10):
                    assert len(expected[handle].token_ids) == 20 + handle
                    assert outputs[stream][handle].token_ids == expected[handle].token_ids
            assert_nothing_is_left(engine, backend)

    async def test_step_is_one_message_per_stream(self) -> None:
        backend = RecordingBackend()
        async with (
            serving(backend) as engine,
            router_stream(engine.address) as a,
            router_stream(engine.address) as b,
        ):
            await a.send(submit(1), submit(2))
            await b.send(submit(1))
            await eventually(lambda: len(backend.items) == 3)
            keys = {id(i): i.keys[0] for i in backend.items}
            assert len(set(keys.values())) == 3
            tokens = {key: [n, n + 1] for n, key in enumerate(keys.values())}
            backend.step(tokens)
            await a.until(lambda: a.steps)
            await b.until(lambda: b.steps)
            assert list(a.steps[0].token_counts) == [2, 2]
            assert list(b.steps[0].token_counts) == [2]

    async def test_sequences_of_item_have_consecutive_handles(self) -> None:
        backend = simulated()
        config = pb.GenerationConfig()
        config.sampling.num_return_sequences = 3
        config.sampling.temperature = 1
        config.sampling.seed = 9
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            await stream.send(submit(5, config=config))
            outputs = await stream.ends([5, 6, 7])
            assert len({tuple(output.token_ids) for output in outputs.values()}) == 3

    async def test_details_and_prompts_keep_their_handles(self) -> None:
        backend = RecordingBackend()
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            await stream.send(submit(3))
            await eventually(lambda: backend.items)
            (key,) = backend.items[0].keys
            backend.step(
                {key: [8]},
                details=[TokenDetails(key, [-0.5], -0.5, [([8, 9], [-0.5, -1.5])])],
                prompts=[PromptDetails(key, 0, [-1.0, -2.0])],
                starts=[SequenceStart(key, pb.PerfMetrics(first_token_time_ns=3))],
            )
            await stream.until(lambda: stream.steps)
            (details,) = stream.steps[0].details
            assert details.handle == 3
            assert list(details.details.top_log_probs[0].token_ids) == [8, 9]
            assert list(stream.steps[0].prompts[0].details.log_probs) == [-1.0, -2.0]
            (start,) = stream.steps[0].starts
            assert (start.handle, start.perf_metrics.first_token_time_ns) == (3, 3)


class TestRefusedItems:
    async def test_failing_item_fails_alone(self) -> None:
        backend = simulated()
        config = pb.GenerationConfig()
        config.sampling.temperature = -1
        async with serving(backend, worker="w") as engine, router_stream(engine.address) as stream:
            await stream.send(submit(1), submit(2, config=config), submit(3, prompt=[10**9]))
            outputs = await stream.ends([1, 2, 3])
            assert len(outputs[1].token_ids) == 8
            for handle, reason, word in (
                (2, "INVALID_FIELD", "sampling.temperature"),
                (3, "TOKEN_OUT_OF_VOCABULARY", "1000000000"),
            ):
                end = outputs[handle].end
                assert end is not None
                assert end.reason == pb.FINISH_REASON_ERROR
                assert end.error.reason == reason
                assert word in end.error.message
                assert end.error.worker == "w"
            assert engine.service.metrics.errors == {
                "INVALID_FIELD": 1,
                "TOKEN_OUT_OF_VOCABULARY": 1,
            }

    @pytest.mark.parametrize(
        ("refusal", "reason"),
        [(OutOfBlocks("no"), "OUT_OF_BLOCKS"), (ZeroDivisionError(), "BACKEND_FAILED")],
    )
    async def test_refused_item_ends_every_sequence(self, refusal: Exception, reason: str) -> None:
        fields = frozenset({"sampling.num_return_sequences", "stopping.max_tokens"})
        backend = RecordingBackend(replace(INFO, supported_fields=fields))
        backend.refusal = refusal
        config = pb.GenerationConfig()
        config.sampling.num_return_sequences = 3
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            await stream.send(submit(4, config=config))
            for received in (await stream.ends([4, 5, 6])).values():
                assert received.end is not None
                assert received.end.error.reason == reason
            assert engine.service.metrics.live_sequences == 0

    @pytest.mark.parametrize(
        ("command", "words"),
        [
            (submit(1, config=sampling(temperature=1)), "sampling.seed"),
            (
                submit(1, config=sampling(num_return_sequences=17)),
                "sampling.num_return_sequences is 17 but must be at most 16",
            ),
            (submit(1, emitted_tokens=4), "emitted_tokens is 4 but must be at most 3"),
            (
                submit(
                    1,
                    emitted_tokens=1,
                    config=sampling(num_return_sequences=2),
                ),
                "one by one",
            ),
        ],
    )
    async def test_invalid_submission_is_refused(
        self, command: epb.EngineCommand, words: str
    ) -> None:
        async with serving(simulated()) as engine, router_stream(engine.address) as stream:
            await stream.send(command)
            end = (await stream.end(1)).end
            assert end is not None
            assert words in end.error.message

    async def test_command_beyond_a_strangers_limits_ends_only_its_item(self) -> None:
        """The router writes lists that its client sent as tensors, texts or nothing at all."""
        prompt = [1] * (MessageLimits().numbers + 1)
        async with serving(simulated()) as engine, router_stream(engine.address) as stream:
            await stream.send(submit(1, prompt=prompt), submit(2))
            ended = await stream.ends([1, 2])
            assert (large := ended[1].end)
            assert (small := ended[2].end)
            assert large.error.reason == "PROMPT_TOO_LONG"
            assert small.reason == pb.FINISH_REASON_LENGTH

    async def test_beams_start_from_prompt_within_limit(self) -> None:
        fields = frozenset(
            {"beam_search.beam_width", "sampling.num_return_sequences", "stopping.max_tokens"}
        )
        info = replace(INFO, supported_fields=fields, max_sequences_per_item=16)
        backend = RecordingBackend(info)
        config = pb.GenerationConfig()
        config.beam_search.beam_width = 17
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            await stream.send(submit(1, config=config))
            config.beam_search.beam_width = 3
            await stream.send(submit(20, config=config, emitted_tokens=1))
            received = await stream.ends([*range(1, 18), 20, 21, 22])
            for handle, words in ((17, "beam_width is 17"), (22, "emitted_tokens is 1 for a beam")):
                end = received[handle].end
                assert end
                assert words in end.error.message
            await stream.send(submit(30, config=config))
            config.sampling.num_return_sequences = 1
            await stream.send(submit(40, config=config))
            await stream.until(lambda: len(backend.items) == 2)
            assert [len(item.keys) for item in backend.items] == [3, 1]

    async def test_handles_of_stream_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("trtmesh.engine.service.router_session.MAX_HANDLES", 2)
        backend = RecordingBackend()
        async with (
            serving(backend) as engine,
            router_stream(engine.address) as stream,
        ):
            await stream.send(submit(1), submit(2), submit(3))
            end = (await stream.end(3)).end
            assert end is not None
            error = end.error
            assert (error.reason, error.value, error.limit) == ("QUEUE_FULL", "3", "at most 2")
            config = pb.GenerationConfig(sampling=pb.SamplingConfig(num_return_sequences=3))
            await stream.send(submit(4, config=config))
            end = (await stream.end(6)).end
            assert end is not None
            assert (end.error.reason, end.error.value) == ("INVALID_FIELD", "3")
            assert len(backend.items) == 2

    async def test_unread_refusals_end_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("trtmesh.engine.service.router_session.MAX_HANDLES", 2)
        async with (
            serving(RecordingBackend()) as engine,
            router_stream(engine.address, credit=1, acknowledging=False) as stream,
        ):
            # Without acknowledgement only the first end goes out.
            await stream.send(submit(0, emitted_tokens=9))
            await stream.until(lambda: stream.steps)
            await stream.send(*(submit(handle, emitted_tokens=9) for handle in range(1, 6)))
            assert (await stream.failure()).reason == "SLOW_CLIENT"


class TestBrokenAgreement:
    """A disagreement about numbers between router and worker ends the stream."""

    async def test_handle_in_use_ends_stream(self) -> None:
        backend = simulated(step_ms=60_000)
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            await stream.send(submit(1), submit(1))
            failure = await stream.failure()
            assert failure.code is grpc.StatusCode.ALREADY_EXISTS
            assert "handle 1" in failure.details
            await eventually(lambda: engine.service.metrics.live_sequences == 0)
            assert_nothing_is_left(engine, backend)

    async def test_handle_with_unsent_end_ends_stream(self) -> None:
        backend = RecordingBackend()
        async with (
            serving(backend) as engine,
            router_stream(engine.address, credit=1, acknowledging=False) as stream,
        ):
            await stream.send(submit(1, 3))
            await eventually(lambda: backend.items)
            (key,) = backend.items[0].keys
            backend.step({key: [5]})
            await stream.until(lambda: stream.steps)
            backend.end(key)
            await eventually(lambda: engine.service.metrics.live_sequences == 0)
            assert not stream.received[1].end
            await stream.send(submit(1, 3))
            assert (await stream.failure()).reason == "ALREADY_EXISTS"

    @pytest.mark.parametrize(
        ("command", "words"),
        [
            (hello(), "hello"),
            (
                epb.EngineCommand(acknowledge=epb.AcknowledgeCommand(received_steps=1)),
                "acknowledge.received_steps",
            ),
            (stop(1, reason=pb.FINISH_REASON_LENGTH), "stop.reason"),
            (
                submit(2**32 - 1, config=sampling(num_return_sequences=2)),
                "submit.handle",
            ),
            (epb.EngineCommand(), "does not know"),
        ],
    )
    async def test_protocol_violation_ends_stream(
        self, command: epb.EngineCommand, words: str
    ) -> None:
        async with serving(simulated()) as engine, router_stream(engine.address) as stream:
            await stream.send(command)
            assert words in (await stream.failure()).details


class TestStopping:
    async def test_stop_ends_sequence_with_given_reason(self) -> None:
        backend = simulated(step_ms=60_000)
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            await stream.send(submit(1, 100), submit(2, 100), submit(3, 100))
            await stream.send(stop(1, 99), stop(2, reason=pb.FINISH_REASON_STOP_WORD))
            outputs = await stream.ends([1, 2])
            assert outputs[1].end
            assert outputs[1].end.reason == pb.FINISH_REASON_STOPPED
            assert outputs[2].end
            assert outputs[2].end.reason == pb.FINISH_REASON_STOP_WORD
            assert 3 not in stream.received
            await stream.send(stop(3))
            await stream.end(3)
            assert_nothing_is_left(engine, backend)

    @pytest.mark.parametrize("way", ["cancel", "half_close", "disconnect"])
    async def test_lost_stream_frees_blocks(self, way: str) -> None:
        # A step never ends here, so no step frees the blocks.
        backend = simulated(step_ms=3_600_000)
        async with serving(backend) as engine:
            async with router_stream(engine.address) as stream:
                await stream.send(*(submit(handle, 100) for handle in range(20)))
                await stream.until(lambda: stream.loads and stream.loads[-1].used_blocks)
                busy = stream.loads[-1].busy_seconds
                await stream.until(lambda: stream.loads[-1].busy_seconds > busy)
                if way == "cancel":
                    stream.call.cancel()
                elif way == "half_close":
                    stream.call.half_close()
                    while await stream.receive():
                        pass
            await eventually(lambda: engine.service.metrics.open_streams == 0)
            await eventually(lambda: engine.service.metrics.live_sequences == 0)
            assert_nothing_is_left(engine, backend)
            assert list(engine.service._streams) == []

    async def test_lost_stream_leaves_other_streams_running(self) -> None:
        backend = simulated(step_ms=1)
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            async with router_stream(engine.address) as leaving:
                await stream.send(submit(1, 400))
                await leaving.send(submit(1, 10_000))
                await leaving.until(lambda: leaving.steps)
            assert len((await stream.end(1)).token_ids) == 400
            await eventually(lambda: engine.service.metrics.open_streams == 1)
            await eventually(lambda: engine.service.metrics.live_sequences == 0)
            assert_nothing_is_left(engine, backend)

    async def test_deadline_cancels_a_waiting_sequence(self) -> None:
        backend = simulated(step_ms=1, max_batch_size=1)
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            await stream.send(submit(1, 20_000), submit(2, 5), submit(3, 5, timeout_ms=10))
            waiting = await stream.end(3)
            assert waiting.end
            assert waiting.end.reason == pb.FINISH_REASON_CANCELLED
            assert not waiting.token_ids
            await stream.send(stop(1))
            other = (await stream.ends([1, 2]))[2]
            assert other.end
            assert other.end.reason == pb.FINISH_REASON_LENGTH
            assert_nothing_is_left(engine, backend)

    async def test_deadline_cancels_a_running_sequence(self) -> None:
        backend = simulated(step_ms=1)
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            await stream.send(submit(1, 20_000, timeout_ms=30), submit(2, 5, timeout_ms=60_000))
            outputs = await stream.ends([1, 2])
            running, other = outputs[1].end, outputs[2].end
            assert running
            assert running.reason == pb.FINISH_REASON_CANCELLED
            assert other
            assert other.reason == pb.FINISH_REASON_LENGTH
            assert_nothing_is_left(engine, backend)


class TestEndsAndErrors:
    async def test_item_error_names_worker(self) -> None:
        backend = RecordingBackend()
        async with serving(backend, worker="w") as engine, router_stream(engine.address) as stream:
            await stream.send(submit(1))
            await eventually(lambda: backend.items)
            backend.end(
                *backend.items[0].keys, reason=pb.FINISH_REASON_ERROR, error=BackendFailed("broken")
            )
            end = (await stream.end(1)).end
            assert end is not None
            assert (end.error.message, end.error.worker) == ("broken", "w")

    async def test_broken_backend_ends_sequences_with_worker_lost(self) -> None:
        backend = simulated(break_after_steps=3)
        async with serving(backend) as engine, router_stream(engine.address, credit=1) as stream:
            stream.acknowledging = False
            await stream.send(submit(1, 100), submit(2, 100))
            # The chassis owns the life of the process; here the service is only asked to end.
            await engine.runtime.failure
            await stream.acknowledge(0)
            await engine.stop()
            outputs = await stream.ends([1, 2])
            for output in outputs.values():
                assert output.end is not None
                assert output.end.error.reason == "WORKER_LOST"
            assert (await stream.failure()).reason == "DRAINING"
            assert engine.service.metrics.live_sequences == 0


class TestUnservedCommands:
    async def test_unsupported_command_is_answered(self) -> None:
        async with (
            serving(RecordingBackend()) as engine,
            router_stream(engine.address) as stream,
        ):
            await stream.send(
                epb.EngineCommand(
                    load_adapter=epb.LoadAdapterCommand(adapter=pb.LoraConfig(id=3, name="x"))
                ),
                epb.EngineCommand(unload_adapter=epb.UnloadAdapterCommand(id=4)),
                epb.EngineCommand(
                    reserve_blocks=transfer.ReserveBlocksCommand(lease_id="a", tokens=5)
                ),
                epb.EngineCommand(attach_sender=transfer.AttachSenderCommand(lease_id="b")),
                epb.EngineCommand(hand_over=transfer.HandOverCommand(lease_id="c")),
                epb.EngineCommand(renew_leases=transfer.RenewLeasesCommand(lease_ids=["d"])),
                # Nothing is left to release.
                epb.EngineCommand(release_lease=transfer.ReleaseLeaseCommand(lease_id="e")),
            )
            await stream.until(lambda: len(stream.handoffs_failed) == 3)
            assert [state.id for state in stream.adapter_states] == [3, 4]
            errors = [state.error for state in stream.adapter_states]
            errors += [answer.error for answer in stream.blocks_reserved]
            errors += [stream.handoffs_failed[lease] for lease in "bcd"]
            names = ["load_adapter", "unload_adapter", "reserve_blocks"]
            names += ["attach_sender", "hand_over", "renew_leases"]
            for error, name in zip(errors, names, strict=True):
                assert error.reason == "UNSUPPORTED_CALL"
                assert name in error.message


class TestLoadAndKvEvents:
    async def test_load_needs_no_acknowledgement_and_no_change(self) -> None:
        backend = simulated()
        async with (
            serving(backend) as engine,
            router_stream(engine.address, credit=1, acknowledging=False) as stream,
        ):
            await stream.send(submit(1, 50))
            await stream.until(lambda: [load.step_count for load in stream.loads[-2:]] == [50, 50])
            assert len(stream.steps) == 1
            for load in stream.loads[-2:]:
                # Other parts of this process come and go.
                load.ClearField("host_memory_bytes")
            assert stream.loads[-1] == stream.loads[-2]
            assert stream.loads[-1].generated_tokens == 50
            assert stream.loads[-1].busy_seconds > 0

    async def test_unchanged_load_is_a_message_without_events(self) -> None:
        backend = simulated()
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            sizes: list[int] = []
            while len(sizes) < 3 * WHOLE_LOADS_EVERY:
                before = len(stream.loads)
                assert await stream.receive()
                sizes.append(len(stream.loads) - before)
            # The first one may come with the welcome.
            assert sum(sizes) in (3, 4)
            # Refused, so nothing else changes.
            await stream.send(submit(1, prompt=()))
            await stream.until(lambda: stream.loads[-1].received_items == 1)

    async def test_kv_events_are_numbered_for_every_stream(self) -> None:
        backend = RecordingBackend()
        async with (
            serving(backend) as engine,
            router_stream(engine.address) as a,
            router_stream(engine.address) as b,
        ):
            backend.step(
                {}, kv_events=[BlocksStored(0, [11, 12], [1, 2, 3, 4], Adapter(5, version="v2"))]
            )
            backend.step({}, kv_events=[BlocksRemoved([12]), BlocksCleared()])
            for stream in (a, b):
                await stream.until(partial(_kv_events_arrived, stream, 3))
                assert len({events.epoch for events in stream.kv_events}) == 1
                numbers = [
                    events.first_sequence + index
                    for events in stream.kv_events
                    for index in range(len(events.events))
                ]
                assert numbers == [0, 1, 2]
                first = stream.kv_events[0].events[0].stored
                assert list(first.block_hashes) == [11, 12]
                assert (first.adapter_id, first.adapter_version) == (5, "v2")

    async def test_kv_snapshot_holds_stored_blocks(self) -> None:
        backend = simulated(tokens_per_block=4, total_blocks=32)
        async with serving(backend) as engine, router_stream(engine.address) as stream:
            for number in range(12):
                await stream.send(submit(number, 4, prompt=[number % 3] * 9 + [number]))
                await stream.end(number)
            followed: set[int] = set()
            for events in stream.kv_events:
                for event in events.events:
                    followed |= set(event.stored.block_hashes)
                    followed -= set(event.removed.block_hashes)
            await stream.send(epb.EngineCommand(kv_snapshot=epb.KvSnapshotCommand()))
            await stream.until(lambda: stream.kv_events[-1].snapshot)
            snapshot = stream.kv_events[-1]
            known = {0}
            for event in snapshot.events:
                assert event.stored.parent_hash in known
                known |= set(event.stored.block_hashes)
            assert known - {0} == followed
            assert snapshot.first_sequence == sum(
                len(events.events) for events in stream.kv_events[:-1]
            )
