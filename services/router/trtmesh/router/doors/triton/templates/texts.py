"""Texts to ids and ids to texts of a Triton model: for pre- and postprocessing, and for prompts in the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trtmesh.router.doors.triton.templates.template import Model
from trtmesh.router.tokenizers.decoding import TextOptions
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.v1 import tokenizer_pb2 as tokenizer_pb


class TextsOf:
    """The texts of each Triton model; `served_model` resolves a configured name to a model of the mesh."""

    def __init__(self, tokenizers: TokenizerPool, served_model: Callable[[str], str]) -> None:
        self._tokenizers = tokenizers
        self._served_model = served_model

    def __call__(self, model: Model) -> Texts:
        """The texts of one model."""
        options = TextOptions(skip_special_tokens=model.skip_special_tokens)
        return Texts(self._tokenizers, lambda: self._served_model(model.mesh_model), options)


class Texts:
    """The tokenizer of one Triton model; `model` names the model of the mesh."""

    def __init__(
        self, tokenizers: TokenizerPool, model: Callable[[], str], options: TextOptions
    ) -> None:
        self._tokenizers = tokenizers
        self._model = model
        self._options = options

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
        """The text of ids. Raises TokenizerLost."""
        return await self._tokenizers.decode(self._model(), token_ids, self._options)
