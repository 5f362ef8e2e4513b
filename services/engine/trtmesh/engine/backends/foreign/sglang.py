"""SGLang's contract, `sglang.grpc.scheduler.SglangScheduler`.

It has no seed: an item with a seed of the client's finds no place here, and the draws of others are the engine's own.
"""

from __future__ import annotations

from google.protobuf.json_format import MessageToDict
from smg_grpc_proto.generated import sglang_scheduler_pb2 as sglang
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc
from trtmesh.engine.backends.foreign.connection import Connection
from trtmesh.engine.backends.foreign.contract import (
    Ask,
    Contract,
    EngineFacts,
    asked_top,
    guide_of,
    sampling_of,
)
from trtmesh.engine.backends.foreign.sampling import Draws, banning
from trtmesh.v1.generation_fields import supported_by

WHOLE_PROMPT, NO_PROMPT = 0, -1
"""Values of logprob_start_len."""

ANY_OBJECT = '{"type": "object"}'


class SglangContract(Contract):
    """Implements Contract."""

    engine = "sglang"
    supported_fields = supported_by("sglang")

    def __init__(self, connection: Connection) -> None:
        stub = sglang_scheduler_pb2_grpc.SglangSchedulerStub(connection.channel)
        super().__init__(connection, stub, sglang, request_of)

    async def describe(self) -> EngineFacts:
        model, server = await self.tell("GetModelInfo"), await self.tell("GetServerInfo")
        arguments = MessageToDict(server.server_args)
        return EngineFacts(
            version=server.sglang_version,
            model=model.served_model_name,
            model_path=model.model_path,
            vocabulary_size=model.vocab_size,
            max_sequence_tokens=model.max_context_length,
            max_batch_size=_number(arguments.get("max_running_requests")),
            tokens_per_block=_number(arguments.get("page_size")),
            cache_tokens=server.max_total_num_tokens,
            end_ids=tuple(model.eos_token_ids),
            data_type=str(arguments.get("dtype") or ""),
            details=repr((model.model_type, list(model.architectures), model.weight_version)),
        )

    async def abort(self, call_id: str) -> None:
        await self.tell("Abort", request_id=call_id, reason="stopped")


def request_of(ask: Ask) -> sglang.GenerateRequest:
    output, bias = ask.output, banning(ask.bias, ask.bad_ids)
    params = sglang.SamplingParams(
        **sampling_of(ask),
        **guide_of(ask.guided, any_json={"json_schema": ANY_OBJECT}, grammar="ebnf_grammar"),
        # 0 would mean off here, too, but only in this contract; the engine's own word is -1.
        top_k=Draws.of(ask.sampling).top_k or -1,
        max_new_tokens=ask.max_tokens,
        min_new_tokens=ask.min_tokens,
        # The id that ends a sequence is part of our output.
        no_stop_trim=True,
        logit_bias={str(token): weight for token, weight in bias.items()},
    )
    return sglang.GenerateRequest(
        request_id=ask.call_id,
        tokenized=sglang.TokenizedInput(input_ids=ask.token_ids),
        sampling_params=params,
        return_logprob=output.per_token or output.prompt_log_probs,
        logprob_start_len=WHOLE_PROMPT if output.prompt_log_probs else NO_PROMPT,
        top_logprobs_num=asked_top(output.top_log_probs),
        stream=True,
    )


def _number(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0
