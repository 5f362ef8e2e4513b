"""Answers of a request that streams one text and nothing beside it: what most ask, so it costs the least.

They are what Answers would say; only nothing is collected that no response shows.
"""

from __future__ import annotations

from collections.abc import Sequence

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.router.doors.triton.answers import Answer, ItemError, cut_off_error
from trtmesh.router.doors.triton.grpc.responses import Output, text_data
from trtmesh.router.doors.triton.templates.outputs import TEXT_OUTPUT, RowOutput, SequenceOutput
from trtmesh.router.streams.client_stream import Waiting, WaitingTokens


class PlainText:
    """Says what there is to respond; see Answers."""

    def __init__(self, item_error: ItemError, *, final_alone: bool) -> None:
        self._item_error = item_error
        self._final_alone = final_alone
        self._texts: list[str] = []
        self._fresh = False
        self._over = False
        self.error: TrtmeshError | None = None
        """Of the only row."""

    def see(self, waiting: Sequence[Waiting]) -> None:
        """Takes what happened."""
        for entry in waiting:
            if isinstance(entry, WaitingTokens):
                self._texts += entry.texts
                self._fresh = True
            else:
                event = entry.event
                if event.HasField("item_finished"):
                    self._over = True
                    self.error = cut_off_error((event.item_finished.reason,))
                elif event.HasField("item_failed"):
                    self._over = True
                    self.error = self._item_error(event.item_failed)

    def texts_to_complete(self) -> Sequence[tuple[RowOutput, SequenceOutput]]:
        """None: the prompt is no part of what is streamed."""
        return ()

    def take(self) -> list[Answer]:
        """The responses that are due now; the last one of the request is final."""
        if not self._over:
            return [Answer(self._text())] if self._fresh else []
        answers = [Answer(self._text())] if self._fresh else []
        if self.error is not None:
            answers.append(Answer(error=self.error))
        if self._final_alone:
            return [*answers, Answer(final=True, only_end=True)]
        *others, last = answers or [Answer(self._text())]
        return [*others, last._replace(final=True)]

    def _text(self) -> list[Output]:
        texts, self._texts, self._fresh = self._texts, [], False
        text = texts[0] if len(texts) == 1 else "".join(texts)
        return [Output(TEXT_OUTPUT, "BYTES", (1,), text_data((text,)))]
