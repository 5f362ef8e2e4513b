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
    """Name of the arguments in the JSON object of a call. Without it the text is `name[ARGS]{...}`."""
    gap: str = ""
    """Stands between the marker and what follows."""
    bracket: str = ""
    """Opens a list of calls."""
    separator: str = ""
    """Stands between the calls of a list."""
    closing: str = ""
    """Ends a call, or a list of calls."""
    may_lack_marker: bool = False
    """Whether an answer may begin with a call that has no marker."""
    has_short_ids: bool = False
    """Whether templates want ids of nine letters and digits."""
    ends: Sequence[str] = ()
    """Special tokens that end an answer. They appear in the text where the marker is a special token too, since special
    tokens are then not skipped."""
    between: str = ""
    """Stands between two calls, each with its marker."""

    @property
    def has_special_marker(self) -> bool:
        """Whether the marker is a special token, which no grammar of texts allows."""
        return bool(self.ends) and not self.may_lack_marker

    @property
    def opening(self) -> str:
        return "" if self.may_lack_marker else self.marker + self.gap + self.bracket

    def head(self, name: str) -> str:
        """A call up to its arguments."""
        return f'{{"name": "{name}", "{self.key}": ' if self.key else f"{name}[ARGS]"

    @property
    def tail(self) -> str:
        """The end of a call, behind its arguments."""
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
)
MISTRAL = CallFormat("[TOOL_CALLS]", "", has_short_ids=True, ends=MISTRAL_LIST.ends)

FORMATS: Mapping[str, Sequence[CallFormat]] = MappingProxyType(
    {
        "hermes": (HERMES,),
        "llama3_json": (LLAMA3_JSON,),
        "mistral_list": (MISTRAL_LIST, MISTRAL),
        "mistral": (MISTRAL, MISTRAL_LIST),
    }
)
"""By the name that a tokenizer gives. Grammars are of the first; the others are understood too."""
