"""Has answers read by the response template of the model: content, reasoning, and calls of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trtmesh.chassis.errors import InternalError, InvalidField
from trtmesh.tokenizer.chat.frames import CPU_SECONDS, DONE
from trtmesh.tokenizer.chat.program import Program, TookTooLongError
from trtmesh.v1 import tokenizer_pb2 as pb

PROGRAM = "trtmesh.tokenizer.chat.reading"
TEMPLATE = "the response_template of the model"


class TemplateReader:
    """Reads texts of answers in the order of arrival."""

    def __init__(self, template: Mapping[str, Any] | None, max_text_bytes: int) -> None:
        self._template, self._most_bytes = template, max_text_bytes
        self._program = Program(PROGRAM, template or {}, "answers")

    async def read(self, answer: pb.AnswerText) -> pb.ReadAnswer:
        """Returns the parts that are certain now. Raises InvalidField or InternalError."""
        if self._template is None:
            raise InvalidField("needs a response_template, which the model lacks", field="answer")
        if (size := answer.ByteSize()) > self._most_bytes:
            limit = f"at most {self._most_bytes} (a sixteenth of max_message_bytes)"
            raise InvalidField.of("answer", f"{size} bytes", limit)
        question = {field.name: getattr(answer, field.name) for field in answer.DESCRIPTOR.fields}
        try:
            told = await self._program.ask(json.dumps(question).encode())
        except TookTooLongError:
            problem = f"{TEMPLATE} takes more than {CPU_SECONDS:g} s of CPU time for a text"
            raise InternalError(problem) from None
        if told[:1] != DONE:
            raise InternalError(f"{TEMPLATE} failed: {told[1:].decode('utf-8', 'replace')}")
        found = json.loads(told[1:])
        read = pb.ReadAnswer(state=found["state"])
        for kind, *texts in found["parts"]:
            if kind == "call":
                name, arguments, own_id = texts
                read.parts.add().call.MergeFrom(
                    pb.ToolCall(name=name, arguments=arguments, id=own_id)
                )
            else:
                setattr(read.parts.add(), kind, texts[0])
        return read

    async def close(self) -> None:
        """Ends the process."""
        await self._program.close()
