"""`/v1/completions`: texts or token ids, continued."""

from __future__ import annotations

from typing import Any

from trtmesh.chassis.errors import InvalidField
from trtmesh.router.doors.openai.answer import Choices, Piece, Wanted
from trtmesh.router.doors.openai.fields import (
    ANY,
    INTEGER,
    LIST,
    TEXT,
    Fields,
    checked_ids,
    read_config,
)
from trtmesh.router.doors.openai.log_probs import TokenTexts, completion_shape
from trtmesh.router.doors.openai.requested import Requested
from trtmesh.router.metrics import TEXT_COMPLETION
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

MAX_TOKENS = 16
"""OpenAI's default number of generated tokens."""


class Completions(Choices):
    path = "/v1/completions"
    operation = TEXT_COMPLETION
    id_prefix = "cmpl-"
    whole = chunk = "text_completion"

    def read(self, requested: Requested, *, is_large: bool) -> Wanted:
        """Raises TrtmeshError."""
        fields = requested.fields
        _refuse_unserved(fields)
        config = read_config(fields, requested.defaults)
        most = fields.take("max_tokens", INTEGER)
        fields.put(
            config, "stopping.max_tokens", "max_tokens", MAX_TOKENS if most is None else most
        )
        if (top := fields.take("logprobs", INTEGER)) is not None:
            config.output.log_probs = True
            fields.put(config, "output.top_log_probs", "logprobs", top)
        fields.call("prompt", "prompt.text", "text", "items")
        special = fields.take_flag("add_special_tokens", default=True)
        items = [
            router_pb.GenerateItem(prompt=prompt)
            for prompt in _prompts(fields.need("prompt", ANY), special=special)
        ]
        return requested.wanted(items, config, is_large=is_large)

    def opening(self, choice: int) -> dict[str, Any] | None:
        return None

    def part(self, piece: Piece, texts: TokenTexts) -> dict[str, Any]:
        return self.choice(piece, texts)

    def choice(self, piece: Piece, texts: TokenTexts) -> dict[str, Any]:
        tokens = piece.scored
        return {
            "index": piece.choice,
            "text": piece.text,
            "logprobs": None if tokens is None else completion_shape(tokens, texts),
            "finish_reason": piece.finish_reason,
        }


def _refuse_unserved(fields: Fields) -> None:
    fields.refuse(
        "echo", "is not served: log-probabilities of prompts have no place here", neutral=False
    )
    fields.refuse("best_of", "is not served; ask for n sequences, and choose", neutral=1)
    fields.refuse("suffix", "is not served: no model here inserts text")


def _prompts(prompt: Any, *, special: bool) -> list[pb.Prompt]:
    """A text, a list of texts, token ids, or a list of such lists. Raises InvalidField."""
    if TEXT.has(prompt):
        return [pb.Prompt(text=prompt, add_special_tokens=special)]
    if not LIST.has(prompt) or not prompt:
        raise InvalidField(
            "must be a text, token ids, or a list of one or more of either", field="prompt"
        )
    if all(map(TEXT.has, prompt)):
        return [pb.Prompt(text=text, add_special_tokens=special) for text in prompt]
    lists = prompt if all(map(LIST.has, prompt)) else [prompt]
    return [pb.Prompt(token_ids=pb.TokenIds(ids=checked_ids("prompt", ids))) for ids in lists]
