"""The options of a workload, and the requests that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.option_groups import option
from trtmesh.tools.bench.record import Plan
from trtmesh.tools.bench.workloads.lengths import FORMS, MOST_TOKENS, read_lengths

if TYPE_CHECKING:
    from trtmesh.tools.bench.workloads.rows import Row
    from trtmesh.tools.bench.workloads.words import Count

INPUT_TOKENS, OUTPUT_TOKENS = "200", "100"
MOST_REQUESTS = 10**6


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What is sent: the requests of a file, else drawn ones."""

    PANEL: ClassVar = "Workload"

    workload: Path | None = option(
        "File of requests: .jsonl (aiperf's single_turn and multi_turn, vLLM's custom, Mooncake), .csv (BurstGPT,"
        " Azure), .json (ShareGPT, gptManagerBenchmark) or .txt (a prompt a line). Without"
        " it prompts are drawn by --seed."
    )
    requests: int | None = option(
        "How many: of a file the first, by default all of them; of drawn ones 100.",
        min=1,
        max=MOST_REQUESTS,
    )
    input_tokens: str | None = option(
        f"Lengths of drawn prompts: {FORMS}. By default {INPUT_TOKENS}."
    )
    output_tokens: str | None = option(
        f"Lengths of answers, likewise. By default the file's; of drawn prompts {OUTPUT_TOKENS}."
    )
    prefix_groups: int = option(
        "Groups of drawn prompts with a common beginning; 0 for none.",
        default=0,
        min=0,
        max=MOST_REQUESTS,
    )
    prefix_tokens: int = option(
        "Length of the beginning, before --input-tokens.", default=1024, min=1, max=MOST_TOKENS
    )
    turns: int = option(
        "Drawn requests of a session, each sent after the answer to the one before, with the texts of both.",
        default=1,
        min=1,
        max=1000,
    )
    adapter: list[str] | None = option(
        "LoRA adapter to draw for each session; repeatable, the most frequent first."
    )
    adapter_skew: float = option(
        "The n-th adapter has the share 1 / n^SKEW (Zipf); 0 gives equal shares.",
        default=1.0,
        min=0.0,
        max=10.0,
    )
    json_schema: str | None = option(
        "@FILE: JSON schema of all answers, or in a .jsonl file several, in turn."
    )
    tokenizer: Path | None = option(
        "A tokenizer.json, or a directory with one, which counts the tokens of drawn prompts. Without it the server"
        " counts, where it can."
    )

    async def plans(self, seed: int, count: Count | None = None) -> tuple[Plan, ...]:
        """The requests. `count` is the server's tokenizer, used without one of `--tokenizer`. Raises SettingsError
        and InvalidRequest."""
        from trtmesh.tools.bench.workloads.rows import plans_of
        from trtmesh.tools.bench.workloads.synthetic import (
            read_schemas,
            with_adapters,
            with_schemas,
        )
        from trtmesh.tools.bench.workloads.words import (
            COMMON,
            Words,
            local_tokenizer,
            one_token_words,
        )

        rows = self._rows(seed)
        candidates: Sequence[str] = COMMON
        if self.tokenizer:
            count, candidates = local_tokenizer(self.tokenizer)
        draws = any(row.parts for row in rows)
        words = await one_token_words(count, candidates) if count and draws else Words()
        asked = self.output_tokens or ("" if self.workload else OUTPUT_TOKENS)
        lengths = read_lengths(asked, "--output-tokens") if asked else None
        plans = await plans_of(rows, words, seed=seed, output_tokens=lengths, count=count)
        if self.adapter:
            plans = (*with_adapters(plans, self.adapter, self.adapter_skew, seed),)
        if self.json_schema is not None:
            if not self.json_schema.startswith("@"):
                raise SettingsError("must be @FILE", setting="--json-schema")
            plans = (*with_schemas(plans, read_schemas(Path(self.json_schema[1:]))),)
        return plans

    def _rows(self, seed: int) -> list[Row]:
        from trtmesh.tools.bench.workloads.files import read_rows
        from trtmesh.tools.bench.workloads.synthetic import drawn_rows

        drawn = {
            "--input-tokens": self.input_tokens,
            "--prefix-groups": self.prefix_groups,
            "--turns": self.turns > 1,
        }
        if self.workload:
            for name, value in drawn.items():
                if value:
                    raise SettingsError(
                        "is for drawn prompts, and --workload names a file", setting=name
                    )
            return read_rows(self.workload, self.requests or MOST_REQUESTS)
        return drawn_rows(
            seed,
            self.requests or 100,
            read_lengths(self.input_tokens or INPUT_TOKENS, "--input-tokens"),
            prefix_groups=self.prefix_groups,
            prefix_tokens=self.prefix_tokens,
            turns=self.turns,
        )

    def __str__(self) -> str:
        """The workload in words, for the header of a run: what makes two workloads different."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        if not self.workload:
            own |= {"input_tokens": self.input_tokens or INPUT_TOKENS}
            own |= {"output_tokens": self.output_tokens or OUTPUT_TOKENS}
        idle = {"requests", "tokenizer"}
        idle |= set() if self.prefix_groups else {"prefix_tokens"}
        idle |= set() if self.adapter else {"adapter_skew"}
        told = {
            each.name.replace("_", " "): own[each.name]
            for each in fields(self)
            if each.name not in idle and own[each.name] != each.default
        }
        return ", ".join(
            f"{name} {value.name if isinstance(value, Path) else value}"
            for name, value in told.items()
        )
