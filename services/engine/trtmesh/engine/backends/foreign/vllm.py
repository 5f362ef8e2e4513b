"""vLLM's contract, `vllm.grpc.engine.VllmEngine`."""

from __future__ import annotations

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc
from trtmesh.chassis.errors import InvalidField
from trtmesh.engine.backend import StateKind, Submission
from trtmesh.engine.backends.foreign.connection import Connection
from trtmesh.engine.backends.foreign.contract import (
    Ask,
    Contract,
    EngineFacts,
    News,
    asked_top,
    guide_of,
    record_of,
    sampling_of,
)
from trtmesh.engine.backends.foreign.sampling import Draws, banning, int32_of
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1.generation_fields import supported_by

ROLES = {"kv_producer": epb.WORKER_ROLE_PREFILL, "kv_consumer": epb.WORKER_ROLE_DECODE}
"""Roles by vLLM's word for them."""

NIXL = "NixlConnector"
"""The connector whose prefill tells the decode side where its KV is."""

MOST_TOP_LOG_PROBS = 19
"""vLLM takes 20 by default, and the chosen id may be one of them."""


class VllmContract(Contract):
    """Implements Contract."""

    engine = "vllm"
    supported_fields = supported_by("vllm")
    asks_transfer = '{"do_remote_decode": true, "do_remote_prefill": false}'

    def __init__(self, connection: Connection) -> None:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(connection.channel)
        super().__init__(connection, stub, vllm, request_of)

    async def describe(self) -> EngineFacts:
        model, server = await self.tell("GetModelInfo"), await self.tell("GetServerInfo")
        loads = await self.tell("GetLoads")
        return EngineFacts(
            version=loads.version,
            model=model.served_model_name,
            model_path=model.model_path,
            vocabulary_size=model.vocab_size,
            max_sequence_tokens=model.max_context_length,
            max_batch_size=server.max_num_seqs,
            tokens_per_block=server.block_size,
            cache_tokens=record_of(loads).cache_tokens,
            end_ids=tuple(model.eos_token_ids),
            data_type=server.model_dtype.removeprefix("torch."),
            details=repr((model.model_type, list(model.architectures), server.kv_cache_dtype)),
            state_kind=_state_kind(server, loads.version),
            role=ROLES.get(server.kv_role),
        )

    def check(self, item: Submission) -> None:
        super().check(item)
        if item.config.output.top_log_probs > MOST_TOP_LOG_PROBS:
            raise InvalidField.of(
                "output.top_log_probs",
                item.config.output.top_log_probs,
                f"at most {MOST_TOP_LOG_PROBS} on this engine",
            )

    async def abort(self, call_id: str) -> None:
        await self.tell("Abort", request_ids=[call_id])

    def _news(self, response: vllm.GenerateResponse, ask: Ask) -> News:
        """The ids of `complete` are those of the last chunk again."""
        news = super()._news(response, ask)
        if response.HasField("complete"):
            news.transfer = response.complete.kv_transfer_params_json
        return news


def request_of(ask: Ask) -> vllm.GenerateRequest:
    output = ask.output
    params = vllm.SamplingParams(
        **sampling_of(ask),
        **guide_of(ask.guided, any_json={"json_object": True}, grammar="grammar"),
        top_k=Draws.of(ask.sampling).top_k,
        seed=int32_of(ask.seed),
        max_tokens=ask.max_tokens,
        min_tokens=ask.min_tokens,
        logit_bias=banning(ask.bias, ask.bad_ids),
    )
    if output.log_probs or output.top_log_probs:
        params.logprobs = asked_top(output.top_log_probs)
    if output.prompt_log_probs:
        params.prompt_logprobs = asked_top(output.top_log_probs)
    return vllm.GenerateRequest(
        request_id=ask.call_id,
        tokenized=vllm.TokenizedInput(input_ids=ask.token_ids),
        sampling_params=params,
        stream=True,
        kv_transfer_params_json=ask.transfer or None,
    )


def _state_kind(server: vllm.GetServerInfoResponse, version: str) -> StateKind | None:
    """Pairs need one release, connector, type and block size; vLLM itself compares these at the handshake."""
    if server.kv_connector != NIXL:
        return None
    same = (
        version,
        server.kv_cache_dtype,
        server.block_size,
        server.model_dtype,
        server.attention_backend,
        server.pairing_protocol,
    )
    return StateKind("vllm-nixl", repr(same))
