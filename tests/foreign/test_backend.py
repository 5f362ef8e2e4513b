"""The foreign backend over each contract, with an engine that behaves as the real ones were seen to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from engine.backend_lab import Lab, Outcome, config_of
from foreign.language import END_ID, VOCABULARY, greedy
from foreign.servicers import MAX_LENGTH, log_prob
from foreign.serving import StandIn, stand_in
from foreign.tokenizer_archive import DEMO
from trtmesh.chassis.block_hashes import chain
from trtmesh.chassis.errors import (
    BackendFailed,
    HandoffFailed,
    InvalidField,
    InvalidRequest,
    ModelUnusable,
    PromptTooLong,
    TokenOutOfVocabulary,
    UnsupportedField,
    WorkerLost,
)
from trtmesh.chassis.fingerprint import tokenizer_fingerprint
from trtmesh.chassis.vocabulary import GuidedDecoding
from trtmesh.engine.backend import BackendInfo, BlocksStored, StepOutput, Submission
from trtmesh.engine.backends.foreign.backend import ForeignBackend, Patience
from trtmesh.engine.backends.foreign.settings import ForeignSettings
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb

CONTRACTS = ("vllm", "sglang", "trtllm")
WITH_SEEDS = ("vllm", "trtllm")
PROMPT = [11, 12, 13, 14, 15]
SECONDS = 120.0
PATIENT: dict[str, Any] = {"abort_seconds": 60.0, "answer_seconds": 60.0}
"""An end is then the engine's own word, however slow the machine is."""


class ForeignLab(Lab):
    """Keeps failures and KV events, which other backends do not have here."""

    def __init__(self, backend: ForeignBackend, engine: StandIn) -> None:
        super().__init__(backend)
        self.stand_in = engine
        self.failures: list[BaseException] = []
        self.kv_events: list[Any] = []
        self.info: BackendInfo

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)
        self._changed.set()

    def _take(self, output: StepOutput) -> None:
        self.kv_events += output.kv_events
        super()._take(output)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():  # noqa: ASYNC110 - some conditions are the engine's
                await asyncio.sleep(0.005)

    def put(self, prompt: Sequence[int], *, emitted: int = 0, **options: Any) -> list[int]:
        """Submits an item as the service does; `emitted` tokens at the end of the prompt were generated before."""
        config = config_of({"seed": 7, **options})
        keys = range(len(self.outcomes), len(self.outcomes) + config.sequences)
        item = Submission(tuple(keys), f"item-{keys[0]}", 0, 0, list(prompt), emitted, config)
        self.backend.submit(item)
        self.outcomes.update((key, Outcome()) for key in keys)
        return list(keys)

    async def ask(self, prompt: Sequence[int] = PROMPT, **options: Any) -> Outcome:
        (outcome,) = await self.ended(self.put(prompt, **options))
        return outcome

    async def run_item(self, item: Submission) -> Outcome:
        self.backend.submit(item)
        self.outcomes[item.keys[0]] = Outcome()
        (outcome,) = await self.ended(item.keys)
        return outcome

    @property
    def requests(self) -> list[Any]:
        return self.stand_in.servicer.requests


@asynccontextmanager
async def foreign(
    contract: str, *, step_seconds: float = 0.0, patience: Any = None, **options: Any
) -> AsyncIterator[ForeignLab]:
    async with stand_in(contract, step_seconds=step_seconds, **options) as engine:
        times = Patience(**{"poll_seconds": 0.02, "answer_seconds": 60.0, **(patience or {})})
        backend = ForeignBackend(ForeignSettings(address=engine.url), 2**26, times)
        started = ForeignLab(backend, engine)
        try:
            started.info = await backend.start(started.deliver, started.fail)
            yield started
        finally:
            await backend.close()


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_tokens_are_the_engines_and_counted_here(contract: str) -> None:
    async with foreign(contract) as lab:
        outcome = await lab.ask(max_tokens=20, ignore_end_id=True)
    assert outcome.token_ids == greedy(PROMPT, 20)
    assert outcome.end
    assert outcome.end.reason == pb.FINISH_REASON_LENGTH
    assert outcome.end.generated_tokens == 20
    assert outcome.end.prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_engine_describes_itself(contract: str) -> None:
    async with foreign(contract) as lab:
        info = lab.info
    assert info.backend == contract
    assert info.model == "demo"
    assert info.vocabulary_size == VOCABULARY
    assert info.max_sequence_tokens == MAX_LENGTH
    assert info.max_batch_size == 16
    assert not info.capabilities.deterministic
    assert not info.capabilities.resumes_exactly
    if contract != "trtllm":
        assert info.tokens_per_block == 32
        assert info.total_blocks == 4096
        assert info.end_ids == (END_ID,)
        assert info.tokenizer_fingerprint == tokenizer_fingerprint(DEMO)
    else:
        assert info.tokens_per_block == 0


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_end_id_and_stop_id_are_told_apart(contract: str) -> None:
    answer = greedy(PROMPT, 300)
    end = answer.index(END_ID)
    async with foreign(contract) as lab:
        by_end = await lab.ask(max_tokens=500)
        stop = next(token for token in answer[:end] if token != END_ID)
        by_stop = await lab.ask(max_tokens=500, stop_token_ids=[[stop]])
    assert by_end.token_ids == answer[: end + 1]
    assert by_end.end
    assert (by_end.end.reason, by_end.end.stop_token_ids) == (pb.FINISH_REASON_END_ID, (END_ID,))
    assert by_stop.end
    assert by_stop.token_ids == answer[: answer.index(stop) + 1]
    assert (by_stop.end.reason, by_stop.end.stop_token_ids) == (pb.FINISH_REASON_STOP_WORD, (stop,))


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_stop_sequence_ends_here_and_aborts_there(contract: str) -> None:
    answer = greedy(PROMPT, 40)
    word = answer[5:8]
    async with foreign(contract, step_seconds=0.005) as lab:
        outcome = await lab.ask(max_tokens=2000, ignore_end_id=True, stop_token_ids=[word])
        await lab.until(lambda: not lab.stand_in.engine.running)
        assert len(lab.stand_in.engine.aborted) == 1
    assert outcome.token_ids == answer[:8]
    assert outcome.end
    assert outcome.end.stop_token_ids == tuple(word)


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_stopped_sequence_frees_the_engine_before_its_end(contract: str) -> None:
    async with foreign(contract, step_seconds=0.005, patience=PATIENT) as lab:
        keys = lab.put(PROMPT, max_tokens=3000, ignore_end_id=True)
        await lab.until(lambda: len(lab.outcomes[keys[0]].token_ids) > 3)
        lab.backend.stop(keys, pb.FINISH_REASON_STOPPED)
        (outcome,) = await lab.ended(keys)
        assert not lab.stand_in.engine.running
    assert outcome.end
    assert outcome.end.reason == pb.FINISH_REASON_STOPPED
    assert outcome.end.generated_tokens == len(outcome.token_ids)
    assert outcome.token_ids == greedy(PROMPT, len(outcome.token_ids))


async def test_stop_of_a_frozen_engine_does_not_hang() -> None:
    async with foreign("vllm", step_seconds=0.005, patience={"abort_seconds": 0.1}) as lab:
        keys = lab.put(PROMPT, max_tokens=3000, ignore_end_id=True)
        await lab.until(lambda: bool(lab.outcomes[keys[0]].token_ids))
        lab.stand_in.engine.frozen = True
        lab.backend.stop(keys, pb.FINISH_REASON_CANCELLED)
        (outcome,) = await lab.ended(keys)
    assert outcome.end
    assert outcome.end.reason == pb.FINISH_REASON_CANCELLED


@asynccontextmanager
async def unconfirmed_end(contract: str) -> AsyncIterator[tuple[ForeignLab, int]]:
    """A sequence with all of its tokens, before an engine that never says so."""
    async with foreign(contract, patience={"abort_seconds": 0.1}) as lab:
        lab.stand_in.engine.keeps_ends = True
        (key,) = lab.put(PROMPT, max_tokens=3, ignore_end_id=True)
        await lab.until(lambda: len(lab.outcomes[key].token_ids) == 3)
        assert lab.outcomes[key].end is None
        yield lab, key


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_stop_does_not_wait_for_an_end_that_never_comes(contract: str) -> None:
    async with unconfirmed_end(contract) as (lab, key):
        lab.backend.stop([key], pb.FINISH_REASON_CANCELLED)
        (outcome,) = await lab.ended([key])
    assert outcome.end
    assert outcome.end.reason == pb.FINISH_REASON_LENGTH
    assert outcome.token_ids == greedy(PROMPT, 3)


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_close_does_not_wait_for_an_end_that_never_comes(contract: str) -> None:
    async with asyncio.timeout(SECONDS), unconfirmed_end(contract) as (lab, key):
        await lab.backend.close()
    end = lab.outcomes[key].end
    assert end
    assert end.reason == pb.FINISH_REASON_LENGTH


async def test_frozen_engine_makes_no_steps() -> None:
    async with foreign("vllm", step_seconds=0.005) as lab:
        keys = lab.put(PROMPT, max_tokens=3000, ignore_end_id=True)
        await lab.until(lambda: len(lab.outcomes[keys[0]].token_ids) > 3)
        lab.stand_in.engine.frozen = True
        # Reads of the load that began before the freeze have ended after two more.
        polls = [await _poll(lab) for _ in range(3)]
        steps = lab.backend.stats().step_count
        polls += [await _poll(lab) for _ in range(3)]
        assert all(polls)
        assert lab.backend.stats().step_count == steps
        assert lab.backend.stats().running_sequences == 1


async def _poll(lab: ForeignLab) -> bool:
    """Waits for another record of the load."""
    load = lab.backend._load  # type: ignore[attr-defined]  # a backend of this kind
    before = load.record
    await lab.until(lambda: load.record is not before)
    return True


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_sequences_of_an_item_are_calls_of_their_own(contract: str) -> None:
    sampled: dict[str, Any] = {"temperature": 1.0} if contract in WITH_SEEDS else {}
    async with foreign(contract) as lab:
        keys = lab.put(PROMPT, max_tokens=8, ignore_end_id=True, num_return_sequences=3, **sampled)
        outcomes = await lab.ended(keys)
        calls = {request.request_id for request in lab.requests}
        again = await lab.ended(
            lab.put(PROMPT, max_tokens=8, ignore_end_id=True, num_return_sequences=3, **sampled)
        )
    assert len(calls) == 3
    answers = [tuple(each.token_ids) for each in outcomes]
    assert len(set(answers)) == (3 if sampled else 1)
    assert answers == [tuple(each.token_ids) for each in again]


async def test_seed_of_64_bits_is_folded_and_position_counts() -> None:
    async with foreign("vllm") as lab:
        for seed in (1, 2**40 + 1, 2**64 - 1):
            await lab.ask(max_tokens=2, temperature=0.7, seed=seed)
        await lab.ask([*PROMPT, 20], emitted=1, max_tokens=3, temperature=0.7, seed=1)
        seeds = [request.sampling_params.seed for request in lab.requests]
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_greedy_is_said_aloud(contract: str) -> None:
    """An unset temperature samples in vLLM, and 0 alone does in TensorRT-LLM."""
    async with foreign(contract) as lab:
        await lab.ask(max_tokens=2)
        (request,) = lab.requests
    if contract == "trtllm":
        assert request.sampling_config.top_k == 1
        assert request.sampling_config.temperature == 0
    else:
        assert request.sampling_params.temperature == 0
        assert request.sampling_params.top_p == 1
    if contract == "vllm":
        assert request.sampling_params.HasField("temperature")


async def test_the_prompt_is_told_to_be_left_out_of_penalties() -> None:
    """The engine counts it otherwise, and the tokens of a migrated sequence look like its prompt."""
    async with foreign("trtllm") as lab:
        cases: list[dict[str, Any]] = [
            {},
            {"prompt_ignore_length": 0},
            {"prompt_ignore_length": 1},
        ]
        for asked in cases:
            await lab.ask(max_tokens=2, presence_penalty=0.5, **asked)
        seen = [each.sampling_config.prompt_ignore_length for each in lab.requests]
    assert seen == [len(PROMPT), 0, 1]


@pytest.mark.parametrize("contract", ["vllm", "sglang"])
async def test_penalties_of_the_prompt_are_refused_where_generated_tokens_alone_count(
    contract: str,
) -> None:
    async with foreign(contract) as lab:
        await lab.ask(max_tokens=2, presence_penalty=0.5, prompt_ignore_length=len(PROMPT))
        await lab.ask(max_tokens=2, repetition_penalty=1.5, prompt_ignore_length=0)
        with pytest.raises(UnsupportedField, match="prompt_ignore_length"):
            lab.put(PROMPT, max_tokens=2, frequency_penalty=0.5, prompt_ignore_length=0)


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_fields_arrive(contract: str) -> None:
    async with foreign(contract) as lab:
        await lab.ask(
            max_tokens=9,
            min_tokens=4,
            temperature=0.5,
            top_k=5,
            top_p=0.75,
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=0.25,
            frequency_penalty=0.125,
            bad_token_ids=[[9], [10]],
        )
        (request,) = lab.requests
    params = request.sampling_config if contract == "trtllm" else request.sampling_params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 5, 0.75, 0.25)
    assert (params.repetition_penalty, params.presence_penalty) == (1.5, 0.25)
    assert params.frequency_penalty == 0.125
    match contract:
        case "vllm":
            assert (params.max_tokens, params.min_tokens) == (9, 4)
            assert dict(params.logit_bias) == {9: -100.0, 10: -100.0}
            assert request.stream
        case "sglang":
            assert (params.max_new_tokens, params.min_new_tokens) == (9, 4)
            assert dict(params.logit_bias) == {"9": -100.0, "10": -100.0}
            assert request.stream
        case _:
            assert (request.max_tokens, params.min_tokens) == (9, 4)
            assert list(request.bad_token_ids) == [9, 10]
            assert request.streaming


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize(
    ("guide_type", "field"),
    [
        ("json_schema", "json_schema"),
        ("regex", "regex"),
        ("ebnf_grammar", "grammar"),
        ("choice", "regex"),
    ],
)
async def test_guides_arrive(contract: str, guide_type: str, field: str) -> None:
    given, text = "text of the guide", "text of the guide"
    config = config_of({"max_tokens": 2, "seed": 7})
    kind = pb.GuideType.Value(f"GUIDE_TYPE_{guide_type.upper()}")
    if guide_type == "choice":
        given, text = '["yes", "no?"]', r"yes|no\?"
    guided = replace(config, guided_decoding=GuidedDecoding(kind, given))
    async with foreign(contract) as lab:
        lab.backend.submit(Submission((0,), "a", 0, 0, PROMPT, 0, guided))
        lab.outcomes[0] = Outcome()
        await lab.ended([0])
        (request,) = lab.requests
        with pytest.raises(UnsupportedField, match="grammar anew"):
            lab.backend.submit(Submission((1,), "a", 0, 0, PROMPT, 1, guided))
    if contract == "trtllm":
        assert request.guided_decoding.guide == text
        assert request.guided_decoding.guide_type == pb.GuideType.Value(
            f"GUIDE_TYPE_{'EBNF_GRAMMAR' if field == 'grammar' else field.upper()}"
        )
    else:
        name = "ebnf_grammar" if (contract, field) == ("sglang", "grammar") else field
        assert request.sampling_params.WhichOneof("constraint") == name
        assert getattr(request.sampling_params, name) == text


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_what_cannot_be_carried_is_refused_by_name(contract: str) -> None:
    async with foreign(contract) as lab:
        with pytest.raises(UnsupportedField) as refused:
            lab.put(PROMPT, bad_token_ids=[[9, 10]])
        assert refused.value.field == "stopping.bad_token_ids"
        with pytest.raises(TokenOutOfVocabulary):
            lab.put([VOCABULARY])
        with pytest.raises(InvalidField, match="vocabulary"):
            lab.put(PROMPT, stop_token_ids=[[VOCABULARY]])
        with pytest.raises(PromptTooLong):
            lab.put([7] * MAX_LENGTH)
        assert lab.requests == []
        unsupported = {"beam_search.beam_width", "kv_cache.salt", "output.context_logits"}
        assert not unsupported & lab.info.supported_fields


async def test_bias_beyond_the_engines_range_is_refused() -> None:
    async with foreign("vllm") as lab:
        with pytest.raises(InvalidField, match="embedding_bias_weights"):
            lab.put(PROMPT, embedding_bias_token_ids=[[9]], embedding_bias_weights=[101.0])
        await lab.ask(
            max_tokens=1, embedding_bias_token_ids=[[9], [9, 10]], embedding_bias_weights=[1.0, 2.0]
        )
        assert dict(lab.requests[0].sampling_params.logit_bias) == {9: 3.0, 10: 2.0}


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_log_probs_and_their_alternatives(contract: str) -> None:
    async with foreign(contract) as lab:
        outcome = await lab.ask(max_tokens=3, ignore_end_id=True, log_probs=True, top_log_probs=2)
        (request,) = lab.requests
    match contract:
        case "vllm":
            assert request.sampling_params.logprobs == 3
        case "sglang":
            assert request.top_logprobs_num == 3
        case _:
            assert request.output_config.logprobs == 3
    assert len(outcome.token_ids) == 3
    told = [value for each in outcome.details for value in each.log_probs]
    assert told == pytest.approx([log_prob(token) for token in outcome.token_ids])
    tops = [top for each in outcome.details for top in each.top_log_probs]
    assert len(tops) == 3
    for token, (ids, values) in zip(outcome.token_ids, tops, strict=True):
        expected = sorted(map(log_prob, {token, 10, 11}), reverse=True)[:2]
        assert values == pytest.approx(expected) == [log_prob(each) for each in ids]
    assert outcome.end
    assert outcome.end.cumulative_log_prob == pytest.approx(sum(told))


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("asked", [{"log_probs": True}, {"top_log_probs": 2}])
async def test_engine_that_leaves_log_probs_out_fails_the_item(
    contract: str, asked: dict[str, Any]
) -> None:
    async with foreign(contract) as lab:
        lab.stand_in.servicer.log_probs = False
        outcome = await lab.ask(max_tokens=3, ignore_end_id=True, **asked)
    assert outcome.end
    assert isinstance(outcome.end.error, BackendFailed)
    assert "0 log-probabilities" in outcome.end.error.message


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_migrated_sequence_goes_on(contract: str) -> None:
    answer = greedy(PROMPT, 30)
    async with foreign(contract) as lab:
        outcome = await lab.ask(
            [*PROMPT, *answer[:10]], emitted=10, max_tokens=30, ignore_end_id=True
        )
        complete = await lab.ask(
            [*PROMPT, *answer[:10]], emitted=10, max_tokens=10, ignore_end_id=True
        )
        assert len(lab.requests) == 1
    assert outcome.token_ids == answer[10:]
    assert outcome.end
    assert outcome.end.generated_tokens == 30
    assert complete.end
    assert complete.end.reason == pb.FINISH_REASON_LENGTH


LEASE = "0" * 32


async def test_prefill_and_decode_on_two_engines() -> None:
    answer = greedy(PROMPT, 12)
    config = config_of({"seed": 7, "max_tokens": 12, "ignore_end_id": True})
    async with (
        foreign("vllm", kv_role="kv_producer") as prefill,
        foreign("vllm", kv_role="kv_consumer") as decode,
    ):
        assert prefill.info.state_kind
        assert prefill.info.state_kind == decode.info.state_kind
        assert prefill.info.started_role == epb.WORKER_ROLE_PREFILL
        assert decode.info.started_role == epb.WORKER_ROLE_DECODE
        first = await prefill.run_item(
            Submission((0,), "a", 0, 0, PROMPT, 0, config, sender_lease_id=LEASE)
        )
        assert first.end
        assert first.end.reason == pb.FINISH_REASON_HANDOFF
        assert first.end.handoff_state
        assert first.token_ids == answer[:1]
        state, given = first.end.handoff_state.content, [*PROMPT, *first.token_ids]
        second = await decode.run_item(
            Submission((0,), "a", 0, 0, given, 1, config, handoff_state=state)
        )
        asked = prefill.requests[0].sampling_params, decode.requests[0].sampling_params
        # An abort could free the KV before it is fetched.
        assert prefill.stand_in.engine.aborted == []
    assert second.end
    assert second.end.reason == pb.FINISH_REASON_LENGTH
    assert second.token_ids == answer[1:]
    assert second.end.generated_tokens == 12
    assert [params.max_tokens for params in asked] == [1, 12]
    assert asked[0].seed == asked[1].seed


async def test_first_token_that_ends_the_item_is_no_handoff() -> None:
    config = config_of({"seed": 7, "max_tokens": 1, "ignore_end_id": True})
    async with foreign("vllm", kv_role="kv_producer") as lab:
        outcome = await lab.run_item(
            Submission((0,), "a", 0, 0, PROMPT, 0, config, sender_lease_id=LEASE)
        )
    assert outcome.end
    assert outcome.end.reason == pb.FINISH_REASON_LENGTH
    assert outcome.end.handoff_state is None


@pytest.mark.parametrize(
    ("state", "last"),
    [
        (b'{"do_remote_prefill": true, "remote_engine_id": "x", "remote_block_ids": []}', 9),
        (b"{}", 9),
    ],
    ids=["unknown blocks", "another token"],
)
async def test_unusable_state_fails_the_handoff_alone(state: bytes, last: int) -> None:
    config = config_of({"seed": 7, "max_tokens": 12, "ignore_end_id": True})
    async with foreign("vllm", kv_role="kv_consumer", step_seconds=0.005) as lab:
        outcome = await lab.run_item(
            Submission((0,), "a", 0, 0, [*PROMPT, last], 1, config, handoff_state=state)
        )
        await lab.until(lambda: not lab.stand_in.engine.running)
        with pytest.raises(HandoffFailed, match="JSON"):
            lab.backend.submit(
                Submission((1,), "a", 0, 0, [*PROMPT, last], 1, config, handoff_state=b"x")
            )
    assert outcome.end
    assert isinstance(outcome.end.error, HandoffFailed)
    assert outcome.token_ids == []


async def test_repeated_prompt_is_found_in_the_cache() -> None:
    prompt = list(range(100, 200))
    async with foreign("vllm") as lab:
        await lab.ask(prompt, max_tokens=2)
        again = await lab.ask(prompt, max_tokens=2)
        # The engine's record may be older than the end.
        await lab.until(lambda: not lab.backend.stats().pending_prompt_tokens)
        stats = lab.backend.stats()
    assert again.end
    assert again.end.cached_prompt_tokens == 96
    assert (stats.reused_prompt_tokens, stats.computed_prompt_tokens) == (96, 104)
    assert stats.pending_prompt_tokens == 0


async def test_kv_events_have_our_names() -> None:
    prompt = list(range(100, 170))
    async with foreign("vllm") as lab:
        await lab.until(lambda: bool(lab.stand_in.engine.subscribers))
        await lab.ask(prompt, max_tokens=2)
        await lab.until(lambda: len(lab.kv_events) == 2)
    stored = [event for event in lab.kv_events if isinstance(event, BlocksStored)]
    told = [block for event in stored for block in event.block_hashes]
    assert told == chain(0, prompt, 32)


async def test_engine_without_kv_events_serves() -> None:
    async with foreign("vllm", kv_events=False) as lab:
        outcome = await lab.ask(max_tokens=3, ignore_end_id=True)
    assert len(outcome.token_ids) == 3
    assert lab.kv_events == []
    assert lab.failures == []


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_dead_engine_ends_sequences_as_lost(contract: str) -> None:
    async with foreign(contract, step_seconds=0.005) as lab:
        keys = lab.put(PROMPT, max_tokens=3000, ignore_end_id=True)
        await lab.until(lambda: bool(lab.outcomes[keys[0]].token_ids))
        await lab.stand_in.server.stop(0)
        (outcome,) = await lab.ended(keys)
        assert outcome.end
        assert isinstance(outcome.end.error, WorkerLost)
        await lab.until(lambda: bool(lab.failures))
    (failure,) = lab.failures
    assert isinstance(failure, BackendFailed)
    assert lab.stand_in.url in str(failure)


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_engine_that_calls_itself_unhealthy_is_left(contract: str) -> None:
    async with foreign(contract) as lab:
        lab.stand_in.servicer.illness = "engine core died"
        await lab.until(lambda: bool(lab.failures))
    assert "engine core died" in str(lab.failures[0])


async def test_refusal_of_the_engine_reaches_the_item() -> None:
    async with foreign("vllm") as lab:
        outcome = await lab.ask(max_tokens=3, temperature=3.0)
    assert outcome.end
    error = outcome.end.error
    assert isinstance(error, InvalidRequest)
    assert "temperature must be in [0, 2]" in error.message


async def test_absent_engine_is_named() -> None:
    settings = ForeignSettings(address="vllm://127.0.0.1:1")
    backend = ForeignBackend(settings, 2**26, Patience(connect_seconds=0.1))
    try:
        with pytest.raises(ModelUnusable, match=r"vllm://127\.0\.0\.1:1:"):
            await backend.start(lambda _: None, lambda _: None)
    finally:
        await backend.close()


@pytest.mark.parametrize("contract", CONTRACTS)
async def test_close_ends_and_aborts_everything(contract: str) -> None:
    async with stand_in(contract, step_seconds=0.005) as engine:
        backend = ForeignBackend(ForeignSettings(address=engine.url), 2**26, Patience(**PATIENT))
        lab = ForeignLab(backend, engine)
        await backend.start(lab.deliver, lab.fail)
        keys = [
            key for _ in range(3) for key in lab.put(PROMPT, max_tokens=3000, ignore_end_id=True)
        ]
        await lab.until(lambda: len(engine.engine.running) == 3)
        await backend.close()
        outcomes = await lab.ended(keys)
        assert not engine.engine.running
        assert len(engine.engine.aborted) == 3
    reasons = {outcome.end.reason for outcome in outcomes if outcome.end}
    assert reasons <= {pb.FINISH_REASON_CANCELLED}
