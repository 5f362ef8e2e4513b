"""Renders conversations in a process. A process beyond the time limit is killed, and another one started."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from collections import deque
from contextlib import suppress

from trtmesh.chassis.errors import (
    Draining,
    InternalError,
    InvalidField,
    InvalidRequest,
    QueueFull,
    TrtmeshError,
)
from trtmesh.tokenizer.chat.frames import CPU_SECONDS, INVALID, LENGTH_BYTES, RENDERED, framed
from trtmesh.tokenizer.chat.templates import ChatTemplates
from trtmesh.v1 import chat_pb2 as pb

log = logging.getLogger(__name__)

PROGRAM = "trtmesh.tokenizer.chat.rendering"
WALL_SECONDS = 30.0
"""Longest wait for an answer, for a machine too busy to give a rendering CPU time."""
LAST_SECONDS = 0.1
"""Time for a failed process to end. The exit status then explains the failure."""
MAX_WAITING = 1024
"""Most waiting conversations; beyond, QUEUE_FULL."""
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
        self._waiting: deque[tuple[bytes, asyncio.Future[str]]] = deque()
        self._work: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._closed = False

    async def render(self, chat: pb.Chat) -> str:
        """Returns the text of a conversation. Raises InvalidRequest, with the template's sentence if there is one."""
        if self._closed:
            raise Draining("the tokenizer is stopping")
        if len(self._waiting) >= MAX_WAITING:
            raise QueueFull.of(MAX_WAITING, "conversations wait for their chat template")
        rendered: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._asked(chat), rendered))
        if self._work is None:
            self._work = asyncio.create_task(self._render_waiting())
        return await rendered

    async def close(self) -> None:
        """Ends the process."""
        self._closed = True
        if self._work is not None:
            self._work.cancel()
            with suppress(asyncio.CancelledError):
                await self._work
        for _, rendered in self._waiting:
            rendered.cancel()
        await self._end()

    def _asked(self, chat: pb.Chat) -> bytes:
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
                " (encoding.max_text_bytes)",
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
        return b"".join(map(framed, (json.dumps(asked).encode(), *parts.values())))

    def _template(self, chat: pb.Chat) -> dict[str, str]:
        """The name of the template, or the source."""
        if chat.HasField("template"):
            return {"source": chat.template}
        with_tools = chat.HasField("tools")
        return {"template": self._templates.find(chat.template_name, with_tools=with_tools)}

    async def _render_waiting(self) -> None:
        while self._waiting:
            asked, rendered = self._waiting.popleft()
            if rendered.done():
                continue
            try:
                outcome: str | TrtmeshError = await self._answer(asked)
            except asyncio.CancelledError:
                rendered.cancel()
                raise
            except TrtmeshError as error:
                outcome = error.with_traceback(None)
            except Exception as error:
                # Broad on purpose: more conversations wait to be rendered.
                log.exception("a conversation failed unexpectedly")
                outcome = InternalError(f"{type(error).__name__}: {error}")
            if rendered.done():
                continue
            if isinstance(outcome, str):
                rendered.set_result(outcome)
            else:
                rendered.set_exception(outcome)
        self._work = None

    async def _answer(self, asked: bytes) -> str:
        process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(WALL_SECONDS):
                process.stdin.write(asked)
                await process.stdin.drain()
                length = await process.stdout.readexactly(LENGTH_BYTES)
                answer = await process.stdout.readexactly(int.from_bytes(length, "big"))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            raise await self._lost() from None
        told = answer[1:].decode()
        if answer[:1] == RENDERED:
            return told
        if answer[:1] == INVALID:
            name, _, problem = told.partition(" ")
            raise InvalidField(problem, field=f"chat.{name}")
        raise InvalidRequest(f"were refused by the chat template: {told}", field="chat.messages")

    async def _start(self) -> asyncio.subprocess.Process:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", PROGRAM),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        first = json.dumps(
            {
                "templates": dict(self._templates.by_name),
                "special_tokens": dict(self._templates.special_tokens),
            }
        ).encode()
        assert self._process.stdin is not None
        self._process.stdin.write(framed(first))
        return self._process

    async def _lost(self) -> TrtmeshError:
        """The error of a conversation without an answer, or of an ended process."""
        status = await self._end()
        if status == -signal.SIGPROF:
            return InvalidRequest(
                f"take the chat template more than {CPU_SECONDS:g} s of CPU time",
                field="chat.messages",
            )
        return InternalError(f"the process of the chat template ended with status {status}")

    async def _end(self) -> int:
        """Ends the process, if there is one, even while the caller is being cancelled. Returns the exit status."""
        if (process := self._process) is None:
            return 0
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_SECONDS):
                    await process.wait()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            status = await process.wait()
            self._process = None
        return status
