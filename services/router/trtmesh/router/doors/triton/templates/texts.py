"""Texts to ids and ids to texts of Triton models: for pre- and postprocessing, and for prompts in the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trtmesh.chassis.errors import PromptTooLong, TrtmeshError
from trtmesh.chassis.parsing import MAX_PROMPT_TOKENS
from trtmesh.router.doors.triton.templates.template import Model
from trtmesh.router.tokenizers.decoding import TextOptions
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.v1 import tokenizer_pb2 as tokenizer_pb


class Texts:
    """The tokenizers of Triton models; `served_model` resolves a configured name to a model of the mesh."""

    def __init__(self, tokenizers: TokenizerPool, served_model: Callable[[str], str]) -> None:
        self._tokenizers = tokenizers
        self._served_model = served_model

    def problem(self, model: Model) -> str:
        """Why a model has no tokenizer now, or ''."""
        try:
            self.describe(model)
        except TrtmeshError as error:
            return error.message
        return ""

    def describe(self, model: Model) -> tokenizer_pb.GetTokenizerResponse:
        """Special ids and size of the tokenizer. Raises NoTokenizer."""
        return self._tokenizers.describe(self._served_model(model.mesh_model))

    def vocabulary_size(self, model: Model) -> int:
        """Number of ids of the tokenizer; 0 while there is none."""
        try:
            return self.describe(model).vocabulary_size
        except TrtmeshError:
            return 0

    async def encode(
        self,
        model: Model,
        text: str,
        words: Sequence[str] = (),
        spelled_words: Sequence[str] = (),
    ) -> tokenizer_pb.Encoded:
        """Ids of a text, and of words without special tokens, of some in every spelling. Raises NoTokenizer."""
        served = self._served_model(model.mesh_model)
        self._tokenizers.check_size(served, text, *words, *spelled_words)
        command = tokenizer_pb.EncodeCommand(
            text=text,
            words=words,
            spelled_words=spelled_words,
            add_special_tokens=model.add_special_tokens,
            max_token_ids=MAX_PROMPT_TOKENS,
        )
        encoded = await self._tokenizers.encode(served, command)
        if count := encoded.omitted_token_ids:
            raise PromptTooLong(
                f"has {count} tokens or more, but a prompt has at most {MAX_PROMPT_TOKENS}; shorten it",
                field="text",
                value=str(count),
                limit=f"at most {MAX_PROMPT_TOKENS}",
            )
        return encoded

    async def decode(self, model: Model, token_ids: Sequence[int]) -> str:
        """The text of ids. Raises TokenizerLost."""
        options = TextOptions(skip_special_tokens=model.skip_special_tokens)
        served = self._served_model(model.mesh_model)
        return await self._tokenizers.decode(served, token_ids, options)
