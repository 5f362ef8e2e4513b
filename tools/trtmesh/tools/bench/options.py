"""Options of the commands that send: the target, the load, and the client."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.tls.client import ClientTls
from trtmesh.cli.option_groups import option
from trtmesh.cli.session import ApiKeyFileOption
from trtmesh.cli.tls import CONNECTION, TlsOptions
from trtmesh.tools.bench.loads import KINDS, read_numbers, read_ramp
from trtmesh.tools.bench.record import Load
from trtmesh.tools.bench.targets.target import Connecting, Url


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """How to reach the server."""

    model: str = option("Model to ask; unset, the only one, or `ensemble`.", default="")
    api_key_file: ApiKeyFileOption = None
    tls: TlsOptions = field(default_factory=TlsOptions)

    def connecting(self, target: str) -> Connecting:
        """Raises SettingsError."""
        url, tls = Url.parse(target), self.tls.client_tls()
        if url.is_secure and tls is None:
            tls = ClientTls()
        found = Connecting(url, self.model, self.api_key_file, tls)
        # A bad key is refused before anything is sent.
        _ = found.api_key
        return found


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """When requests are sent. One of the first four."""

    PANEL: ClassVar = "Load"

    concurrency: str | None = option(
        "Requests at a time, each followed by the next; several with commas are a run each. Default 1.",
        metavar="N[,N...]",
    )
    rate: str | None = option(
        "Requests per second at planned times; several with commas are a run each.",
        metavar="R[,R...]",
    )
    ramp: str | None = option(
        "Rates from the first to the last over a time: 1..20@60s.", metavar="R..R@S"
    )
    as_recorded: bool = option("Send at the times of the trace.", "--as-recorded", default=False)
    speed: float = option("Speed of the trace.", default=1.0, min=1e-6)
    arrivals: str = option(f"Gaps at a --rate: {', '.join(KINDS)}.", default="poisson")
    burstiness: float = option(
        "Of gamma: 1 is poisson, less comes in bursts.", default=0.5, min=1e-3
    )
    duration: float | None = option(
        "Seconds after which the run ends; what is under way is cancelled.", min=0.001
    )
    warmup: int = option(
        "Requests before the run, without figures: the first of the workload.", default=0, min=0
    )

    batch: int = option("Prompts of a request; only grpc:// takes several.", default=1, min=1)

    def loads(self) -> list[Load]:
        """One of each run. Raises SettingsError."""
        given = [self.concurrency, self.rate, self.ramp, self.as_recorded or None]
        if sum(each is not None for each in given) > 1:
            raise SettingsError("give one of --concurrency, --rate, --ramp and --as-recorded")
        if self.arrivals not in KINDS:
            raise SettingsError(
                f"is {self.arrivals!r} but must be one of {', '.join(KINDS)}", setting="--arrivals"
            )
        if self.rate is not None:
            shape = {"burstiness": self.burstiness} if self.arrivals == "gamma" else {}
            rates = read_numbers(self.rate, "--rate")
            return [Load(self.arrivals, rate=rate, shape=shape) for rate in rates]
        if self.ramp is not None:
            return [read_ramp(self.ramp)]
        if self.as_recorded:
            return [Load("trace", shape={"speed": self.speed})]
        levels = read_numbers(self.concurrency or "1", "--concurrency")
        if any(level != int(level) for level in levels):
            raise SettingsError("must have whole numbers", setting="--concurrency")
        return [Load("closed", concurrency=int(level)) for level in levels]


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How the tool sends, and what it keeps."""

    connections: int = option(
        "Connections of a process; over HTTP each request under way has one anyway.",
        default=1,
        min=1,
        panel=CONNECTION,
    )
    processes: int = option(
        "Processes that send, where one cannot keep up.", default=1, min=1, panel=CONNECTION
    )
    echo: bool = option(
        "Measure first what the client itself costs.", "--echo/--no-echo", default=True
    )
    timeout: float = option(
        "Seconds after which a request has failed.", default=600.0, min=0.001, panel=CONNECTION
    )
    record: Path | None = option("Write each answer to this file, for `bench compare`.")
    metrics: str | None = option(
        "Read the server's Prometheus metrics here each second, for the record and the page.",
        metavar="URL",
    )
    save_texts: bool = option("Keep texts in the record.", "--save-texts", default=False)
