"""Texts to ids and ids to texts, where no sequence is generated: for pre- and postprocessing, and for prompts that are
part of the output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.vocabulary import GenerationConfig, Output, Prompt
from trtmesh.router.doors.triton.models import Model
from trtmesh.router.streams.client_stream import ClientStream, as_response
from trtmesh.router.streams.sequence import End, SequenceRun
from trtmesh.router.streams.turns import Turns
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.router.values.request import ItemRequest
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb
from trtmesh.v1 import tokenizer_pb2 as tokenizer_pb


class TextsOf:
    """The texts of each Triton model; `served_model` gives the model of the mesh for the name that is configured."""

    def __init__(
        self, tokenizers: TokenizerPool, turns: Turns, served_model: Callable[[str], str]
    ) -> None:
        self._tokenizers = tokenizers
        self._turns = turns
        self._served_model = served_model
        self._texts: dict[tuple[str, bool], Texts] = {}

    def __call__(self, model: Model) -> Texts:
        """What encodes and decodes for a model."""
        key = model.mesh_model, model.skip_special_tokens
        if key not in self._texts:
            self._texts[key] = Texts(
                self._tokenizers,
                self._turns,
                lambda: self._served_model(model.mesh_model),
                skip_special_tokens=model.skip_special_tokens,
            )
        return self._texts[key]


class Texts:
    """The tokenizer of the model behind the Triton models; `model` names it."""

    def __init__(
        self,
        tokenizers: TokenizerPool,
        turns: Turns,
        model: Callable[[], str],
        *,
        skip_special_tokens: bool,
    ) -> None:
        self._tokenizers = tokenizers
        self._turns = turns
        self._model = model
        self._item = ItemRequest(
            batch_index=0,
            prompt=Prompt(token_ids=()),
            config=GenerationConfig(
                output=Output(stream=False, skip_special_tokens=skip_special_tokens)
            ),
            message=pb.GenerationConfig(),
        )

    def describe(self) -> tokenizer_pb.GetTokenizerResponse:
        """Special ids and size of the tokenizer. Raises NoTokenizer."""
        return self._tokenizers.describe(self._model())

    async def encode(
        self, text: str, words: Sequence[str] = (), *, add_special_tokens: bool = True
    ) -> tokenizer_pb.Encoded:
        """Ids of a text, and of words without special tokens. Raises NoTokenizer."""
        command = tokenizer_pb.EncodeCommand(
            text=text, words=words, add_special_tokens=add_special_tokens
        )
        return await self._tokenizers.encode(self._model(), command)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids. Raises NoTokenizer or TokenizerLost."""
        if not token_ids:
            return ""
        whole = _Whole()
        client = ClientStream(router_pb.GenerateEvent(), self._turns)
        run = SequenceRun(
            self._item, 0, request_id="", model=self._model(), arrival_time=0.0, client=client, owner=whole
        )  # fmt: skip
        run.token_ids = list(token_ids)
        try:
            self._tokenizers.attach(run)
            run.on_end(End(pb.FINISH_REASON_LENGTH))
            await whole.settled
        finally:
            run.abandon(pb.FINISH_REASON_CANCELLED)
        if run.error is not None:
            raise run.error
        waiting = await client.take()
        assert waiting is not None
        return "".join(event.tokens.text for event in as_response(waiting).events)


class _Whole:
    """Owner of a sequence whose tokens are all there: it waits for the text and nothing else."""

    def __init__(self) -> None:
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_settled(self, run: SequenceRun) -> None:
        if not self.settled.done():
            self.settled.set_result(None)

    def on_lost(self, run: SequenceRun, address: str, error: TrtmeshError) -> None:
        raise AssertionError("no worker ever had it")

    def leave(self, runs: Sequence[SequenceRun], address: str, error: TrtmeshError) -> bool:
        return False
