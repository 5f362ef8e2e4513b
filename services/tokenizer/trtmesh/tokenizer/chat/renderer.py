"""Has conversations rendered by a program in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence

from trtmesh.chassis.errors import InvalidField, InvalidRequest
from trtmesh.tokenizer.chat.frames import CPU_SECONDS, DONE, INVALID
from trtmesh.tokenizer.chat.program import Program, TookTooLongError
from trtmesh.tokenizer.chat.templates import ChatTemplates
from trtmesh.v1 import chat_pb2 as pb

PROGRAM = "trtmesh.tokenizer.chat.rendering"
PARTS = ("messages", "tools", "documents", "template_kwargs")
"""Parts of a conversation in JSON."""


class ChatRenderer:
    """Renders conversations in the order of arrival."""

    def __init__(
        self, templates: ChatTemplates, max_text_bytes: int, *, takes_templates: bool = False
    ) -> None:
        """`takes_templates` allows conversations to bring templates."""
        self._templates, self._takes_templates = templates, takes_templates
        self._most_bytes = max_text_bytes
        first = {
            "templates": dict(templates.by_name),
            "special_tokens": dict(templates.special_tokens),
        }
        self._program = Program(PROGRAM, first, "conversations")

    async def render(self, chat: pb.Chat) -> str:
        """Returns the text of a conversation. Raises InvalidRequest, with the template's sentence if there is one."""
        try:
            answer = await self._program.ask(*self._asked(chat))
        except TookTooLongError:
            raise InvalidRequest(
                f"take the chat template more than {CPU_SECONDS:g} s of CPU time",
                field="chat.messages",
            ) from None
        told = answer[1:].decode()
        if answer[:1] == DONE:
            return told
        if answer[:1] == INVALID:
            name, _, problem = told.partition(" ")
            raise InvalidField(problem, field=f"chat.{name}")
        raise InvalidRequest(f"were refused by the chat template: {told}", field="chat.messages")

    async def close(self) -> None:
        """Ends the process."""
        await self._program.close()

    def _asked(self, chat: pb.Chat) -> Sequence[bytes]:
        """Returns the conversation in the form for the process. Raises InvalidRequest."""
        given = {field.name for field, _ in chat.ListFields()}
        parts = {name: getattr(chat, name).encode() for name in PARTS if name in given}
        if chat.HasField("template") and not self._takes_templates:
            raise InvalidField(
                "is not taken from requests here (tokenizer.allow_request_templates)",
                field="chat.template",
            )
        size = sum(map(len, parts.values())) + len(chat.template)
        if size > self._most_bytes:
            raise InvalidField(
                f"has {size} bytes with all of the conversation but must have at most {self._most_bytes}"
                " (a sixteenth of max_message_bytes)",
                field="chat.messages",
            )
        continues = chat.continue_final_message
        if continues and chat.add_generation_prompt:
            fields = ("chat.add_generation_prompt", "chat.continue_final_message")
            raise InvalidField("exclude each other; set one of them", fields=fields)
        begins = chat.add_generation_prompt or not chat.HasField("add_generation_prompt")
        asked = {
            **self._template(chat),
            "add_generation_prompt": begins and not continues,
            "continue_final_message": continues,
            "most_bytes": self._most_bytes,
            "parts": list(parts),
        }
        return json.dumps(asked).encode(), *parts.values()

    def _template(self, chat: pb.Chat) -> dict[str, str]:
        """The name of the template, or the source."""
        if chat.HasField("template"):
            return {"source": chat.template}
        with_tools = chat.HasField("tools")
        return {"template": self._templates.find(chat.template_name, with_tools=with_tools)}
