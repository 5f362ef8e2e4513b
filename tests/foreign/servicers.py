"""The three contracts over the stand-in engine, with the behaviour that was seen of the real ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import grpc
from foreign.engine import BLOCK, Delta, StandInEngine, Stored, Wanted, block_hash
from foreign.language import END_ID, VOCABULARY
from foreign.tokenizer_archive import tokenizer_chunks
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct
from smg_grpc_proto.generated import (
    common_pb2,
    sglang_scheduler_pb2,
    sglang_scheduler_pb2_grpc,
    trtllm_service_pb2,
    trtllm_service_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)

MAX_LENGTH = 4096
INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED

Context = Any


class Servicer:
    """What the contracts have in common. `requests` keeps what arrived."""

    def __init__(
        self,
        engine: StandInEngine,
        *,
        kv_events: bool = True,
        illness: str = "",
        kv_role: str = "",
        connection: str = "",
    ) -> None:
        """`kv_role` is vLLM's of an engine that moves KV; two engines of another `connection` cannot."""
        self.engine = engine
        self.requests: list[Any] = []
        self.kv_events = kv_events
        self.illness = illness
        self.kv_role = kv_role
        self.connection = connection
        self.log_probs = True
        """Whether those asked for are sent."""

    async def check(self, wanted: Wanted, context: Context) -> None:
        """The refusals of vLLM, whose texts name parameter and value."""
        if len(wanted.prompt) >= MAX_LENGTH:
            text = f"The prompt has {len(wanted.prompt)} tokens, the model {MAX_LENGTH}"
            await context.abort(INVALID, text)
        highest = max([*wanted.prompt, *wanted.stop_ids])
        if highest >= VOCABULARY:
            await context.abort(INVALID, f"Token id {highest} is out of vocabulary")

    async def batches(self, request: Any, context: Context) -> AsyncIterator[Any]:
        if not self.kv_events:
            await context.abort(MISSING, "KV cache events not enabled")
        if request.start_sequence_number:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "no replay")
        queue: asyncio.Queue[Stored] = asyncio.Queue()
        self.engine.subscribers.add(queue)
        try:
            number = 0
            yield common_pb2.KvEventBatch(load=common_pb2.EngineLoad(load_only=True))
            while True:
                stored = await queue.get()
                yield common_pb2.KvEventBatch(sequence_number=number, events=[_event(stored)])
                number += 1
        finally:
            self.engine.subscribers.discard(queue)

    @property
    def load(self) -> dict[str, Any]:
        """The figures of GetLoads; a frozen engine keeps them."""
        return {
            "num_running_reqs": len(self.engine.running),
            "num_waiting_reqs": len(self.engine.waiting),
            "token_usage": self.engine.used_share,
            "max_total_num_tokens": self.engine.total_blocks * BLOCK,
            "num_waiting_uncached_tokens": sum(
                len(each.wanted.prompt) for each in self.engine.waiting
            ),
        }


def _event(stored: Stored) -> common_pb2.KvCacheEvent:
    block = common_pb2.KvBlock(
        block_hash=stored.block, token_ids=stored.token_ids, block_size=BLOCK
    )
    message = common_pb2.KvBlocksStored(blocks=[block])
    if stored.parent is not None:
        message.parent_block_hash = stored.parent
    return common_pb2.KvCacheEvent(stored=message)


class VllmServicer(Servicer, vllm_engine_pb2_grpc.VllmEngineServicer):
    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        self.requests.append(request)
        params = request.sampling_params
        # Unset means 1.0: sampling.
        temperature = params.temperature if params.HasField("temperature") else 1.0
        if not 0 <= temperature <= 2:
            await context.abort(INVALID, f"temperature must be in [0, 2], got {temperature}")
        sequences = [
            Wanted(
                request.request_id,
                list(request.tokenized.input_ids),
                params.max_tokens if params.HasField("max_tokens") else MAX_LENGTH,
                params.min_tokens,
                frozenset(params.stop_token_ids),
                params.ignore_eos,
                params.seed + index if temperature else None,
                frozenset(token for token, bias in params.logit_bias.items() if bias <= -100),
            )
            for index in range(params.n or 1)
        ]
        await self.check(sequences[0], context)
        transfer = json.loads(request.kv_transfer_params_json or "{}")
        if transfer.get("do_remote_prefill") and not self._fetches(transfer, sequences[0]):
            await context.abort(grpc.StatusCode.INTERNAL, "KV load failed")
        asks = params if self.log_probs and params.HasField("logprobs") else None
        for index, wanted in enumerate(sequences):
            async for delta in self.engine.generate(wanted):
                if delta.token_ids:
                    yield self._chunk(delta, index, wanted, asks)
                if delta.reason:
                    complete = self._complete(delta, index)
                    if transfer.get("do_remote_decode") and delta.reason == "length":
                        complete.complete.kv_transfer_params_json = self._state(wanted)
                    yield complete

    def _state(self, wanted: Wanted) -> str:
        """What the decode side needs; the stand-in names the KV by its tokens."""
        return json.dumps(
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self.connection,
                "remote_block_ids": [[block_hash(None, wanted.prompt)]],
                "remote_num_tokens": len(wanted.prompt),
            }
        )

    def _fetches(self, transfer: Any, wanted: Wanted) -> bool:
        """Whether the KV at the other end is that of the prompt."""
        blocks = [[block_hash(None, wanted.prompt)]]
        same = bool(transfer["remote_engine_id"] == self.connection)
        return same and bool(transfer["remote_block_ids"] == blocks)

    @staticmethod
    def _chunk(delta: Delta, index: int, wanted: Wanted, asks: Any) -> Any:
        chunk = vllm_engine_pb2.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=len(wanted.prompt),
            completion_tokens=len(delta.token_ids),
            cached_tokens=delta.cached_tokens,
            index=index,
        )
        if asks is not None:
            for token in delta.token_ids:
                chunk.output_logprobs.token_logprobs.append(log_prob(token))
                chunk.output_logprobs.token_ids.append(token)
                if asks.logprobs:
                    # The chosen id stands first and takes the place of one.
                    ids = candidates(token, asks.logprobs)
                    values = map(log_prob, ids)
                    chunk.output_logprobs.top_logprobs.add(values=values, token_ids=ids)
        return vllm_engine_pb2.GenerateResponse(chunk=chunk)

    @staticmethod
    def _complete(delta: Delta, index: int) -> Any:
        """Holds the last delta only, though its fields are named like totals."""
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=delta.token_ids,
            finish_reason=delta.reason,
            completion_tokens=len(delta.token_ids),
            cached_tokens=delta.cached_tokens,
            index=index,
        )
        if delta.matched is not None:
            complete.matched_token_id = delta.matched
        return vllm_engine_pb2.GenerateResponse(complete=complete)

    async def Abort(self, request: Any, context: Context) -> Any:
        for call_id in request.request_ids:
            self.engine.abort(call_id)
        return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        return vllm_engine_pb2.HealthCheckResponse(healthy=not self.illness, message=self.illness)

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path="/models/demo",
            served_model_name="/models/demo",
            max_context_length=MAX_LENGTH,
            vocab_size=VOCABULARY,
            eos_token_ids=[END_ID],
            model_type="llama",
            architectures=["LlamaForCausalLM"],
        )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        return vllm_engine_pb2.GetServerInfoResponse(
            server_type="vllm-grpc",
            block_size=BLOCK,
            model_dtype="torch.bfloat16",
            max_num_seqs=self.engine.max_running,
            kv_connector="NixlConnector" if self.kv_role else "",
            kv_role=self.kv_role,
        )

    async def GetLoads(self, request: Any, context: Context) -> Any:
        rank = vllm_engine_pb2.SchedulerLoad(**self.load)
        return vllm_engine_pb2.GetLoadsResponse(version="stand-in", loads=[rank])

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        async for chunk in tokenizer_chunks():
            yield chunk

    async def SubscribeKvEvents(self, request: Any, context: Context) -> AsyncIterator[Any]:
        async for batch in self.batches(request, context):
            yield batch


class SglangServicer(Servicer, sglang_scheduler_pb2_grpc.SglangSchedulerServicer):
    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        self.requests.append(request)
        params = request.sampling_params
        bias = params.logit_bias.items()
        wanted = Wanted(
            request.request_id,
            list(request.tokenized.input_ids),
            params.max_new_tokens,
            params.min_new_tokens,
            frozenset(params.stop_token_ids),
            params.ignore_eos,
            7 if params.temperature else None,
            frozenset(int(token) for token, weight in bias if weight <= -100),
        )
        await self.check(wanted, context)
        count = 0
        async for delta in self.engine.generate(wanted):
            count += len(delta.token_ids)
            if delta.token_ids:
                chunk = sglang_scheduler_pb2.GenerateStreamChunk(
                    token_ids=delta.token_ids,
                    # Cumulative, unlike vLLM's.
                    completion_tokens=count,
                    cached_tokens=delta.cached_tokens,
                )
                if self.log_probs and request.return_logprob:
                    self._add_log_probs(chunk, request.top_logprobs_num)
                yield sglang_scheduler_pb2.GenerateResponse(chunk=chunk)
            if delta.reason == "abort":
                # The stream ends with the scheduler's status.
                await context.abort(grpc.StatusCode.CANCELLED, "aborted")
            if delta.reason:
                yield sglang_scheduler_pb2.GenerateResponse(
                    complete=sglang_scheduler_pb2.GenerateComplete(
                        output_ids=delta.token_ids,
                        finish_reason=delta.reason,
                        matched_token_id=delta.matched,
                    )
                )

    @staticmethod
    def _add_log_probs(chunk: Any, most: int) -> None:
        for token in chunk.token_ids:
            chunk.output_logprobs.token_logprobs.append(log_prob(token))
            chunk.output_logprobs.token_ids.append(token)
            if most:
                ids = candidates(token, most)
                values = map(log_prob, ids)
                chunk.output_logprobs.top_logprobs.add(values=values, token_ids=ids)

    async def Abort(self, request: Any, context: Context) -> Any:
        self.engine.abort(request.request_id)
        return sglang_scheduler_pb2.AbortResponse(success=True)

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        return sglang_scheduler_pb2.HealthCheckResponse(
            healthy=not self.illness, message=self.illness
        )

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        return sglang_scheduler_pb2.GetModelInfoResponse(
            model_path="/models/demo",
            served_model_name="demo",
            max_context_length=MAX_LENGTH,
            vocab_size=VOCABULARY,
            eos_token_ids=[END_ID],
        )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        arguments = {"page_size": BLOCK, "max_running_requests": 16, "dtype": "bfloat16"}
        return sglang_scheduler_pb2.GetServerInfoResponse(
            server_args=ParseDict(arguments, Struct()),
            sglang_version="stand-in",
            max_total_num_tokens=self.engine.total_blocks * BLOCK,
        )

    async def GetLoads(self, request: Any, context: Context) -> Any:
        rank = sglang_scheduler_pb2.SchedulerLoad(**self.load)
        return sglang_scheduler_pb2.GetLoadsResponse(loads=[rank])

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        async for chunk in tokenizer_chunks():
            yield chunk

    async def SubscribeKvEvents(self, request: Any, context: Context) -> AsyncIterator[Any]:
        async for batch in self.batches(request, context):
            yield batch


class TrtllmServicer(Servicer, trtllm_service_pb2_grpc.TrtllmServiceServicer):
    """Implements neither GetTokenizer nor SubscribeKvEvents, as NVIDIA's servicer."""

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        self.requests.append(request)
        sampling = request.sampling_config
        wanted = Wanted(
            request.request_id,
            list(request.tokenized.input_token_ids),
            request.max_tokens,
            sampling.min_tokens,
            frozenset(request.stop_token_ids),
            request.ignore_eos,
            None if sampling.top_k == 1 else sampling.seed,
            frozenset(request.bad_token_ids),
        )
        await self.check(wanted, context)
        tokens: list[int] = []
        async for delta in self.engine.generate(wanted):
            tokens += delta.token_ids
            # The last tokens come with the end alone.
            if delta.token_ids and not delta.reason:
                yield trtllm_service_pb2.GenerateResponse(
                    chunk=trtllm_service_pb2.GenerateStreamChunk(
                        token_ids=delta.token_ids,
                        cached_tokens=delta.cached_tokens,
                        logprobs=self._log_probs(delta.token_ids, request),
                    )
                )
            if delta.reason:
                yield trtllm_service_pb2.GenerateResponse(
                    complete=trtllm_service_pb2.GenerateComplete(
                        output_token_ids=tokens,
                        finish_reason=delta.reason,
                        matched_token_id=delta.matched,
                        # Those of all tokens again, as the ids.
                        logprobs=self._log_probs(tokens, request),
                    )
                )

    def _log_probs(self, token_ids: Iterable[int], request: Any) -> list[Any]:
        most = request.output_config.logprobs
        if not (most and self.log_probs):
            return []
        return [
            trtllm_service_pb2.TokenLogprob(
                token_id=token,
                logprob=log_prob(token),
                top_logprobs=[
                    trtllm_service_pb2.TopLogprob(token_id=other, logprob=log_prob(other))
                    for other in candidates(token, most)
                ],
            )
            for token in token_ids
        ]

    async def Abort(self, request: Any, context: Context) -> Any:
        self.engine.abort(request.request_id)
        return trtllm_service_pb2.AbortResponse(success=True)

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        return trtllm_service_pb2.HealthCheckResponse(status=self.illness or "OK")

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        return trtllm_service_pb2.GetModelInfoResponse(
            model_id="/models/demo",
            max_seq_len=MAX_LENGTH,
            vocab_size=VOCABULARY,
            max_batch_size=16,
        )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        return trtllm_service_pb2.GetServerInfoResponse(version="stand-in", backend="pytorch")


def log_prob(token: int) -> float:
    """The log-probability of an id, the same everywhere."""
    return -(token % 97) / 8


def candidates(token: int, count: int) -> list[int]:
    """The ids whose log-probabilities are told beside a chosen one, which is among them."""
    return [token, *range(10, 9 + count)]


SERVICERS = {"vllm": VllmServicer, "sglang": SglangServicer, "trtllm": TrtllmServicer}
ADDERS: dict[str, Callable[[Any, grpc.aio.Server], None]] = {
    "vllm": vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server,
    "sglang": sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server,
    "trtllm": trtllm_service_pb2_grpc.add_TrtllmServiceServicer_to_server,
}
