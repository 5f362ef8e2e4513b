"""What a run is: what is sent, what came back, and how it was made.

Times are seconds since the start of the run, of a monotonic clock; `Header.started_unix_s` is that start by the clock
on the wall.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

SCHEMA = 1
"""Version of the file of runs; a reader refuses a newer one."""


class AnswerOutcome(StrEnum):
    """How an item ended. Each item that was sent has exactly one."""

    OK = "ok"
    ERROR = "error"
    """It failed, its stream broke, or the protocol was not kept."""
    CANCELLED = "cancelled"
    """By the tool, at the end of the run or at Ctrl-C, or by someone else at the server."""
    REFUSED = "refused"
    """The server had no room: UNAVAILABLE with a full queue, RESOURCE_EXHAUSTED, 429, 503."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One item to send, of a text or of token ids. Equal for every target and every run of a workload."""

    index: int
    """Identity in the workload; pairs the answers of two runs."""
    text: str | None = None
    ids: tuple[int, ...] = ()
    """Token ids in place of `text`."""
    history: tuple[str, ...] = ()
    """Earlier texts of the conversation, the user's and the model's in turn; the driver fills in the model's."""
    max_tokens: int = 16
    seed: int | None = None
    adapter: str = ""
    """Name or number of a LoRA."""
    json_schema: str | None = None
    """The answer must be JSON of this schema."""
    ignore_end_id: bool = False
    """The answer goes on to `max_tokens`."""

    @property
    def whole_text(self) -> str:
        """The conversation up to the prompt as one text."""
        return "".join((*self.history, self.text or ""))


@dataclass(frozen=True, slots=True)
class Plan:
    """One request: several prompts are a batch, which only native targets have."""

    prompts: tuple[Prompt, ...]
    planned_s: float | None = None
    """When to send it; None in a closed loop."""
    session: str = ""
    """Requests of one session are sent one after the other, each `delay_s` after the end of the one before; then
    `planned_s` is that of the first alone."""
    turn: int = 0
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back of one item."""

    index: int
    batch_index: int
    request_id: str
    planned_s: float
    """When it was due; in a closed loop when it was sent. Latencies count from here."""
    sent_s: float
    ended_s: float
    outcome: AnswerOutcome
    error: str = ""
    """Why it is not ok."""
    finish_reason: str = ""
    """As the protocol names it."""
    arrivals_s: tuple[float, ...] = ()
    """Of each chunk with content: text or token ids."""
    tokens: tuple[int, ...] = ()
    """Tokens of each of those chunks; 0 where the protocol does not say."""
    prompt_tokens: int | None = None
    """By the server's usage."""
    output_tokens: int | None = None
    """By the server's usage, else the sum of `tokens` where the protocol says all of them."""
    text_sha256: str = ""
    ids_sha256: str | None = None
    """Of the token ids as decimal numbers with spaces between; None where the protocol carries none."""
    lost: int | None = None
    """Tokens that the offsets skipped; None where the protocol carries no offsets."""
    doubled: int | None = None
    """Tokens that came again."""
    worker: str = ""
    session: str = ""
    turn: int = 0
    text: str | None = None
    """The answer itself, if texts are kept."""

    @property
    def ok(self) -> bool:
        return self.outcome is AnswerOutcome.OK

    @property
    def lag_s(self) -> float:
        """How late the client sent it."""
        return self.sent_s - self.planned_s

    @property
    def busy_s(self) -> float:
        """How long it was under way."""
        return self.ended_s - self.sent_s


@dataclass(frozen=True, slots=True)
class Echo:
    """What the client itself costs: the same load and protocol against a server in this machine that does nothing."""

    concurrency: int
    added_first_ms: tuple[float, float, float]
    """p50, p90, p99 from the sending of a first token to its arrival."""
    added_gap_ms: tuple[float, float, float]
    """p50, p90, p99 by which a gap between tokens is another than that of their sending."""
    tokens_per_s: float
    """Its ceiling, in chunks."""


@dataclass(frozen=True, slots=True)
class Disruption:
    """A fault that was made during the run."""

    kind: str
    target: str
    at_s: float
    ended_s: float
    error: str = ""
    """Why it could not be made."""


@dataclass(frozen=True, slots=True)
class MetricsSample:
    """Metrics of a server at a time of the run, each summed over its labels."""

    at_s: float
    source: str
    """URL of the metrics, without secrets."""
    gauges: Mapping[str, float]
    counters: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Load:
    """How requests were sent: in a closed loop of `concurrency`, or at the planned times of `rate`."""

    kind: str
    """`closed`, `constant`, `poisson`, `gamma`, `ramp` or `trace`."""
    concurrency: int | None = None
    """In an open loop the most requests at a time, if there is a limit."""
    rate: float | None = None
    """Requests per second."""
    shape: Mapping[str, float | str] = field(default_factory=dict)
    """What else the kind needs, such as `burstiness`."""

    def __str__(self) -> str:
        parts = [f"{self.concurrency} at a time"] if self.concurrency is not None else []
        parts += [f"{self.rate:g}/s"] if self.rate is not None else []
        return ", ".join([self.kind, *parts, *(f"{k} {v}" for k, v in self.shape.items())])


@dataclass(frozen=True, slots=True)
class Header:
    """What a run was: the first line of it."""

    target: str
    """URL, without secrets."""
    protocol: str
    load: Load
    workload: str
    """The prompts in words: the file, or the distribution."""
    seed: int
    model: str = ""
    release: str = ""
    """Version of the server, as far as it says."""
    command: str = ""
    """The command line, without secrets."""
    tool: str = ""
    """Version of trtmesh."""
    started_unix_s: float = 0.0
    warmup: int = 0
    """Requests before the start, which are in no figure."""
    duration_s: float | None = None
    """When sending had to end; None without a limit."""
    connections: int = 1
    processes: int = 1
    echo: Echo | None = None
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class RunEnd:
    """What is known when a run is over: the last line of it."""

    ended_s: float
    interrupted: bool = False
    """By Ctrl-C; then the answers are those so far."""
    client_busy: float = 0.0
    """Share of the time in which the client computed, of the busiest process."""
    unsent: int = 0
    """Prompts of the workload that were not sent before the end."""
    disruptions: tuple[Disruption, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    header: Header
    answers: tuple[Answer, ...]
    end: RunEnd | None = None
    """None for a run that was killed."""
    samples: tuple[MetricsSample, ...] = ()

    @property
    def title(self) -> str:
        """Names it in a file of several."""
        disrupted = ", disrupted" if self.end and self.end.disruptions else ""
        return f"{self.header.load}{disrupted}"

    @property
    def is_interrupted(self) -> bool:
        return self.end is not None and self.end.interrupted

    def count(self, outcome: AnswerOutcome) -> int:
        return sum(answer.outcome is outcome for answer in self.answers)


Line = Header | Answer | MetricsSample | RunEnd
"""Of a file of runs."""


def without_secrets(arguments: Sequence[str]) -> str:
    """A command line to show; keys are never on one, and user information of URLs is removed."""
    return shlex.join(re.sub("://[^/]*@", "://", each) for each in arguments)
