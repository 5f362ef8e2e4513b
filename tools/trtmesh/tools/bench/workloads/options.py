"""The options of a workload, and the requests that they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.option_groups import option
from trtmesh.tools.bench.record import Plan
from trtmesh.tools.bench.workloads.lengths import FORMS, MOST_TOKENS, read_lengths

if TYPE_CHECKING:
    from trtmesh.tools.bench.workloads.rows import Row
    from trtmesh.tools.bench.workloads.words import Count

PANEL = "Workload"
INPUT_TOKENS, OUTPUT_TOKENS = "200", "100"
MOST_REQUESTS = 10**6


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What is sent: the requests of a file, else drawn ones."""

    workload: Path | None = option(
        "File of requests: .jsonl (aiperf's single_turn and multi_turn, vLLM's custom, Mooncake), .csv (BurstGPT,"
        " Azure), .json (ShareGPT, gptManagerBenchmark) or .txt (a prompt a line). Without"
        " it prompts are drawn by --seed.",
        panel=PANEL,
    )
    requests: int | None = option(
        "How many: of a file the first, by default all of them; of drawn ones 100.",
        panel=PANEL,
        min=1,
        max=MOST_REQUESTS,
    )
    input_tokens: str | None = option(
        f"TokenLengths of drawn prompts: {FORMS}. By default {INPUT_TOKENS}.", panel=PANEL
    )
    output_tokens: str | None = option(
        f"TokenLengths of answers, likewise. By default the file's; of drawn prompts {OUTPUT_TOKENS}.",
        panel=PANEL,
    )
    prefix_groups: int = option(
        "Groups of drawn prompts with a common beginning; 0 for none.",
        panel=PANEL,
        default=0,
        min=0,
        max=MOST_REQUESTS,
    )
    prefix_tokens: int = option(
        "Length of the beginning, before --input-tokens.",
        panel=PANEL,
        default=1024,
        min=1,
        max=MOST_TOKENS,
    )
    turns: int = option(
        "Drawn requests of a session, each sent after the answer to the one before, with the texts of both.",
        panel=PANEL,
        default=1,
        min=1,
        max=1000,
    )
    turn_delay: float = option(
        "Seconds from an answer to the next turn.", panel=PANEL, default=0.0, min=0.0, max=86400.0
    )
    adapter: list[str] | None = option(
        "LoRA adapter to draw for each session; repeatable, the most frequent first.", panel=PANEL
    )
    adapter_skew: float = option(
        "The n-th adapter has the share 1 / n^SKEW (Zipf); 0 gives equal shares.",
        panel=PANEL,
        default=1.0,
        min=0.0,
        max=10.0,
    )
    json_schema: str | None = option(
        "@FILE: JSON schema of all answers, or in a .jsonl file several, in turn.", panel=PANEL
    )
    tokenizer: Path | None = option(
        "A tokenizer.json, or a directory with one, which counts the tokens of drawn prompts. Without it the server"
        " counts, where it can.",
        panel=PANEL,
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
            plans = with_adapters(plans, self.adapter, self.adapter_skew, seed)
        if self.json_schema is not None:
            if not self.json_schema.startswith("@"):
                raise SettingsError("must be @FILE", setting="--json-schema")
            plans = with_schemas(plans, read_schemas(Path(self.json_schema[1:])))
        return plans

    def _rows(self, seed: int) -> list[Row]:
        from trtmesh.tools.bench.workloads.files import read_rows
        from trtmesh.tools.bench.workloads.synthetic import Synthetic

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
        return Synthetic(
            requests=self.requests or 100,
            input_tokens=read_lengths(self.input_tokens or INPUT_TOKENS, "--input-tokens"),
            prefix_groups=self.prefix_groups,
            prefix_tokens=self.prefix_tokens,
            turns=self.turns,
            turn_delay_s=self.turn_delay,
        ).rows(seed)

    def __str__(self) -> str:
        """The workload in words, for the header of a run."""
        parts = [f"file {self.workload.name}"] if self.workload else []
        if not self.workload:
            parts.append(f"{self.input_tokens or INPUT_TOKENS} tokens in")
            parts.append(f"{self.output_tokens or OUTPUT_TOKENS} out")
        elif self.output_tokens:
            parts.append(f"{self.output_tokens} tokens out")
        if self.prefix_groups:
            parts.append(f"{self.prefix_groups} prefixes of {self.prefix_tokens} tokens")
        if self.turns > 1:
            parts.append(f"{self.turns} turns")
        if self.adapter:
            parts.append(f"{len(self.adapter)} adapters, skew {self.adapter_skew:g}")
        if self.json_schema:
            parts.append(f"schemas of {self.json_schema[1:]}")
        return ", ".join(parts)
