"""How families of models write calls of tools. The same data makes grammars and finds calls in texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Calls as a text."""

    marker: str
    """Begins each call, or the list of calls."""
    key: str
    """Name of the arguments in the JSON object of a call; '' for the text `name[ARGS]{...}`."""
    gap: str = ""
    """Text between the marker and the rest."""
    bracket: str = ""
    """Opens a list of calls."""
    separator: str = ""
    """Stands between the calls of a list."""
    closing: str = ""
    """Ends a call, or a list of calls."""
    may_lack_marker: bool = False
    """Whether an answer may begin with a call without a marker."""
    has_short_ids: bool = False
    """Whether templates want ids of nine letters and digits."""
    ends: Sequence[str] = ()
    """Special tokens at the end of an answer. If the marker is a special token, special tokens are not skipped, so they
    appear in the text."""
    between: str = ""
    """Text between two calls with a marker each."""
    specials: Sequence[str] = ()
    """The special tokens in a call, the first of which begins it."""

    @property
    def opening(self) -> str:
        return "" if self.may_lack_marker else self.marker + self.gap + self.bracket

    def head(self, name: str) -> str:
        """A call up to the arguments."""
        return f'{{"name": "{name}", "{self.key}": ' if self.key else f"{name}[ARGS]"

    @property
    def tail(self) -> str:
        """The end of a call, after the arguments."""
        return "}" if self.key else ""

    @property
    def trigger(self) -> str:
        """The first characters of every call under a grammar."""
        return '{"name": "' if self.may_lack_marker else self.marker


HERMES = CallFormat("<tool_call>", "arguments", gap="\n", closing="\n</tool_call>", between="\n")
LLAMA3_JSON = CallFormat(
    "<|python_tag|>",
    "parameters",
    separator="; ",
    may_lack_marker=True,
    ends=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
)
MISTRAL_LIST = CallFormat(
    "[TOOL_CALLS]",
    "arguments",
    bracket="[",
    separator=", ",
    closing="]",
    has_short_ids=True,
    ends=("</s>",),
    specials=("[TOOL_CALLS]",),
)
MISTRAL = CallFormat(
    "[TOOL_CALLS]",
    "",
    has_short_ids=True,
    ends=MISTRAL_LIST.ends,
    specials=("[TOOL_CALLS]", "[ARGS]"),
)

FORMATS: Mapping[str, Sequence[CallFormat]] = MappingProxyType(
    {
        "hermes": (HERMES,),
        "llama3_json": (LLAMA3_JSON,),
        "mistral_list": (MISTRAL_LIST, MISTRAL),
        "mistral": (MISTRAL, MISTRAL_LIST),
    }
)
"""By the name given by a tokenizer. Grammars use the first format; the parser takes the others too."""
