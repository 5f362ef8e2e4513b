"""`trtmesh chat`: a conversation with a model, line by line."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Annotated, Any

import typer
from trtmesh.chassis.errors import InvalidRequest, NotFound, TrtmeshError
from trtmesh.cli.config_options import takes_config_options
from trtmesh.cli.output import put, say, say_error, shown
from trtmesh.cli.session import FAILED, INTERRUPTED, OK, RouterOptions, run
from trtmesh.client import Client, ItemFailed, Tokens, chat_item
from trtmesh.client.options import build_config

HELP = "Ctrl-C or /stop ends an answer, /model NAME takes another model, /new forgets the conversation, /quit ends"


@takes_config_options
def chat(
    connection: RouterOptions,
    *,
    model: Annotated[
        str, typer.Option(help="Model; unset means the only one. /model NAME changes it.")
    ] = "",
    system: Annotated[str, typer.Option(help="What the model is told first.")] = "",
    config_fields: Mapping[str, object],
) -> None:
    """Talk with a model. Each line is a message; its answer is streamed, and the model sees both from then on.

    Ctrl-C or /stop ends an answer early; /model NAME takes another model; /new forgets the conversation; /quit,
    Ctrl-C without an answer, or the end of the input ends.

    Exit status: 0, 1 if the last message had no answer, or 130 by Ctrl-C.
    """

    async def talk() -> int:
        async with connection.connected() as client:
            return await Talk(client, model, system, config_fields).until_end()

    run(talk())


class Talk:
    """A conversation. What is typed during an answer counts after it, but for `/stop`."""

    def __init__(
        self, client: Client, model: str, system: str, options: Mapping[str, object]
    ) -> None:
        self._client, self._model = client, model
        self._config = build_config(None, options)
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._system)
        self._typed: deque[str | None] = deque()
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._answering: asyncio.Task[None] | None = None
        self._interrupted = False

    async def until_end(self) -> int:
        """Reads and answers until the end of the input. Returns the exit status."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        # A daemon: nothing else ends the wait for a line.
        threading.Thread(
            target=_read_lines, args=(loop, self._lines.put_nowait), daemon=True
        ).start()
        if self._is_terminal:
            say(HELP)
        status = OK
        while (line := await self._next_line()) is not None and line != "/quit":
            command, _, argument = line.partition(" ")
            if command == "/model":
                self._model = argument.strip()
            elif command == "/new":
                self._messages = list(self._system)
            elif command.startswith("/") and command != "/stop":
                say(f"no command {command}: {HELP}")
            elif line and command != "/stop":
                status = await self._answer(line)
        return INTERRUPTED if self._interrupted else status

    def _interrupt(self) -> None:
        """Ends the answer under way, or else the talk."""
        if self._answering is not None:
            self._answering.cancel()
        else:
            self._interrupted = True
            self._lines.put_nowait(None)

    async def _next_line(self) -> str | None:
        if self._is_terminal and not self._typed:
            put("> ", end="")
        return self._typed.popleft() if self._typed else await self._lines.get()

    async def _answer(self, line: str) -> int:
        """Streams the answer to a message, which is forgotten where there is none. Returns the exit status."""
        texts: list[str] = []
        asked = [*self._messages, {"role": "user", "content": line}]
        request_id = uuid.uuid4().hex
        accepted = asyncio.Event()
        stopping = asyncio.create_task(self._stop_when_told(request_id, accepted))
        self._answering = asyncio.create_task(self._stream(asked, request_id, accepted, texts))
        try:
            await asyncio.wait((self._answering,))
            if not self._answering.cancelled():
                self._answering.result()
            else:
                put("")
                if not texts:
                    return FAILED
        except (InvalidRequest, NotFound) as error:
            say_error(f"{error.reason}: {error}")
            return FAILED
        finally:
            stopping.cancel()
            self._answering.cancel()
            self._answering = None
        self._messages = [*asked, {"role": "assistant", "content": "".join(texts)}]
        return OK

    async def _stream(
        self,
        asked: list[dict[str, Any]],
        request_id: str,
        accepted: asyncio.Event,
        texts: list[str],
    ) -> None:
        """Prints the texts of the answer, and adds them to `texts`. A request without a reader ends."""
        failed: TrtmeshError | None = None
        events = self._client.generate(
            [chat_item(asked)], config=self._config, model=self._model, request_id=request_id
        )
        async with aclosing(events):
            async for event in events:
                accepted.set()
                if isinstance(event, Tokens) and not event.sequence_index:
                    texts.append(event.text)
                    put(shown(event.text), end="")
                elif isinstance(event, ItemFailed):
                    failed = event.error
        put("")
        if failed is not None:
            raise failed

    async def _stop_when_told(self, request_id: str, accepted: asyncio.Event) -> None:
        while True:
            line = await self._lines.get()
            if line == "/stop":
                # The router knows no request before.
                await accepted.wait()
                try:
                    await self._client.stop(request_id)
                except TrtmeshError as error:
                    say_error(f"{error.reason}: {error}")
            else:
                self._typed.append(line)


def _read_lines(loop: asyncio.AbstractEventLoop, put_line: Callable[[str | None], None]) -> None:
    """Hands over each line of standard input, then None."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(put_line, line.strip())
    loop.call_soon_threadsafe(put_line, None)
