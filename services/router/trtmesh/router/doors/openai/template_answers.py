"""Reads answers at a tokenizer, by the response template of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from trtmesh.router.doors.openai.answer import Piece, Wanted, call_id, read_piece
from trtmesh.router.doors.openai.answer_parts import (
    AnswerPart,
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Reasoning,
)
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.v1 import tokenizer_pb2 as pb


class TemplateAnswers:
    """Reads the text of each choice. Any tokenizer continues where another was lost."""

    def __init__(self, wanted: Wanted, tokenizers: TokenizerPool) -> None:
        self._wanted, self._tokenizers = wanted, tokenizers
        self._states: dict[int, str] = {}
        self._calls: dict[int, int] = {}

    async def read(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Returns the pieces with the parts of their texts in the last piece of each choice. Raises the errors of the
        pool."""
        if self._wanted.by_template is None:
            return list(pieces)
        last = {piece.choice: place for place, piece in enumerate(pieces)}
        texts = {choice: "".join(p.text for p in pieces if p.choice == choice) for choice in last}
        reading = [
            self._read(choice, text, is_end=pieces[last[choice]].finish_reason is not None)
            for choice, text in texts.items()
        ]
        said = dict(zip(texts, await asyncio.gather(*reading), strict=True))
        return [
            read_piece(
                piece,
                said[piece.choice] if last[piece.choice] == place else (),
                self._wanted,
                has_calls=piece.choice in self._calls,
            )
            for place, piece in enumerate(pieces)
        ]

    async def _read(self, choice: int, text: str, *, is_end: bool) -> Sequence[AnswerPart]:
        if not text and not is_end:
            return ()
        by_template, state = self._wanted.by_template, self._states.get(choice, "")
        assert by_template is not None
        prompt_end = "" if state else by_template.prompt_end
        answer = pb.AnswerText(
            text=text, is_end=is_end, state=state, prompt_end=prompt_end, tools=by_template.tools
        )
        command = pb.EncodeCommand(answer=answer)
        read = (await self._tokenizers.encode(self._wanted.request.model, command)).read_answer
        self._states[choice] = read.state
        return [said for part in read.parts for said in self._parts(choice, part)]

    def _parts(self, choice: int, part: pb.AnswerPart) -> Sequence[AnswerPart]:
        match part.WhichOneof("part"):
            case "content":
                return [Content(part.content)]
            case "reasoning":
                return [Reasoning(part.reasoning)]
            case "call":
                call, index = part.call, self._calls.get(choice, 0)
                self._calls[choice] = index + 1
                begun = CallBegun(index, call.name, call.id or call_id(self._wanted, choice, index))
                return [begun, CallArguments(index, call.arguments), CallEnded(index)]
        return ()
